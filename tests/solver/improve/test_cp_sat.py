"""CP-SAT proves optima, improves windows, reports true numbers, and can be stopped."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import count, pairwise, product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited, limited_problems, uniform, with_sizes
from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve import cp_search
from zbv_solver.improve.cp_search import CpSearch, ExactResult, Listener, refine, sweep_windows
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.timing.start_times import earliest_times, objective_of, span_start_times
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.draw import NUMBERS, differing_stages, number_source
from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read


@pytest.mark.parametrize("number", range(10))
def test_proves_the_optimum_over_all_orders_of_microbatches_that_differ(number: int) -> None:
    """The independent model of the soak test proves it, too; its stages run microbatches in any order.

    Its problems are in floats and over decades, with memory within rounding of the limit.
    """
    chance = random.Random(f"cores/{number}")
    document = differing_stages(chance, number_source(chance, NUMBERS[number % len(NUMBERS)]))
    pipeline = read(document)
    if not pipeline.is_feasible():
        with pytest.raises(InfeasibleMemory):
            parse_problem(document).require_feasible()
        return
    best, (problem, unit) = optimum(pipeline, effort=0.02), in_search_unit(parse_problem(document))
    result, value = refined(problem, effort=0.04)
    bounds = [lower_bound(problem, effort).value for effort in get_args(BoundEffort)]
    assert max(result.lower_bound, *bounds) * unit <= float(best.value) * (1 + 1e-9)
    if best.is_exact and result.proved:
        assert value * unit == pytest.approx(float(best.value), rel=1e-8)


def refined(problem: Problem, start: Orders | None = None, **how: Any) -> tuple[ExactResult, float]:
    """What CP-SAT finds from the serial order or another one, and the best objective."""
    start = start or serial(problem).orders
    result = refine(problem, start, **{"lower_bound": 0.0, "effort": 5.0} | how)
    return result, objective_of(problem, result.orders or start)


def test_equal_microbatches_among_others_ascend_where_cp_sat_searches() -> None:
    problem = with_sizes(uniform(2, 4, limit=7.0), [0.0, 2.0, 0.0, 2.0])
    result, _ = refined(problem, serial(problem).orders.renamed(np.array([2, 3, 0, 1])), effort=1.0)
    assert (result.proved, result.orders is not None) == (True, True)
    orders: Any = result.orders
    for stage, letter in product(range(problem.n_stages), (F, W)):
        ran = orders.microbatch[(orders.stage == stage) & (orders.letter == letter)]
        assert [j for j in ran if j % 2 == 0] + [j for j in ran if j % 2] == [0, 2, 1, 3]


THIRDS = Costs((1 / 3,) * 4, (2 / 3,) * 4, (1 / 3,) * 4, (1 / 21,) * 3)
DECADES = {
    **{"forward": 23, "backward_input": 3, "backward_weight": [1.0577287820450975e-05, 359.2738615092226, 1]},
    "backward": [2.1000074041014742, 253.59170305645583, 2.8],
}


@pytest.mark.parametrize(("problem", "effort"), [
    (replace(uniform(2, 3, objective="makespan"), costs=THIRDS), 5.0),
    # As integers, many orders look better. They are skipped.
    (uniform(3, 1, placement="single", costs=DECADES), 0.02),
])  # fmt: skip
def test_costs_without_common_unit_have_a_valid_bound(problem: Any, effort: float, monkeypatch: Any) -> None:
    """Durations are rounded down, and so is the bound."""
    questions, solve = count(), CpSearch._solve
    monkeypatch.setattr(CpSearch, "_solve", lambda *of, **how: (next(questions), solve(*of, **how))[1])
    result, value = refined(problem, effort=effort)
    assert value * (1 - 1e-4) <= result.lower_bound <= value <= serial(problem).value
    assert next(questions) < 60


def test_stops_soon_after_cancellation() -> None:
    problem, end = limited(uniform(4, 12, p2p=1), 3.0), time.monotonic() + 0.1
    result, value = refined(problem, effort=1e6, cancelled=lambda: time.monotonic() > end)
    assert not result.proved  # the effort would take months
    assert value <= serial(problem).value


def test_windows_go_from_the_end_to_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    tight, windows = limited(uniform(2, 8, p2p=1), 1.0), list[tuple[float, float]]()
    start = serial(tight)
    better = sweep_windows(tight, start.orders, effort=0.1)
    assert objective_of(tight, better or start.orders) < 0.9 * start.value

    def improve(search: CpSearch, begin: float, end: float, effort: float) -> bool:
        windows.append((begin / search.value, end / search.value))
        return len(windows) == 3

    monkeypatch.setattr(CpSearch, "improve", improve)
    monkeypatch.setattr(cp_search, "SIZES", (18,))
    assert sweep_windows(tight, start.orders, effort=100.0) is None
    # Eight windows of 18 actions, each twice as long as its distance from the next one.
    place = [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5]
    assert np.array(windows) * 8 == pytest.approx(np.add.outer(place, [-0.5, 1.5]))


def test_a_window_changes_the_order_of_microbatches_that_differ() -> None:
    """Where memory is tight, the large microbatch had better enter last than between two small ones."""
    problem = with_sizes(uniform(2, 3, limit=12.0, objective="makespan"), [5.0, 0.0, 0.0])
    search = CpSearch(problem, serial(problem).orders)
    entered = []
    for _ in range(2):
        is_entry = (search.orders.stage == 0) & (search.orders.letter == F)
        entered.append(search.orders.microbatch[is_entry].tolist())
        search.improve(0.0, float("inf"), effort=1.0)
    assert entered == [[1, 0, 2], [1, 2, 0]]
    assert not search.improve(1e6, 2e6, effort=1.0)  # after the end of the order


KINDS = ("v", "loop", "single")
RELEASED = [1, 1, 1, 2, 1, 2]


@given(
    limited_problems(max_p=2, max_m=3, kinds=KINDS) | limited_problems(max_p=3, max_m=2, kinds=KINDS),
    st.none() | st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
@settings(max_examples=12)
def test_proves_the_optimum_where_memory_is_tight(problem: Problem, alike: list[int] | None) -> None:
    """If the W's of a rank take equally long, the model orders them by what they release."""
    if alike is not None:
        n = problem.n_stages
        forward, inputs, weights = ((float(cost),) * n for cost in alike)
        problem = replace(problem, costs=Costs(forward, inputs, weights, problem.costs.p2p))
    result, value = refined(problem)
    assert result.proved
    assert result.lower_bound == pytest.approx(value)
    best = optimum(read(problem_json(problem)), effort=0.05)
    assert not best.is_exact or float(best.value) == pytest.approx(value)
    if problem.objective == "makespan" and problem.pp_degree < 3:  # as one window
        search = CpSearch(problem, serial(problem).orders)
        search.improve(0.0, float("inf"), effort=5.0)
        assert search.value == objective_of(problem, search.orders) == pytest.approx(value)


@pytest.mark.parametrize(("m", "costs", "held", "released", "limit", "best"), [
    # Of two W's that are ready, the one that releases nothing must run last.
    (2, ([1, 4, 1, 5], [2, 1, 1, 2], 1, 5), [5, 6, 2, 3], [0, 3, 1, 1], [10, 9], 63),
    # Wrong implications of memory or a wrong dominance rule may do no harm in tiny problems.
    (8, ([23, 22, 19, 19, 22, 24], [21, 22, 24, 23, 22, 26], 16, 1), [2, 3] * 3, RELEASED, 9, 1271),
])  # fmt: skip
def test_proves_the_optimum_where_equally_long_weights_release_different_amounts(
    m: int, costs: tuple[Any, ...], held: list[int], released: list[int], limit: Any, best: float
) -> None:
    """The model then orders the W's of a rank: Lemma 29."""
    names = "forward", "backward_input", "backward_weight"
    deltas = held, np.subtract(released, held).tolist(), np.negative(released).tolist()
    memory = dict(zip(names, deltas, strict=True)) | {"limit": limit}
    times = dict(zip((*names, "p2p"), costs, strict=True))
    problem = uniform(len(held) // 2, m, objective="makespan", costs=times, memory=memory)
    start = min(priority_schedules(problem), key=lambda attempt: attempt.value).orders
    result, value = refined(problem, start)
    assert result.proved
    assert value == pytest.approx(best)


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=10)
def test_reports_ever_better_orders_and_bounds_and_repeats_them(problem: Problem) -> None:
    start = serial(problem).orders

    def run() -> tuple[ExactResult, list[tuple[float, Orders]], list[float]]:
        solutions: list[tuple[float, Orders]] = []
        bounds: list[float] = []
        listener = Listener(lambda orders, value: solutions.append((value, orders)), bounds.append)
        return refine(problem, start, lower_bound=0.0, effort=0.1, listener=listener), solutions, bounds

    result, solutions, bounds = run()
    for _, orders in solutions:
        verify_orders(problem, orders)
    worst_first = [objective_of(problem, start), *(value for value, _ in solutions)]
    assert all(later < earlier for earlier, later in pairwise(worst_first))
    assert all(later > earlier for earlier, later in pairwise([0.0, *bounds]))
    assert result.orders is (solutions[-1][1] if solutions else None)
    assert result.lower_bound == (bounds[-1] if bounds else 0.0) <= worst_first[-1] * (1 + 1e-9)
    assert run() == (result, solutions, bounds)


@given(limited_problems(max_p=3, max_m=5) | differing_problems(), st.floats(0, 0.8), st.floats(0.2, 1))
def test_only_a_window_changes_and_gets_better(problem: Problem, at: float, share: float) -> None:
    orders = first_in_first_out(serial(problem).orders, problem.n_stages, problem.arrays.kind_of)
    value = objective_of(problem, orders)
    begin, end, margin = at * value, (at + share) * value, 1e-6 * value
    search = CpSearch(problem, orders)
    if not search.improve(begin, end, effort=0.2):
        assert search.orders == orders
        return
    verify_orders(problem, search.orders)
    assert objective_of(problem, search.orders) < value
    spans = problem.objective == "span"
    start = span_start_times(problem, orders) if spans else earliest_times(problem, orders)[0]
    for rank in range(problem.pp_degree):
        part = start[orders.slice_of(rank)]
        first, last = int((part < begin - margin).sum()), int((part > end + margin).sum())
        # Microbatches of W's may change places with fused ones.
        old, new = (
            [(stage, letter, j * (letter != "W")) for stage, letter, j in of.actions(rank)]
            for of in (orders, search.orders)
        )
        assert old[:first] == new[:first]
        assert old[len(old) - last :] == new[len(new) - last :]
