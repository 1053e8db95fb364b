"""Windows: one over the whole order reaches the optimum, and others change nothing outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited, limited_problems, uniform, with_sizes
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.improve import cp_search
from zbv_solver.improve.annealing import anneal
from zbv_solver.improve.cp_search import CpSearch, refine, sweep_windows
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import earliest_times, objective_of, span_start_times
from zbv_solver.verify.verifier import verify_orders


def starts(problem: Problem, orders: Orders) -> list[float]:
    if problem.objective == "span":
        return list(span_start_times(problem, orders).tolist())
    return list(earliest_times(problem, orders)[0].tolist())


@given(limited_problems(max_p=2, max_m=3, objective="makespan"))
@settings(max_examples=25)
def test_a_window_over_everything_reaches_the_optimum(problem: Problem) -> None:
    """It also chooses between B, and I and W."""
    start = next(priority_schedules(problem)).orders
    best = refine(problem, start, lower_bound=0.0, effort=5.0)
    search = CpSearch(problem, start)
    search.improve(0.0, float("inf"), effort=5.0)
    assert search.value == objective_of(problem, search.orders) == pytest.approx(best.lower_bound)


@given(limited_problems(max_p=3, max_m=5) | differing_problems(), st.floats(0, 0.8), st.floats(0.2, 1))
@settings(max_examples=40)
def test_only_the_window_changes_and_only_to_a_better_order(
    problem: Problem, at: float, share: float
) -> None:
    kind_of = problem.arrays.kind_of
    orders = first_in_first_out(serial(problem).orders, problem.n_stages, kind_of)
    value = objective_of(problem, orders)
    begin, end = at * value, (at + share) * value
    search = CpSearch(problem, orders)
    improved = search.improve(begin, end, effort=0.2)
    event(f"improved: {improved}")
    found = search.orders
    if not improved:
        assert found == orders
        return
    verify_orders(problem, found)
    assert objective_of(problem, found) < value
    times = starts(problem, orders)
    margin = 1e-6 * value
    for rank in range(problem.pp_degree):
        part = times[orders.slice_of(rank)]
        first = sum(time < begin - margin for time in part)
        last = sum(time > end + margin for time in part)
        old, new = kept(orders, rank), kept(found, rank)
        assert old[:first] == new[:first]
        assert old[len(old) - last :] == new[len(new) - last :]


def kept(orders: Orders, rank: int) -> list[tuple[int, str, int]]:
    """A rank's actions; microbatches of W's, which may change places with fused ones, are 0."""
    return [(stage, letter, 0 if letter == "W" else j) for stage, letter, j in orders.actions(rank)]


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


def test_a_window_after_the_end_of_the_order_is_empty() -> None:
    problem = uniform(2, 2)
    assert not CpSearch(problem, serial(problem).orders).improve(1e6, 2e6, effort=1.0)


def test_windows_improve_on_annealing_and_small_windows_on_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = limited(uniform(3, 16, p2p=1, objective="makespan"), 1.0)
    annealed = anneal(problem, serial(problem).orders, moves=3000, temperature=0.1, seed=0)
    found = sweep_windows(problem, annealed.orders, effort=0.1)
    assert found == sweep_windows(problem, annealed.orders, effort=0.1)
    monkeypatch.setattr(cp_search, "SIZES", cp_search.SIZES[:1])
    large = sweep_windows(problem, annealed.orders, effort=0.1)
    assert found is not None
    assert large is not None
    assert objective_of(problem, found) < objective_of(problem, large) < 0.9 * annealed.value


def test_windows_go_from_the_end_to_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform(2, 8)
    orders = serial(problem).orders
    begins = []

    def improve(search: CpSearch, begin: float, end: float, effort: float) -> bool:
        begins.append((begin / search.value, (end - begin) / search.value, effort))
        return False

    monkeypatch.setattr(CpSearch, "improve", improve)
    monkeypatch.setattr(cp_search, "SIZES", (18,))
    # Eight windows of 18 actions, each twice as long as its distance from the next one.
    assert sweep_windows(problem, orders, effort=1.0) is None
    place, length, effort = (np.array(column) for column in zip(*begins, strict=True))
    assert place * 8 + 0.5 == pytest.approx([7, 6, 5, 4, 3, 2, 1, 0])
    assert length == pytest.approx(2 / 8)
    assert effort == pytest.approx(18 * cp_search.EFFORT_PER_ACTION)
