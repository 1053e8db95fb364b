"""The search finds a verified plan whenever one exists, the same one every time, and can be stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.plain_model import optimum
from support.problems import limited, limited_problems, problems, uniform
from support.reference import all_orders_of_one_microbatch, is_monotone, peak_memory
from zbv_solver.bounds import Bound, BoundEffort, lower_bound
from zbv_solver.construct.attempt import Attempt, from_orders
from zbv_solver.construct.dispatch import ListScheduler, serial
from zbv_solver.construct.rules import simple_rule
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress, Solution
from zbv_solver.search.options import PHASES, Effort, SearchOptions
from zbv_solver.search.phases import Search
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate
from zbv_solver.timing.start_times import objective_of as evaluate_objective
from zbv_solver.verify.verifier import verify, verify_orders

QUICK = SearchOptions(effort="quick")


@given(limited_problems(max_p=8, max_m=16))
@settings(max_examples=30)
def test_every_feasible_limit_gives_a_verified_plan(problem: Problem) -> None:
    plan = search(problem, QUICK)
    verify(plan)
    assert plan.problem == problem
    assert {baseline.name for baseline in plan.baselines} >= {"1f1b", "interleaved-1f1b"}


@given(problems(max_p=8, max_m=32), st.data())
def test_a_limit_below_the_smallest_is_infeasible(problem: Problem, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, problem.pp_degree - 1))
    smallest = problem.smallest_limit
    if smallest[rank] == 0:
        return
    limit = tuple(s - 0.5 if r == rank else s for r, s in enumerate(smallest))
    short = replace(problem, memory=replace(problem.memory, limit=limit))
    with pytest.raises(InfeasibleMemory) as caught:
        search(short, QUICK)
    assert caught.value.ranks == (rank,)
    assert caught.value.smallest == smallest


def test_zero_bubble_with_the_memory_of_1f1b() -> None:
    plan = search(uniform(8, 32, limit=16))
    assert plan.metrics.span == 192
    assert plan.metrics.status == "optimal"
    assert plan.metrics.bubble_rate == 0
    assert max(plan.metrics.peak_memory) == 16


def test_small_cases_are_proved_optimal() -> None:
    plan = search(uniform(2, 4, limit=4, p2p=1, objective="makespan"), SearchOptions(effort="thorough"))
    assert plan.metrics.status == "optimal"


@given(problems(max_p=3, max_m=1, fused=False, objective="makespan"))
def test_one_microbatch_is_scheduled_as_well_as_possible(problem: Problem) -> None:
    """There is little to decide, and even the quick effort decides it correctly."""
    best = min(evaluate(problem, orders).makespan for orders in all_orders_of_one_microbatch(problem))
    assert search(problem, QUICK).metrics.makespan == pytest.approx(best)


@given(limited_problems(max_p=2, max_m=3))
@settings(max_examples=8)
def test_progress_gets_ever_better_and_ends_at_the_optimum_of_a_plain_model(problem: Problem) -> None:
    reports: list[Progress] = []
    plan = search(problem, on_progress=reports.append)
    assert plan.metrics.status == "optimal"
    assert is_monotone([progress.objective for progress in reports])
    assert is_monotone([-progress.lower_bound for progress in reports])
    assert reports[-1].orders == plan.orders
    assert plan.objective <= reports[-1].objective * (1 + 1e-9) + 1e-9
    for progress in reports:
        make_plan(problem, progress.orders, method="test")
    try:
        least = optimum(problem, evaluate_objective(problem, serial(problem).orders), effort=0.05)
    except RuntimeError:
        event("the plain model was too slow")
    else:
        assert plan.objective == pytest.approx(least)


@given(
    limited_problems(max_p=3, max_m=4),
    st.lists(st.sampled_from(PHASES), unique=True).map(tuple),
)
@settings(max_examples=6)
def test_stages_can_be_left_out(problem: Problem, without: tuple[str, ...]) -> None:
    plan = search(problem, SearchOptions(without=without))
    constructed = search(problem, SearchOptions(effort="quick", without=("anneal",)))
    assert plan.objective <= constructed.objective * (1 + 1e-12)
    assert plan.provenance.extra.get("without", []) == list(without)


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=2)
def test_the_number_of_workers_does_not_change_the_plan(problem: Problem) -> None:
    plans = [search(problem, SearchOptions(seed=3, workers=workers)) for workers in (1, 2)]
    assert plans[0].plan_id == plans[1].plan_id


@pytest.mark.parametrize("seed", [6, 21])
def test_threads_do_not_change_which_chain_wins(seed: int) -> None:
    """On these problems tuning meets the bound, in one chain after many more steps than in the other."""
    chance = random.Random(seed)
    forward, backward_input, backward_weight = (
        [chance.randint(8, 12) * base // 10 for _ in range(6)] for base in (10, 12, 8)
    )
    costs = {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
    }
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 12}
    problem = parse_problem(
        {"pp_degree": 3, "microbatches": 8, "objective": "makespan", "costs": costs, "memory": memory}
    )
    plans = [search(problem, SearchOptions(workers=workers)) for workers in (1, 2, 2)]
    assert plans[0].metrics.status == "optimal"
    assert plans[0].provenance.method.startswith("parameters")
    assert len({plan.plan_id for plan in plans}) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_annealing_keeps_the_best_of_all_starts_where_memory_is_tight(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The worst start becomes the best by annealing, so it is one of the two that are annealed to the end."""
    problem = limited(uniform(4, 12, p2p=1), 2.0)
    orders = serial(problem).orders
    calls: list[float] = []

    def annealed(
        problem: Problem, start: Orders, value: float, **_: object
    ) -> Iterator[tuple[float, Orders]]:
        calls.append(value)
        yield value - (50 if value == 106.0 else 1), orders

    monkeypatch.setattr("zbv_solver.search.phases.anneal_in_rounds", annealed)
    running = Search(problem, SearchOptions(workers=workers))
    running.starts = [Solution(value, orders, "start") for value in (101.0, *map(float, range(101, 107)))]
    running.incumbent.accept(running.starts[0])
    running.anneal()

    assert running.incumbent.current is not None
    assert running.incumbent.current.value == 54.0
    assert sorted(calls[:6]) == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0]
    assert sorted(calls[6:10]) == [56.0, 100.0, 101.0, 102.0]
    assert sorted(calls[10:]) == [55.0, 99.0]


def test_only_a_first_plan_that_is_short_enough_gets_a_full_bound() -> None:
    problem = limited(uniform(4, 12), 2.5)
    quick, full = lower_bound(problem, "quick").value, lower_bound(problem).value
    assert quick < full
    plans = []
    for enough in (np.inf, 0.0):
        plans.append(Search(problem, SearchOptions("quick", without=PHASES)).first_plan(enough))
    assert plans[0].objective == plans[1].objective
    assert [plan.metrics.lower_bound for plan in plans] == pytest.approx([full, quick])


def test_a_resumed_search_is_never_worse_than_its_incumbent() -> None:
    problem = limited(uniform(3, 6, p2p=1), 1.0)
    best = search(problem, SearchOptions(without=("tune", "anneal", "windows")))
    assert best.objective < search(problem, QUICK).objective
    resumed = search(problem, QUICK, incumbent=best.orders)
    assert resumed.objective <= best.objective
    worse = search(problem, QUICK, incumbent=serial(problem).orders)
    assert worse.plan_id == search(problem, QUICK).plan_id


@pytest.mark.parametrize("effort", get_args(Effort))
@given(problem=problems(max_p=3, max_m=4, kinds=("v", "loop", "single")), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_a_search_resumes_from_any_verified_order(effort: Effort, problem: Problem, seed: int) -> None:
    orders = random_orders(problem, random.Random(seed))
    peak = tuple(float(amount) for amount in peak_memory(problem, orders))
    problem = replace(problem, memory=replace(problem.memory, limit=peak))
    verify_orders(problem, orders)
    resumed = search(problem, SearchOptions(effort, without=("windows", "exact")), incumbent=orders)
    verify(resumed)
    assert resumed.objective <= evaluate_objective(problem, orders) * (1 + 1e-9)


def test_the_rest_of_an_order_may_follow_weights_in_any_order() -> None:
    """Constructors run the oldest W first; here rank 1 runs the W of its other stage first."""
    problem = uniform(2, 2)
    rows = [
        "0F0 0F1 3F0 3I0 0I0 3F1 3I1 0I1 3W0 3W1 0W0 0W1",
        "1F0 2F0 2I0 1I0 1F1 2F1 1W0 2W0 2I1 1I1 1W1 2W1",
    ]
    start = Orders.from_text([row.split() for row in rows])
    code, length, _ = from_orders(start, problem)
    scheduler = ListScheduler(problem)
    rule = simple_rule(problem, "backward-deep", 1.0, 0.0)
    for until in [*(np.array([4, kept]) for kept in range(4, 9)), length]:
        assert scheduler.value(rule, kept=(code, until)) < float("inf")
        verify_orders(problem, Attempt.of("rest", problem, scheduler.tables, scheduler.board).orders)


def test_an_incumbent_of_another_problem_is_refused() -> None:
    with pytest.raises(InvalidPlan):
        search(uniform(2, 3), QUICK, incumbent=serial(uniform(2, 2)).orders)


def test_a_plan_of_another_problem_is_refused_even_if_its_orders_are_valid() -> None:
    plan = search(uniform(2, 3), QUICK)
    assert search(uniform(2, 3), QUICK, incumbent=plan).plan_id == plan.plan_id
    with pytest.raises(InvalidPlan, match="they differ in costs"):
        search(uniform(2, 3, p2p=1), QUICK, incumbent=plan)
    with pytest.raises(InvalidPlan, match="they differ in"):
        search(uniform(3, 3), QUICK, incumbent=plan)


def test_the_bound_ends_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    ended: list[bool] = []

    def slow(
        problem: Problem, effort: BoundEffort, _enough: float = 0.0, is_stopped: Callable[[], bool] = bool
    ) -> Bound:
        if effort == "quick":
            return lower_bound(problem, effort)
        begun.append(effort)
        until = time.monotonic() + 60
        while not is_stopped() and time.monotonic() < until:
            time.sleep(0.01)
        ended.append(is_stopped())
        return Bound(0.0, "none")

    monkeypatch.setattr("zbv_solver.search.phases.lower_bound", slow)
    search(limited(uniform(4, 8), 2.0), cancelled=lambda: bool(begun))
    assert ended == [True]


def test_a_cancelled_search_keeps_its_incumbent() -> None:
    plan = search(limited(uniform(4, 8), 2.0), cancelled=lambda: True)
    verify(plan)
    assert plan.provenance.extra["cut"] == "cancelled"


def test_a_plan_records_that_a_time_limit_ended_its_search() -> None:
    problem = limited(uniform(4, 16, p2p=1), 2.0)
    began = time.monotonic()
    plan = search(problem, SearchOptions(effort="thorough", time_limit=1e-9))
    verify(plan)
    assert plan.provenance.extra["cut"] == "time limit"
    assert time.monotonic() - began < 60  # thorough would take minutes


def test_a_plan_of_a_complete_search_records_no_cut() -> None:
    assert "cut" not in search(uniform(2, 2), QUICK).provenance.extra


@pytest.mark.parametrize(
    "options",
    [
        {"effort": "heroic"},
        {"time_limit": 0},
        {"time_limit": -1},
        {"time_limit": float("nan")},
        {"workers": 0},
        {"seed": -1},
        {"without": ("construct",)},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        SearchOptions(**options)  # type: ignore[arg-type]  # on purpose
    assert caught.value.issues[0].pointer == f"/{next(iter(options))}"


def test_orders_of_a_caller_are_verified() -> None:
    problem = uniform(1, 1)
    good = Orders.from_text([["0F0", "1F0", "1B0", "0B0"]])
    assert make_plan(problem, good, method="mine").metrics.span == 6
    with pytest.raises(InvalidPlan):
        make_plan(problem, Orders.from_text([["0F0", "1F0", "1B0"]]), method="mine")


@pytest.mark.parametrize("name", ["span", "makespan", "bubble_rate", "peak_memory"])
def test_metrics_of_a_plan_are_checked_by_other_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform(2, 2)
    orders = serial(problem).orders
    right = evaluate(problem, orders)
    wrong: dict[str, Any] = {name: (9.0, 9.0) if name == "peak_memory" else 1.5 * getattr(right, name)}
    monkeypatch.setattr("zbv_solver.search.assemble.evaluate", lambda *_: replace(right, **wrong))
    with pytest.raises(InvalidPlan, match=name):
        make_plan(problem, orders, method="mine", lower_bound=1.0)
