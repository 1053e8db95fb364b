"""A backward is not split where W takes no time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Costs
from zbv_solver.search.assemble import without_useless_splits
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders


def with_empty_weights(problem: Problem, stages: set[int]) -> Problem:
    """The problem with W = 0 and B = I in some stages, and B < I + W in no other."""
    costs = problem.costs
    weights = tuple(0.0 if at in stages else w for at, w in enumerate(costs.backward_weight))
    fused = tuple(map(sum, zip(costs.backward_input, weights, strict=True)))
    return replace(
        problem,
        costs=Costs(costs.forward, costs.backward_input, weights, costs.p2p, tuple(map(float, fused))),
    )


@given(problems(fused=False), st.data())
def test_neither_time_nor_memory_grows_and_no_useless_split_is_left(
    problem: Problem, data: st.DataObject
) -> None:
    stages = data.draw(st.sets(st.integers(0, problem.n_stages - 1)))
    problem = with_empty_weights(problem, stages)
    before = random_orders(problem, Random(data.draw(st.integers(0, 99))))
    after = without_useless_splits(problem, before)
    verify_orders(problem, after)
    old, new = evaluate(problem, before), evaluate(problem, after)
    assert new.span <= old.span * (1 + 1e-12)
    assert new.makespan <= old.makespan * (1 + 1e-12)
    assert all(now <= then * (1 + 1e-9) for now, then in zip(new.peak_memory, old.peak_memory, strict=True))
    empty = {at for at, w in enumerate(problem.costs.backward_weight) if w == 0}
    for rank in range(problem.pp_degree):
        splits = {a.stage for a in after.actions(rank) if a.letter in "IW"}
        assert not splits & empty
        others = [a for a in before.actions(rank) if a.stage not in empty]
        assert [a for a in after.actions(rank) if a.stage not in empty] == others


def test_a_split_whose_fused_backward_takes_longer_is_kept() -> None:
    problem = with_empty_weights(parse_problem(document()), {0, 1, 2, 3})
    slow = replace(problem, costs=replace(problem.costs, backward=(9.0,) * 4))
    orders = random_orders(slow, Random(0))
    assert without_useless_splits(slow, orders) == orders


def test_the_planner_splits_only_stages_that_have_a_w() -> None:
    asked = document()
    asked["costs"] |= {"backward_input": [2, 2, 1, 1], "backward_weight": [0, 0, 1, 1]}
    assert letters_by_stage(asked) == {0: "BF", 1: "BF", 2: "FIW", 3: "FIW"}


def test_the_planner_splits_no_stage_of_layers_that_have_no_w() -> None:
    layer = {
        "name": "layer",
        "forward": 1,
        "backward_input": 2,
        "backward_weight": 0,
        "backward": 2,
        "repeat": 8,
    }
    layers = {"pp_degree": 2, "microbatches": 4, "placement": "v", "layers": [layer]}
    assert set(letters_by_stage(layers).values()) == {"BF"}


def document() -> dict[str, Any]:
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "backward": 2, "p2p": 0.05}
    return {"pp_degree": 2, "microbatches": 6, "placement": "v", "costs": costs}


def letters_by_stage(asked: dict[str, Any]) -> dict[int, str]:
    plan = search(parse_any_problem(asked))
    found: dict[int, set[str]] = {}
    for rank in range(plan.problem.pp_degree):
        for action in plan.orders.actions(rank):
            found.setdefault(action.stage, set()).add(action.letter)
    return {stage: "".join(sorted(letters)) for stage, letters in found.items()}
