"""The search finds a verified plan whenever one exists, the same one every time, and can be stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cuts import layered
from support.orders import random_orders
from support.problems import differing_problems, limited, limited_problems, problems, uniform, with_sizes
from zbv_solver.bounds import Bound, lower_bound
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.problem.cut import Link
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.stages import Copies
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.claims import prove_bound
from zbv_solver.search.incumbent import Halt, Incumbent, Progress, Solution, race, without_useless_splits
from zbv_solver.search.options import BUDGETS, DIFFERING, PHASES, Budget, Effort, SearchOptions
from zbv_solver.search.run import Search, search
from zbv_solver.timing.start_times import evaluate, objective_of
from zbv_solver.verify.verifier import verify, verify_orders

QUICK = SearchOptions(effort="quick")
LITTLE = {"constructed": 100_000, "injected": 10_000, "tuned": 10_000, "annealed": 60_000}
SLOW = limited(uniform(4, 16, p2p=1), 2.0)  # a thorough search would take minutes
LAYERS = layered(placement="auto", microbatches=32, memory={"limit": 30})
COPIED = replace(SLOW, copies=Copies((2.0,) * 8, (2.0,) * 8, SLOW.memory.forward))
COPIED_LAYERS = replace(LAYERS, host=Link(1.0, 1.0))
JITTER = zbv.Jitter.of(action=0.1, transfer=0.3)
RANKS = replace(JITTER, rank=JITTER.rank * 5)
WINNERS = [((5, 2), 1, (6, 3)), ((2, 5), 0, (3, 3)), ((2, 2), 0, (3, 3)), ((None, 2), 1, (9, 3))]


@given(limited_problems(max_p=8, max_m=16) | differing_problems(max_p=4, max_m=8))
@settings(max_examples=20)
def test_every_feasible_limit_gives_a_verified_plan_and_no_other(problem: Problem) -> None:
    """The smallest limits leave room for nothing but what the banker's algorithm admits."""
    with pytest.MonkeyPatch.context() as patch:
        for budgets in (BUDGETS, DIFFERING):
            patch.setitem(budgets, "quick", replace(budgets["quick"], **LITTLE))
        check_plans_at_the_limit(problem)


def check_plans_at_the_limit(problem: Problem) -> None:
    attempts = chain([serial(problem)], priority_schedules(problem))
    for attempt in islice(attempts, 0 if problem.is_equal else 20):
        verify_orders(problem, attempt.orders)
    plan = search(problem, QUICK)
    verify(plan)
    assert plan.problem == problem
    assert {"1f1b", "interleaved-1f1b"} <= {row.name for row in plan.baselines} or not problem.is_equal
    assert plan.metrics.lower_bound <= plan.objective * (1 + 1e-9)
    duration, orders = problem.arrays.duration[..., 0], plan.orders
    is_useless = (duration[W] == 0) & (duration[B] <= duration[I])  # to split there
    assert not (is_useless[orders.stage] & (orders.letter == I)).any() or not problem.is_equal
    rank = int(np.argmax(problem.smallest_limit))
    least = problem.smallest_limit[rank]
    short = limited(problem, tuple(-0.1 * least * (r == rank) for r in range(problem.pp_degree)))
    with pytest.raises(zbv.InfeasibleMemory) if least > 0 else nullcontext() as caught:
        search(short, QUICK)
    assert caught is None or (caught.value.ranks, caught.value.smallest) == ((rank,), problem.smallest_limit)


@given(limited_problems(max_p=2, max_m=3))
@settings(max_examples=5)
def test_progress_gets_ever_better_and_ends_at_the_optimum(problem: Problem) -> None:
    reports: list[Progress] = []
    plan = search(problem, on_progress=reports.append)
    assert (plan.metrics.status, reports[-1].orders) == ("optimal", plan.orders)
    values, bounds = zip(*((progress.objective, progress.lower_bound) for progress in reports), strict=True)
    assert (list(values), list(bounds)) == (sorted(values, reverse=True), sorted(bounds))
    assert plan.objective <= reports[-1].objective * (1 + 1e-9) + 1e-9
    for progress in reports:
        make_plan(problem, progress.orders, method="test")


@pytest.mark.parametrize("workers", [1, 2])
def test_annealing_keeps_the_best_of_all_starts(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """The worst start becomes the best by annealing, so it is one of the two that are annealed to the end."""
    problem, calls = limited(uniform(4, 12, p2p=1), 2.0), list[float]()

    def annealed(_: Any, start: zbv.Orders, value: float, **__: Any) -> Iterator[tuple[float, zbv.Orders]]:
        calls.append(value)
        yield value - (50 if value == 106.0 else 1), start

    monkeypatch.setattr("zbv_solver.search.run.anneal_in_rounds", annealed)
    running: Any = Search(problem, SearchOptions(workers=workers))
    orders, values = serial(problem).orders, (101.0, *map(float, range(101, 107)))
    running.starts = [Solution(value, orders, "start") for value in values]
    running.incumbent.accept(running.starts[0])
    running.anneal()
    assert running.incumbent.current.value == 54.0
    levels = sorted(calls[:6]), sorted(calls[6:10]), sorted(calls[10:])
    assert levels == ([101, 102, 103, 104, 105, 106], [56, 100, 101, 102], [55, 99])


def heavy(p: int, m: int, limit: float | None) -> Problem:
    """Unit costs; every fifth microbatch is five times as large as the others."""
    return with_sizes(uniform(p, m, limit=limit), [4.0 if k % 5 == 2 else 0.0 for k in range(m)])


@pytest.mark.parametrize("effort", ["quick", "standard"])
@given(problem=problems(max_p=3, max_m=4, kinds=("v", "loop", "single")), seed=st.integers(0, 99))
@example(heavy(2, 5, None), 1)
@settings(max_examples=4)
def test_a_search_resumes_from_any_verified_order(effort: Effort, problem: Problem, seed: int) -> None:
    """Also where the stages' orders differ."""
    orders = random_orders(problem, Random(seed))
    peak = tuple(map(float, evaluate(problem, orders).peak_memory))
    problem = replace(problem, memory=replace(problem.memory, limit=peak))
    resumed = search(problem, SearchOptions(effort, without=("windows", "exact")), incumbent=orders)
    verify(resumed)
    assert resumed.objective <= objective_of(problem, orders) * (1 + 1e-9)


def test_the_bound_ends_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def slow(problem: Problem, effort: str, _: float = 0.0, is_stopped: Callable[[], bool] = bool) -> Bound:
        if effort != "quick":
            begun.append(effort)
            until = time.monotonic() + 60
            while not is_stopped():
                assert time.monotonic() < until
        return lower_bound(problem, "quick")

    monkeypatch.setattr("zbv_solver.search.run.lower_bound", slow)
    search(limited(uniform(4, 8), 2.0), cancelled=lambda: bool(begun))
    assert begun


@pytest.mark.parametrize(("meets", "winner", "made"), WINNERS)
def test_the_chain_that_meets_the_bound_in_fewer_steps_wins(meets: Any, winner: int, made: Any) -> None:
    """The other one ends. On one thread the first chain runs before the second; the steps alone decide."""
    best, steps = Incumbent(uniform(2, 2), 1.0, None), [0, 0]

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        for step in range(9):
            steps[number] += 1
            is_met = step == meets[number]
            yield Solution(100.0, serial(uniform(2, 2)).orders, f"chain {number}") if is_met else None

    best.bound = 100.0
    race(chain, best, Halt(None, None))
    assert (best.current and best.current.method, tuple(steps)) == (f"chain {winner}", made)


def test_the_end_of_its_time_stops_the_kernels_of_a_chain() -> None:
    """Rounds of annealing are long: only the flag that kernels poll ends one early."""
    stopped: list[int] = []

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        while not halt.flag[0]:
            time.sleep(0.001)
        stopped.append(number)
        yield None

    race(chain, Incumbent(uniform(2, 2), 1.0, None), Halt(None, None), seconds=0.08)
    assert stopped == [0, 1]


@given(problems(fused=False), st.data())
def test_no_useless_split_is_left_and_nothing_grows(problem: Problem, data: st.DataObject) -> None:
    """Some stages have W = 0 and B = I, and no other stage has B < I + W."""
    costs, stages = problem.costs, data.draw(st.sets(st.integers(0, problem.n_stages - 1)))
    weights = tuple(0.0 if at in stages else w for at, w in enumerate(costs.backward_weight))
    fused = tuple(np.add(costs.backward_input, weights).tolist())
    problem = replace(problem, costs=replace(costs, backward_weight=weights, backward=fused))
    before = random_orders(problem, Random(data.draw(st.integers(0, 99))))
    after = without_useless_splits(problem, before)
    slow = replace(problem, costs=replace(problem.costs, backward=(1e9,) * problem.n_stages))
    assert without_useless_splits(slow, before) == before
    verify_orders(problem, after)
    old, new = evaluate(problem, before), evaluate(problem, after)
    assert max(new.span / (old.span or 1), new.makespan / (old.makespan or 1)) <= 1 + 1e-12
    assert (np.array(new.peak_memory) <= np.multiply(old.peak_memory, 1 + 1e-9)).all()
    empty = {at for at, w in enumerate(problem.costs.backward_weight) if w == 0}
    for rank in range(problem.pp_degree):
        assert not empty & {a.stage for a in after.actions(rank) if a.letter in "IW"}
        others = [a for a in before.actions(rank) if a.stage not in empty]
        assert [a for a in after.actions(rank) if a.stage not in empty] == others


@given(limited_problems(max_p=3, max_m=4), st.lists(st.sampled_from(PHASES), unique=True).map(tuple))
@settings(max_examples=6)
def test_phases_can_be_left_out(problem: Problem, without: tuple[str, ...]) -> None:
    plan = search(problem, SearchOptions(without=without))
    constructed = search(problem, SearchOptions(effort="quick", without=PHASES))
    assert plan.objective <= constructed.objective * (1 + 1e-12)
    assert plan.provenance.extra.get("without", []) == list(without)


def test_threads_do_not_change_which_chain_wins() -> None:
    """On this problem tuning meets the bound, in one chain after many more steps than in the other."""
    chance = Random(6)
    names = {"forward": 10, "backward_input": 12, "backward_weight": 8}
    costs = {name: [chance.randint(8, 12) * base // 10 for _ in range(6)] for name, base in names.items()}
    problem = uniform(3, 8, limit=6, objective="makespan", costs=costs)
    plans = [search(problem, SearchOptions(workers=workers)) for workers in (1, 2, 2)]
    assert (plans[0].metrics.status, plans[0].provenance.method[:10]) == ("optimal", "parameters")
    assert len({plan.plan_id for plan in plans}) == 1


def test_a_bad_incumbent_changes_no_plan_a_good_one_is_kept_and_one_of_another_problem_refused() -> None:
    """A plan is refused even if its orders are valid."""
    problem, plan = uniform(2, 3), search(uniform(2, 3), QUICK)
    for same in (plan, serial(problem).orders):
        assert search(problem, QUICK, incumbent=same).plan_id == plan.plan_id
    tight, constructed = limited(uniform(4, 8, p2p=1), 2.0), replace(QUICK, without=PHASES)
    good = search(tight, QUICK)
    assert search(tight, constructed).objective > good.objective
    assert search(tight, constructed, incumbent=good).objective == good.objective
    with pytest.raises(zbv.InvalidPlan, match="microbatch"):
        search(problem, QUICK, incumbent=serial(uniform(2, 2)).orders)
    with pytest.raises(zbv.InvalidPlan, match="they differ in costs"):
        search(uniform(2, 3, p2p=1), QUICK, incumbent=plan)


@pytest.mark.parametrize("seconds", [None, 1e-9, 0.3])
@pytest.mark.parametrize(
    ("problem", "jitter"),
    [(SLOW, None), (LAYERS, None), (SLOW, JITTER), (COPIED, None), (COPIED_LAYERS, None)],
)
def test_a_search_that_ends_early_has_a_plan_and_says_why(
    problem: Any, jitter: Any, seconds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is the processor time, which other processes do not use up."""
    for module in ("incumbent", "run", "layered", "offload", "layered_copies"):
        clock = SimpleNamespace(monotonic=time.process_time)
        monkeypatch.setattr(f"zbv_solver.search.{module}.time", clock)
    is_cancelled = seconds is None
    plan = zbv.plan(problem, "thorough", time_limit=seconds, jitter=jitter, cancelled=lambda: is_cancelled)
    verify(plan)
    assert plan.provenance.extra["cut"] == ("cancelled" if is_cancelled else "time limit")
    if seconds == 0.3 and jitter is None:
        assert all(row.span >= plan.objective * (1 - 1e-9) for row in plan.baselines if row.fits)


@pytest.mark.parametrize(("pointer", "options"), [
    *(("/time_limit", {"time_limit": seconds}) for seconds in (0, -1, math.nan, math.inf)),
    *(("/effort", {"effort": "heroic"}), ("/workers", {"workers": 0})),
    *(("/seed", {"seed": seed}) for seed in (-1, 2**31)),
    *(("/quantile", {"quantile": q, "jitter": JITTER}) for q in (0.49, 0.995, math.nan)),
    ("/quantile", {"quantile": 0.95}),
    *(
        ("/jitter/rank", {"problem": of, "jitter": replace(JITTER, rank=JITTER.rank * 5)})
        for of in (SLOW, LAYERS)
    ),
])  # fmt: skip
def test_wrong_options_are_refused(pointer: str, options: Any) -> None:
    with pytest.raises(zbv.InvalidInput) as caught:
        zbv.plan(**{"problem": SLOW} | options)
    assert caught.value.issues[0].pointer == pointer
    with pytest.raises(zbv.InvalidInput, match="/without: found 'construct'"):
        SearchOptions(without=("construct",))


def test_orders_and_metrics_are_checked_by_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, good = uniform(1, 1), zbv.Orders.from_text([["0F0", "1F0", "1B0", "0B0"]])
    assert make_plan(problem, good, method="mine").metrics.span == 6
    short = zbv.Orders.from_text([["0F0", "1F0", "1B0"]])
    for of, orders in (problem, short), (uniform(1, 1, limit=1), good):
        with pytest.raises(zbv.InvalidPlan):
            make_plan(of, orders, method="mine")
    right = evaluate(problem, good)
    for name in ("makespan", "span", "bubble_rate"):
        wrong = replace(right, **{name: 7.0})  # type: ignore[arg-type]  # of three fields, all of them floats
        monkeypatch.setattr("zbv_solver.search.assemble.evaluate", lambda *_, wrong=wrong: wrong)
        with pytest.raises(zbv.InvalidPlan, match=name):
            make_plan(problem, good, method="mine", lower_bound=1.0)


def test_weaker_bounds_are_not_reported_and_the_best_order_may_be_in_reserve() -> None:
    reports: list[Progress] = []
    incumbent, orders = Incumbent(uniform(2, 2), 1.0, reports.append), serial(uniform(2, 2)).orders
    incumbent.accept(Solution(5.0, orders, "current"))
    for bound, source in ((3.0, "bounds"), (3.0, "cp-sat"), (2.0, "cp-sat")):
        incumbent.raise_bound(bound, source)
        assert (incumbent.bound, incumbent.source, len(reports)) == (3.0, "bounds", 2)
    incumbent.raise_bound(4.0, "cp-sat")
    assert (incumbent.bound, incumbent.source, len(reports)) == (4.0, "cp-sat", 3)
    for value, best in ((6.0, 5.0), (4.0, 4.0), (4.5, 4.0)):
        incumbent.put_aside(Solution(value, orders, "reserve"))
        assert (incumbent.best and incumbent.best.value) == best
    assert (incumbent.current and incumbent.current.value, incumbent.is_optimal) == (5.0, True)


@pytest.mark.parametrize("steps_of_first", [10, None])
def test_one_worker_divides_the_time(monkeypatch: pytest.MonkeyPatch, steps_of_first: int | None) -> None:
    """The second chain may use the time that the first one leaves; every step takes a second."""
    now, steps = 0.0, [0, 0]
    monkeypatch.setattr("zbv_solver.search.incumbent.time", SimpleNamespace(monotonic=lambda: now))

    def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
        nonlocal now
        while number == 1 or steps[0] != steps_of_first:
            now += 1.0
            steps[number] += 1
            yield None

    race(chain, Incumbent(uniform(2, 2), 1.0, None), Halt(None, None), seconds=800)
    assert steps == pytest.approx([400, 400] if steps_of_first is None else [10, 790], abs=4)


def test_the_given_order_does_not_matter() -> None:
    """The search chooses where a large microbatch enters, wherever the caller has it."""
    values = []
    for large in (0, 5):
        plan = search(with_sizes(uniform(4, 8), [9.0 * (k == large) for k in range(8)]), QUICK)
        entry = plan.orders.microbatch[(plan.orders.stage == 0) & (plan.orders.letter == F)]
        assert entry[0] != large  # the first microbatch delays all ranks
        values.append(plan.objective)
    assert max(values) <= 1.02 * min(values)
    # Equal features give the plan of equal microbatches.
    problem = with_sizes(uniform(4, 8, limit=16), [1.0] * 8)
    assert search(problem, QUICK).orders == search(problem.averaged(), QUICK).orders


BUDGET = Budget(2_000, 0.75, 160_000, 1_000, 5_600, 84, 400_000, 2_600, 0, 120, 0.01, 60, 0.01)
WORSE = [
    with_sizes(uniform(3, len(size), limit=12.8, p2p=1), size)
    for size in ([1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 1.0, 3.0, 0.5], [0.0, 1.0, 3.0, 0.5, 0.0, 2.0, 2.0])
]
"""The larger budget alone finds less here, because it leads random choices elsewhere."""


@given(differing_problems(max_p=3, max_m=6))
@example(WORSE[0])
@example(WORSE[1])
@settings(max_examples=4)
def test_thorough_is_never_worse_than_standard(problem: Problem) -> None:
    more = replace(BUDGET, tuned=11_200, annealed=800_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbv_solver.search.options.DIFFERING", {"standard": BUDGET, "thorough": more})
        standard, thorough = (search(problem, SearchOptions(effort)) for effort in get_args(Effort)[1:])
    verify(thorough)
    assert thorough.objective <= standard.objective * (1 + 1e-9)
    assert thorough.metrics.lower_bound >= standard.metrics.lower_bound * (1 - 1e-9)


def test_cp_sat_proves_a_small_plan_optimal() -> None:
    problem = heavy(2, 4, 30.0)
    plan = search(problem, SearchOptions(without=("tune", "inject")))
    assert plan.metrics.status == "optimal"
    assert lower_bound(problem, "thorough").value < plan.metrics.lower_bound
    assert "CP-SAT" in prove_bound(plan, plan.metrics.lower_bound)
