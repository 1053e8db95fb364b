"""Pairs: a forward that runs together with a backward of another microbatch."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import paired_at_random, random_orders
from support.problems import with_communication
from support.reference import Impossible, simulate
from zbv_solver.construct.baselines import baseline_names
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.export.timeline import timeline, timeline_bytes, timeline_facts
from zbv_solver.improve import pair_search
from zbv_solver.improve.annealing import window_starts
from zbv_solver.improve.order_state import Queue
from zbv_solver.improve.pair_search import Move, anneal_pairs
from zbv_solver.improve.pair_state import Costs, State, compute_all, compute_tails
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Deltas, Feature
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import baseline_plan, compare, make_plan
from zbv_solver.search.options import PHASES, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders

SEEDS = st.integers(0, 2**32)
COSTS: dict[str, Any] = {
    "forward": 18,
    "backward_input": 18,
    "backward_weight": 12,
    "communication": {"forward": 6, "backward_input": 6, "backward": 6},
}
PROBLEM = {"pp_degree": 2, "microbatches": 4, "costs": COSTS}


@given(with_communication(), st.integers(0, 2**32))
def test_times_are_those_of_a_plain_simulation_and_no_bound_is_above(problem: Problem, seed: int) -> None:
    random = Random(seed)
    orders = paired_at_random(random_orders(problem, random), random)
    assert Orders.from_text(orders.all_text()) == orders
    try:
        (plain,) = simulate(problem, orders)
    except Impossible:
        for check in (evaluate, verify_orders):
            with pytest.raises(InvalidPlan, match="deadlocks"):
                check(problem, orders)
        return
    timing = evaluate(problem, orders)
    found = [action for rank in range(problem.pp_degree) for action in orders.actions(rank)]
    times = np.array([plain[action] for action in found])
    np.testing.assert_allclose(times, np.stack([timing.start, timing.end], axis=1), rtol=1e-12)
    make_plan(problem, orders, method="random")  # the verifier computes all metrics again


SIZES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=5, max_size=5)


@settings(max_examples=80)
@given(with_communication(), st.none() | SIZES, SEEDS)
def test_with_shorter_forwards_the_same_order_without_pairs_is_no_longer(
    problem: Problem, sizes: list[float] | None, seed: int
) -> None:
    """Lemma 59: so bounds of that problem hold with pairs. Microbatches may differ."""
    if sizes is not None:
        memory = Deltas(*(getattr(problem.memory, each.name) for each in fields(Deltas)))
        values = tuple(sizes[: problem.microbatches])
        feature = Feature("size", values, problem.costs, memory, problem.communication)
        problem = replace(problem, features=(feature,))
    random = Random(seed)
    orders = paired_at_random(random_orders(problem, random), random)
    try:
        timing = evaluate(problem, orders)
    except InvalidPlan:
        return
    shorter = problem.with_forwards_shortened()
    assert shorter.communication is None
    alone = evaluate(shorter, orders.without_pairs())
    assert alone.span <= timing.span * (1 + 1e-9)
    assert alone.makespan <= timing.makespan * (1 + 1e-9)


def test_communication_has_the_shapes_of_costs_and_is_written_in_full() -> None:
    document = {**PROBLEM, "features": {"tokens": [1, 2, 3, 4]}}
    hidden = {"forward": {"tokens": [1, 2]}, "backward": 3}
    document["costs"] = {**COSTS, "communication": hidden, "pair_factor": 1.1}
    problem = parse_problem(document)
    written = problem_json(problem)["costs"]
    assert written["communication"]["forward"] == {"fixed": [0] * 4, "tokens": [1, 1, 2, 2]}
    assert (written["communication"]["backward_input"], written["pair_factor"]) == ([0] * 4, 1.1)
    assert parse_problem(problem_json(problem)) == problem
    assert "communication" not in problem_json(problem.without_pairs())["costs"]


@pytest.mark.parametrize("text", ["0F1+0F2", "0I1+0F2", "0F1+0W2", "0F1+0I2+0I3", "0F1+", "0F1 + 0I2"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"/ranks/0/1: found"):
        Orders.from_text([["0F0", text]])


def test_a_pair_of_one_microbatch_and_pairs_without_communication_are_refused() -> None:
    problem = parse_problem({**PROBLEM, "pp_degree": 1, "microbatches": 2, "placement": "single"})
    same = Orders.from_text([["0F0", "0F1+0I1", "0W1", "0B0"]])
    with pytest.raises(InvalidPlan, match=r"0F1\+0I1 has one microbatch twice"):
        verify_orders(problem, same)
    other = Orders.from_text([["0F0", "0F1+0B0", "0B1"]])
    assert verify_orders(problem, other).duration.sum() == 18 + 36 + 30
    for check in (verify_orders, evaluate):
        with pytest.raises(
            InvalidPlan, match=r"found a pair of actions; the problem .* costs\.communication"
        ):
            check(problem.without_pairs(), other)


@pytest.mark.parametrize("limit", [None, 9])
def test_a_search_is_no_worse_than_dualpipe_and_than_the_best_order_without_pairs(limit: int | None) -> None:
    memory = {"forward": 1, "backward_input": 0, "backward_weight": -1, "limit": limit}
    problem = parse_problem({**PROBLEM, "pp_degree": 4, "microbatches": 12, "memory": memory})
    options = SearchOptions(effort="quick")
    plan, alone = search(problem, options), search(problem.without_pairs(), options)
    assert plan.orders.paired is not None
    spans = {row.name: row.span for row in plan.baselines}
    dualpipe = baseline_plan("dualpipe-v", problem)
    assert dualpipe.orders.paired is not None
    assert plan.metrics.span < spans["dualpipe-v"] == dualpipe.metrics.span < alone.metrics.span


@pytest.mark.parametrize(("placement", "name"), [("loop", "interleaved-1f1b"), ("single", "1f1b")])
def test_a_search_is_no_worse_than_overlapped_orders_of_other_placements(placement: str, name: str) -> None:
    problem = parse_problem({**PROBLEM, "pp_degree": 4, "microbatches": 12, "placement": placement})
    plan = search(problem, SearchOptions(effort="quick", without=PHASES))
    assert plan.metrics.span <= baseline_plan(f"{name}-overlap", problem).metrics.span


def test_a_search_keeps_a_given_order_with_pairs_unless_it_finds_a_shorter_one() -> None:
    problem = parse_problem({**PROBLEM, "pp_degree": 1, "placement": "single"})
    paired = Orders.from_text([["0F0", "0F1+0B0", "0F2+0B1", "0F3+0B2", "0B3"]])
    plan = search(problem, SearchOptions(effort="quick"), incumbent=paired)
    assert plan.metrics.lower_bound <= plan.metrics.span <= evaluate(problem, paired).span


@given(with_communication(), st.integers(0, 2**32))
def test_joining_never_lengthens_an_order_and_changes_nothing_else(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    found = joined(problem, orders)
    assert found.without_pairs() == orders
    assert evaluate(problem, found).peak_memory == evaluate(problem, orders).peak_memory
    assert objective_of(problem, found) <= objective_of(problem, orders) * (1 + 1e-12)
    verify_orders(replace(problem, memory=replace(problem.memory, limit=None)), found)


@settings(max_examples=25)
@given(with_communication(), SEEDS, st.sampled_from([0.1, 1.0, 10.0]))
def test_annealing_never_lengthens_an_order_and_keeps_its_memory_limit(
    problem: Problem, seed: int, factor: float
) -> None:
    start = joined(problem, random_orders(problem, Random(seed)))
    peaks = evaluate(problem, start).peak_memory
    problem = replace(problem, memory=replace(problem.memory, limit=peaks))
    value = objective_of(problem, start)
    rounds = anneal_pairs(
        problem, start, value, rounds=3, moves=30, factor=factor, seed=seed % 1000, halt=np.zeros(1, np.uint8)
    )
    for after, orders in rounds:
        verify_orders(problem, orders)
        assert after <= value
        assert after == objective_of(problem, orders)
        value = after


@pytest.mark.parametrize("moves", range(1, 40))
def test_what_a_round_repairs_is_what_it_would_compute(moves: int) -> None:
    """To the last bit: a wrong tail would let a round refuse moves that gain. Most moves change little."""
    problem = parse_problem({**PROBLEM, "pp_degree": 8, "microbatches": 16})
    orders = joined(problem, next(orders for _, orders in starts(problem)))
    state, kept = State.of(problem, orders), State.of(problem, orders)
    costs = Costs.of(problem, window_starts(problem, orders))
    queue, halt = Queue.of(*state.first.shape), np.zeros(1, np.int64)
    applied, _ = pair_search._round(costs, state, queue, Move.of(state), kept, moves, 5.0, 1, halt)
    assert applied == moves
    fresh = State(*(array.copy() for array in state))
    compute_all(costs, fresh)
    compute_tails(costs, fresh)
    for name in ("end", "tail", "held", "passed_on", "place"):
        np.testing.assert_array_equal(getattr(state, name), getattr(fresh, name), name)


def test_a_search_is_within_half_a_percent_of_the_best_order_known() -> None:
    """CP-SAT with a choice for every pair finds 352.8 in a minute."""
    memory = {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": 5}
    hidden = {"communication": dict.fromkeys(("forward", "backward_input", "backward"), 5.4)}
    problem = parse_problem({**PROBLEM, "costs": {**COSTS, **hidden}, "memory": memory})
    plan = search(problem)
    assert plan.metrics.span <= 352.8 * 1.005
    # Of the first backward's ramp, no F of a rank has a partner.
    assert plan.metrics.lower_bound == pytest.approx(8 * 37.2 + 4 * 10.8)


def test_classical_schedules_are_compared_and_a_pair_is_drawn_as_two_halves() -> None:
    problem = parse_problem({**PROBLEM, "pp_degree": 1, "placement": "single"})
    assert {"1f1b", "zb-h1"} <= {row.name for row in compare(problem)}
    four = parse_problem({**PROBLEM, "pp_degree": 4, "microbatches": 12})
    spans = {row.name: row.span for row in compare(four)}
    for name in ("1f1b", "interleaved-1f1b"):
        assert spans[f"{name}-overlap"] < spans[name]
        assert f"{name}-overlap" not in baseline_names(four.without_pairs())
    # The last rank, whose forwards are followed by their own backwards in 1F1B, has pairs, too.
    assert baseline_plan("1f1b-overlap", four).orders.text(3)[:2] == ["3F0", "3F1+3B0"]
    orders = Orders.from_text([["0F0", "0F1+0B0", "0F2+0B1", "0F3+0B2", "0B3"]])
    drawn = timeline(make_plan(problem, orders, method="known"))
    assert drawn.start.tolist() == [0, 18, 36, 54, 72, 90, 108, 126]
    assert drawn.end.tolist() == [18, 36, 54, 72, 90, 108, 126, 156]
    # The page's script cannot compute these ends from the costs of single actions.
    assert timeline_facts(drawn, problem)["has_ends"]
    ends = np.frombuffer(timeline_bytes(drawn), dtype="<f8", offset=8 * len(drawn), count=len(drawn))
    assert ends.tolist() == drawn.end.tolist()
