"""All cuts of a few layers: none is missing, and what is proved of a cut holds for it."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import layer, layered
from zbv_models.fixed_orders.all_cuts import all_bounds, listed_cuts, proved_of
from zbv_models.fixed_orders.order_search import OrderSearch, order_search
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.partition.runs import WHOLE, First, Recomputed
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.assemble import OwnUnit

SCHEDULES = (megatron_schedule(2, 4, 2), torch_schedule("1F1B", 3, 4), torch_schedule("ZBVZeroBubble", 2, 4))


def model_of(times: list[int], backward: int | None, ranks: int, limit: float | None) -> LayeredProblem:
    memory = {"forward": 1, "backward_input": -1, "backward_weight": 0}
    layers = [
        layer(f"l{at}", time, 2, 1, held=4, backward=backward)
        | {"recompute": {"backward_input": 2 + time, "backward_weight": 1, "memory": memory}}
        for at, time in enumerate(times)
    ]
    return layered(ranks, 4, layers, 1, placement="single", memory={"limit": limit})


def searched(
    times: list[int],
    backward: int | None,
    schedule: Schedule,
    recompute: Recomputed | First | None,
    allow_empty: bool,
    limit: float | None = None,
) -> OrderSearch:
    problem = model_of(times, backward, schedule.placement.pp_degree, limit)
    search = order_search(
        OwnUnit.of(problem), schedule, recompute, allow_empty=allow_empty, late=None, effort="quick"
    )
    search.screen()
    search.estimate()
    return search


problems = (
    st.lists(st.integers(1, 5), min_size=5, max_size=7),
    st.sampled_from([None, 1, 6]),
    st.sampled_from(SCHEDULES),
    st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(*problems, st.floats(0.5, 2.0))
def test_every_cut_is_listed_unless_a_rank_works_too_long(
    times: list[int], backward: int | None, schedule: Schedule, allow_empty: bool, share: float
) -> None:
    search = searched(times, backward, schedule, None, allow_empty)
    runs, n, stages = search.runs, len(times), schedule.placement.n_stages
    inner = combinations_with_replacement(range(n + 1), stages - 1)
    allowed = {bounds for middle in inner if runs.allows(bounds := (0, *middle, n))}
    every = all_bounds(runs)
    assert every is not None
    assert {*map(tuple, every.tolist())} == allowed
    assert len(every) == len(allowed)
    most = share * search.bound / search.problem.microbatches
    kept = all_bounds(runs, most)
    assert kept is not None
    loads = {
        bounds: search.space.worst_load(search.space.cut(bounds, (False,) * stages))
        for bounds in map(tuple, every.tolist())
    }
    # Whole stages may have a cheaper fused backward than their layers one by one.
    assert {*map(tuple, kept.tolist())} >= {bounds for bounds in allowed if loads[bounds] <= most}
    assert all(loads[tuple(bounds)] <= most * (1 + 1e-6) for bounds in kept.tolist()) or backward == 1
    assert all_bounds(runs, most=len(allowed) - 1) is None


@settings(max_examples=30, deadline=None)
@given(*problems, st.sampled_from([None, First(), First(1, 2)]))
def test_no_cut_is_shorter_than_what_is_proved_of_it(
    times: list[int],
    backward: int | None,
    schedule: Schedule,
    allow_empty: bool,
    recompute: First | None,
) -> None:
    search = searched(times, backward, schedule, recompute, allow_empty)
    terms = search.tight_terms()
    assert terms
    cuts = listed_cuts(search.runs, recompute, terms, np.inf)
    assert cuts is not None
    listed = list(cuts)
    assert [bound for bound, _ in listed] == sorted(bound for bound, _ in listed)
    values = [search.runs.value(search.order, choice) for _, choice in listed]
    assert all(bound <= value * (1 + 1e-9) for (bound, _), value in zip(listed, values, strict=True))
    assert search.bound <= min(values) * (1 + 1e-9)
    # The terms are exact for the cut that they were found at.
    assert search.best is not None
    counts = search.runs.counts(search.best[0])
    costs = search.runs.costs(counts, search.runs.again(counts, search.best[1]))
    exact = next(search.order.critical(*costs))
    (proved,) = proved_of(search.runs, [exact], np.array([search.best[0]]), search.best[1]).tolist()
    assert proved == pytest.approx(search.value)


def test_stages_of_whole_cuts_are_recomputed_in_every_way() -> None:
    search = searched([1, 2, 3, 4, 5], None, SCHEDULES[0], None, True)
    cuts = listed_cuts(search.runs, None, [], np.inf)
    assert cuts is not None
    chosen = {choice[1] for _, choice in cuts}
    assert len(chosen) == 2**4
    assert {number for each in chosen for number in each} == {0, WHOLE}


@pytest.mark.parametrize("recompute", [None, (0, 0, 0), First()])
def test_it_is_proved_that_nothing_fits(recompute: Recomputed | First | None) -> None:
    search = searched([1, 2, 3, 4, 5], None, SCHEDULES[1], recompute, False, limit=2.5)
    search.bound_loads()
    assert search.is_infeasible, "by loads and memory, without a list of cuts"
    search.bound = 0.0
    search.finish(np.inf, 1.0)
    assert search.is_infeasible
