"""Lower bounds: below every order, equal to proven optima where load, paths or memory decide."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain, combinations, count, islice
from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.best_orders import Case, PassingOrder, best_with_copies
from support.orders import fitting_orders
from support.problems import differing_problems, limited_problems, uniform, with_sizes
from zbv_solver.bounds import BoundEffort, few_ranks, lower_bound
from zbv_solver.bounds.copies import engine_bounds
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.bounds.differing_ramps import Ramps
from zbv_solver.bounds.directions import may_fuse
from zbv_solver.bounds.few_ranks import FewRanks, few_ranks_bound
from zbv_solver.bounds.overtaking import passing_of_ranks
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.improve.cp_search import refine
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import LETTERS, B, I, Objective, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate, objective_of, span_start_times
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.checks import all_heads_and_tails
from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read

KINDS = ("v", "loop", "single")
EFFORTS = get_args(BoundEffort)
PAIRS = 300_000
DELTAS = ("forward", "backward_input", "backward_weight")
MEMORY: dict[str, Any] = dict(zip(DELTAS, (2, -1, -1), strict=True))
heads_and_tails = cache(all_heads_and_tails)


def problem_of(p: int, m: int, costs: Any, held: Any = (2, -1, -1), limit: Any = None, **more: Any) -> Any:
    """``costs`` are those of F, I and W, and the latency; ``held`` are the deltas of memory."""
    memory = dict(zip(DELTAS, held, strict=True)) | {"limit": limit}
    return uniform(p, m, costs=dict(zip((*DELTAS, "p2p"), costs, strict=True)), memory=memory, **more)


def tight(m: int, **more: Any) -> Any:
    return problem_of(4, m, (18, 18, 12, 1), limit=8, **more)


EARLY = problem_of(2, 2, ([9, 7, 9, 8], [4, 11, 14, 12], [2, 8, 2, 3], 0), (2, 0, -2))
HELD = ([0.3, 0, 0, 10_000_000.3], 0, [-0.3, 0, 0, -10_000_000.3])
UNLIKE = problem_of(2, 3, (1, 1, 1, 2), HELD, 10_000_000.9, objective="makespan")
PROVEN: dict[str, tuple[Problem, float, float]] = {
    # 8 F, 8 I, 6 transfers each way, and the last W.
    "path of one microbatch": (uniform(4, 1, p2p=2), 41, 1),
    "load": (uniform(4, 16), 96, 1),
    # Rank 3's first input comes after 3 F, so it ends no earlier than 3 + 6 m.
    "first input and last gradient": (uniform(4, 16, objective="makespan"), 99, 1),
    # Every further microbatch costs its whole path.
    "one microbatch at a time": (uniform(3, 4, limit=2, objective="makespan"), 43, 1),
    # The innermost rank starts late, its last I comes early, and not all its W's can wait.
    "late innermost rank": (problem_of(4, 8, (10, 16, 4, 0.5), limit=16), 551, 0.995),
    "shorter backwards": (problem_of(4, 8, (10, 14, 6, 0.5), limit=16), 527, 0.995),
    "longer backwards": (problem_of(4, 8, (10, 20, 10, 0.5), limit=16), 687, 0.995),
    "another rank works before the window": (EARLY, 106, 0.9),
    "both ramps overlap": (problem_of(2, 1, (8, 5, 8, 1), (2, 0, -2)), 64, 0.9),
    # Two cells of 0.3 fit next to one of 10,000,000.3, although the floats differ by less than 0.6.
    "a small chunk next to a large one": (UNLIKE, 30, 0.8),
    # The second one follows by I on both stages of a rank, and its own W.
    "two large microbatches": (with_sizes(uniform(3, 2), [9.0, 9.0]), 150, 1),
}
"""Problems with optima that CP-SAT proved, and the least share of it that the bound reaches."""


@pytest.mark.parametrize("name", PROVEN)
def test_a_bound_is_close_to_a_proven_optimum_and_not_above(name: str) -> None:
    problem, best, share = PROVEN[name]
    assert share * best * (1 - 1e-9) <= lower_bound(problem).value <= best * (1 + 1e-9)


def test_the_longest_microbatch_takes_its_whole_path() -> None:
    """40 times 4 F's, 4 I's and a W."""
    assert lower_bound(with_sizes(uniform(2, 3), [0.0, 39.0, 0.0]), "quick").value == pytest.approx(40 * 9)


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_two_ranks_have_the_optimum_where_memory_is_tight(objective: str) -> None:
    """CP-SAT proved 1068, 1516 and 1964 for the makespan of 8, 12 and 16 microbatches: 112 each."""
    problems = [tight(m, objective=objective) for m in (8, 12, 16, 4000)]
    values = [lower_bound(problem, "thorough").value for problem in problems]
    assert values == [1068, 1516, 1964, 1964 + 112 * 3984]


def test_an_empty_ramp_of_a_long_run_is_seen() -> None:
    """Only the ends of a long run are looked at; what memory costs there is there at any length."""
    runs = [uniform(8, m, limit=12, objective="makespan") for m in (64, 2000)]
    gains = [lower_bound(run).value - lower_bound(run, "quick").value for run in runs]
    assert 0 < gains[0] == pytest.approx(gains[1], rel=1e-9)


@given(limited_problems(max_p=2, max_m=2, kinds=KINDS))
@settings(max_examples=20)
def test_never_above_the_proven_optimum(problem: Problem) -> None:
    best = proven_best(problem)
    assert lower_bound(problem, "thorough").value <= objective_of(problem, best) * (1 + 1e-9) + 1e-9
    assert_keeps_all_bounds(problem, best)


def proven_best(problem: Problem) -> Orders:
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    assume(result.proved)
    return result.orders or start


@given(limited_problems(max_p=4, max_m=5, kinds=KINDS) | differing_problems(), st.integers(0, 1000))
@settings(max_examples=100)
def test_every_random_order_keeps_all_bounds(problem: Problem, seed: int) -> None:
    bounds = [lower_bound(problem, effort).value for effort in EFFORTS]
    assert bounds == sorted(bounds)
    assert bounds[1] >= max(problem.busy_time(rank) for rank in range(problem.pp_degree)) * (1 - 1e-12)
    constructed = (attempt.orders for attempt in islice(priority_schedules(problem), 4))
    for orders in chain(fitting_orders(problem, Random(seed), 5), constructed):
        verify_orders(problem, orders)
        assert bounds[-1] <= objective_of(problem, orders) * (1 + 1e-9) + 1e-9
        if problem.is_equal:
            assert_keeps_all_bounds(problem, orders)


def assert_keeps_all_bounds(problem: Problem, orders: Orders) -> None:
    """In the objective's window, every action starts at its head or later and ends before its tail."""
    least_head, least_tail = heads_and_tails(problem)
    orders = split_where_fusing_never_pays(problem, orders)
    spans = problem.objective == "span"
    start = span_start_times(problem, orders) if spans else evaluate(problem, orders).start
    end = start + problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    slack = 1e-9 * (1 + end.max())
    cell = np.where(orders.letter == B, I, orders.letter), orders.stage, orders.microbatch
    for rank in range(problem.pp_degree):
        part = orders.slice_of(rank)
        window = part if spans else slice(None)
        assert (start[part] - start[window].min() >= least_head[cell][part] - slack).all()
        assert (end[window].max() - end[part] >= least_tail[cell][part] - slack).all()


def split_where_fusing_never_pays(problem: Problem, orders: Orders) -> Orders:
    """The same order with I and W in place of every B that cannot pay, numbered in order."""
    pays = may_fuse(problem)
    ranks = [
        [
            (stage, letter, j)
            for stage, name, j in orders.actions(rank)
            for letter in ([I, W] if name == "B" and not pays[stage] else [LETTERS.index(name)])
        ]
        for rank in range(problem.pp_degree)
    ]
    return first_in_first_out(Orders.pack(ranks), problem.n_stages)


def set_of_ranks(problem: Problem, chosen: int) -> tuple[int, ...]:
    ranks = tuple(rank for rank in range(problem.pp_degree) if chosen >> rank & 1)
    return ranks or (problem.pp_degree - 1,)


def bound_of(problem: Problem, ranks: tuple[int, ...]) -> float:
    few = FewRanks.of(problem, ranks)
    return 0.0 if few is None else few_ranks_bound(few, problem.microbatches, PAIRS)[0]


@given(limited_problems(max_p=2, max_m=3, kinds=KINDS), st.integers(0, 3))
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
def test_all_ranks_have_the_optimum_and_fewer_never_more(problem: Problem, chosen: int) -> None:
    problem = replace(problem, objective="makespan", costs=replace(problem.costs, backward=None))
    assume(not may_fuse(problem).any())
    best = objective_of(problem, proven_best(problem))
    assert bound_of(problem, set_of_ranks(problem, chosen)) <= best * (1 + 1e-9)
    whole = bound_of(problem, tuple(range(problem.pp_degree)))
    assert whole == 0.0 or whole == pytest.approx(best, rel=1e-8)


@given(limited_problems(max_p=3, max_m=2), st.integers(1, 7), st.integers(10, 30))
@settings(max_examples=20)
def test_the_steady_state_is_no_more_than_all_layers_give(problem: Problem, chosen: int, m: int) -> None:
    few: Any = FewRanks.of(problem, set_of_ranks(problem, chosen))
    assume(few is not None)
    with pytest.MonkeyPatch.context() as patch:
        exact, early = (few_ranks_bound(few, m, pairs)[0] for pairs in (PAIRS, PAIRS // 50))
        patch.setattr(few_ranks, "_repeats", lambda *_: (0, 0))
        patch.setattr(few_ranks, "_best_shift", lambda *_: (0, 0))
        layers = few_ranks_bound(few, m, 10 * PAIRS)[0]
    assume(layers > 0)
    assert max(early, exact) <= layers * (1 + 1e-12)


def test_few_ranks_are_tried_only_where_memory_is_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_ranks, "few_ranks_bounds", lambda *_: iter([((3,), np.inf)]))
    values = [lower_bound(uniform(4, 8, limit=limit), "thorough").value for limit in (None, 8, 2)]
    assert np.isinf(values).tolist() == [False, False, True]


def test_a_bound_that_is_given_up_is_the_best_so_far() -> None:
    problem, asked = tight(8), count()
    stopped = lower_bound(problem, "thorough", is_stopped=lambda: next(asked) >= 20)
    assert next(asked) < 30, "it goes on after the stop"
    known = lower_bound(problem).value
    assert known <= stopped.value < lower_bound(problem, "thorough").value
    assert lower_bound(problem, "thorough", is_stopped=lambda: True).value == known
    few: Any = FewRanks.of(problem, (2, 3))
    value, used = few_ranks_bound(few, 8, 1000)  # too few pairs
    assert (value, used < 2000) == (0.0, True)


def test_ranks_without_work_have_a_bound() -> None:
    for p2p in (0, 3):
        problem = problem_of(4, 8, (0, 0, 0, p2p), limit=8)
        assert 0.0 <= lower_bound(problem, "thorough").value <= serial(problem).value


def test_large_microbatches_run_one_after_another_where_memory_holds_only_one() -> None:
    """The independent model proves the optimum over all orders; what others hold meanwhile decides it."""
    problem = problem_of(2, 3, (2, 3, 1, 1), limit=10, placement="single", objective="makespan")
    problem = with_sizes(problem, [4.0, 3.0, 0.0])
    best = optimum(read(problem_json(problem)), effort=2.0)
    assert best.is_exact
    quick, full = (lower_bound(problem, effort).value for effort in ("quick", "full"))
    assert quick < 0.7 * float(best.value)
    assert 0.95 * float(best.value) <= full <= float(best.value) * (1 + 1e-9)


@pytest.mark.parametrize(("limit", "above_load"), [(5.0, 0.22), (8.0, 0.02)])
def test_ramps_cost_most_where_memory_is_tight(limit: float, above_load: float) -> None:
    """Ranks wait idly for the first backwards, unless memory holds enough. 8 is 1F1B's peak."""
    problem = with_sizes(uniform(4, 6, limit=limit), [0.05 * (j % 4) for j in range(6)])
    load, bound = problem.busy_time(0), lower_bound(problem)
    assert lower_bound(problem, "quick").value < 1.02 * load
    assert bound.value == pytest.approx((1 + above_load) * load, rel=0.01)
    assert ("ramps" in bound.reason) == (limit == 5.0)


def ramps_of(problem: Problem, rank: int, window: int | None) -> Ramps:
    return Ramps.of(problem, MicrobatchPaths.of(problem), rank, window)


@pytest.mark.parametrize("window", [0, 3, None])
def test_what_fits_before_and_after_a_time(window: int | None) -> None:
    """The innermost of four ranks: F's of two microbatches fit before the first returns."""
    ramps = ramps_of(with_sizes(uniform(4, 6, limit=4.0), [0.0] * 5 + [1e-9]), 3, window)
    arrives = 0 if window == 3 else 3
    # Either of the two may be back at 9. A W holds half of a cell.
    assert [ramps.early(arrives + time).work for time in (0, 1, 8, 9)] == pytest.approx([0, 1, 4, 6])
    assert ramps.late(0.0).work == pytest.approx(8 if window == 0 else 0)


def test_a_small_microbatch_counts_in_one_ramp_only() -> None:
    """It returns before the others; whether it does so first or last, the ranks wait for the large ones."""
    problem = with_sizes(uniform(4, 8, limit=10.0), [0.0] + [1.0] * 7)
    ramps, load = ramps_of(problem, 3, 0), problem.busy_time(3)
    assert ramps.bound() < 1.05 * load < 1.1 * load < ramps.later(1).bound() <= lower_bound(problem).value
    # Memory holds two of the large ones, which are 90 percent of the work.
    problem = with_sizes(uniform(4, 12, limit=40.0), [0.0, 0.01, 0.02, 0.03, 0.04, 0.05] + [9.0] * 6)
    ramps = ramps_of(problem, 3, 0)
    assert ramps.small() == 6
    assert lower_bound(problem).value >= ramps.later(6).bound() > 1.1 * problem.busy_time(3)


def test_bounds_of_pairs() -> None:
    """Microbatches of two kinds are a pair, too; one alone is none; and small ones add to the bound."""
    for sizes, alone, bound in (
        ([9.0, 9.0], 140, 150),
        ([9.0, 9.0 + 1e-9], 140, 150),
        ([9.0], 130, 0),
        ([0.0, 9.0, 1.0, 9.0, 0.0], 144, 150 + 1 + 2 + 1),
    ):
        passing = passing_of_ranks(with_sizes(uniform(3, 1), sizes))
        assert max(of.alone() for of in passing) == pytest.approx(alone)
        assert max(of.of_pairs() for of in passing) == pytest.approx(bound)


@pytest.mark.parametrize("number", [0, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19])
def test_no_case_proves_more_than_the_best_order_of_its_kind(number: int) -> None:
    """Two microbatches pass each other in three ways, and have a bound for each: Lemma 58."""
    chance = Random(f"cases/{number}")
    problem = any_sizes(chance)
    rank = chance.randrange(problem.pp_degree)
    one, two = chance.sample(range(problem.microbatches), 2)
    passing = passing_of_ranks(problem)[rank]
    b, c = (problem.arrays.kind_of[[each]] for each in (one, two))
    others = float((passing.cost @ passing.count - passing.cost[b] - passing.cost[c])[0])
    turns = passing.turns
    bounds: dict[tuple[Case, tuple[int, ...]], Any] = {
        ("leaves last", ()): passing.leaves_last(b, c),
        ("overtakes", ()): passing.overtakes(b, c),
    }
    for within in chain.from_iterable(combinations(turns, size) for size in range(len(turns) + 1)):
        bounds["leads", within] = passing.leads_within(b, c, within)
    for (case, within), bound in bounds.items():
        shortest = PassingOrder(problem, rank, one, two).shortest(case, turns, within)
        assert shortest is None or bound[0] + others <= shortest * (1 + 1e-9), (case, within)


def any_sizes(chance: Random) -> Problem:
    """Two or three microbatches without anything in common, and ample memory; transfers may be long."""
    shapes = [(1, "v", 2), (1, "loop", 3), (2, "v", 2), (2, "loop", 2), (3, "single", 1), (3, "v", 2)]
    p, placement, chunks = chance.choice(shapes)
    m = chance.choice([2, 3, 3])
    features = {f"is_{j}": [float(j == k) for k in range(m)] for j in range(m)}
    values = chance.choice([(0, 1, 4), (1, 2, 3), (1, 1, 10), (2, 3, 9)])

    def amounts(*of: int, length: int = p * chunks) -> dict[str, list[float]]:
        return {name: [float(chance.choice(of)) for _ in range(length)] for name in features}

    costs = {name: amounts(*values) for name in ("forward", "backward_input")}
    costs["backward_weight"] = amounts(*chance.choice([(0,), values]))
    costs["p2p"] = amounts(*chance.choice([(0,), (0, 5), (0, 3, 20)]), length=p * chunks - 1)
    return uniform(p, m, placement=placement, chunks=chunks, features=features, costs=costs, memory=None)


@st.composite
def small_with_copies(draw: st.DrawFn) -> Problem:
    """Problems of integers with copies, small enough for CP-SAT to find most optima."""
    p, m, chunks = draw(st.sampled_from([(1, 3, 2), (2, 2, 2), (2, 3, 1), (3, 2, 1), (3, 3, 1)]))
    length = st.lists(st.integers(1, 6), min_size=p * chunks, max_size=p * chunks)
    placement = {"placement": "v"} if chunks == 2 else {"placement": "single"}
    costs: dict[str, Any] = dict(zip(DELTAS, draw(st.tuples(length, length, length)), strict=True))
    costs |= {"p2p": draw(st.integers(0, 2)), "offload": draw(length), "reload": draw(length)}
    limit = draw(st.integers(2 * chunks, 3 * chunks))
    memory = MEMORY | {"limit": limit, "offloadable": draw(st.integers(1, 2))}
    document = {"pp_degree": p, "microbatches": m, "costs": costs, "memory": memory, **placement}
    return parse_problem(document | {"objective": draw(st.sampled_from(get_args(Objective)))})


@given(small_with_copies())
@settings(max_examples=4, deadline=None)
def test_with_copies_the_plan_is_as_good_as_the_best_order_and_no_bound_is_above_it(problem: Problem) -> None:
    plan = search(problem, SearchOptions("standard"))
    best, is_exact = best_with_copies(problem, plan.objective, effort=0.5)
    for bound in (lower_bound(problem, "thorough").value, plan.metrics.lower_bound):
        assert bound <= best * (1 + 1e-9)
    assert plan.objective <= best * 1.005, "CP-SAT found a better order"
    assert not is_exact or plan.objective >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    ("copy", "host", "moved", "bound"),
    [
        # A microbatch holds 2 for 150 on rank 0, of which it is away for 114, and 1 for 12.
        (1000, None, 2, 16 * 312 / 4),
        (10, None, 2, 16 * (312 - 2 * (114 - 20)) / 4),
        (10, None, 1, 16 * (312 - 1 * (114 - 20)) / 4),
        (10, 2, 2, 16 * 312 / 6),
    ],
)
def test_what_copies_save_is_memory_times_the_time_that_activations_are_on_the_host(
    copy: float, host: float | None, moved: float, bound: float
) -> None:
    costs = dict(zip((*DELTAS, "p2p"), (18, 18, 12, 1), strict=True)) | {"offload": copy}
    memory = MEMORY | {"limit": 4, "host_limit": host, "offloadable": moved}
    problem: Any = uniform(4, 16, costs=costs, memory=memory, placement="single")
    assert max(engine_bounds(problem, problem.copies)) == pytest.approx(bound)
