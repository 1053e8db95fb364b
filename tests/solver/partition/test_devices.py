"""Ranks with different devices and links: documents, costs of stages, and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cuts import BLOCK, EMBEDDING, HEAD, layered
from zbv_models.fixed_orders.best_cut import best_cut
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.refit import with_stage_costs
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.claims import check_plan
from zbv_solver.search.layered import bound_over_all_cuts
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

SLOW = {"slow": {"forward": 6, "backward_input": 5, "memory": {"forward": 3, "backward_weight": -3}}}
LINKS = [{"latency": 1, "bandwidth": 100}, {"latency": 2, "bandwidth": 50}, {"latency": 5, "bandwidth": 25}]


def mixed(**changes: Any) -> LayeredProblem:
    """Ten layers on three ranks, the last of which is slow."""
    layers = [EMBEDDING, {**BLOCK, "on": SLOW}, HEAD]
    body = {"pp_degree": 3, "layers": layers, "devices": ["fast", "fast", "slow"], "costs": {"link": LINKS}}
    return layered(**{**body, **changes})


def made_of(problem: LayeredProblem) -> Problem:
    return problem.cut_into(problem.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10)))


def test_a_stage_costs_what_its_layers_cost_on_the_device_of_its_rank_planned_or_measured() -> None:
    made = made_of(mixed())
    assert list(made.costs.forward) == [3, 2, 12, 6, 4, 7]  # stages 2 and 3 are on rank 2
    assert list(made.costs.backward_input) == [2, 2, 10, 5, 4, 7]
    assert list(made.costs.backward_weight) == [2, 1, 2, 1, 2, 6]
    assert list(made.memory.forward) == [4, 4, 6, 3, 8, 4]
    assert made.arrays.latency[:, 0].tolist() == [2, 4, 0, 4, 2]
    assert list(made.memory.static) == [2, 3, 3]
    around = made_of(mixed(placement="loop"))
    assert list(around.costs.p2p) == [2, 4, 9, 2, 4]
    assert list(around.costs.forward) == [3, 2, 12, 2, 4, 11]
    double = made.costs.mapped(lambda values: tuple(2 * value for value in values), made.costs.p2p)
    measured = with_stage_costs(made, double)
    assert (measured.costs, measured.model and measured.model.devices) == (double, ("fast", "fast", "slow"))
    assert measured.model is not None
    block = measured.model.model.each[3]  # block.2, which is on the slow rank
    assert (block.on[0].costs.forward, block.costs.forward) == (12, 4)


def test_documents_and_plans_keep_devices_and_links() -> None:
    problem = mixed(placement="single", memory={"limit": [60, 60, 30]})
    assert parse_any_problem(layered_json(problem)) == problem
    plan = search(problem, SearchOptions(effort="quick"))
    assert plan.cut is not None
    assert plan.cut.lower_bound <= bound_over_all_cuts(problem) * (1 + 1e-9)
    made = check_plan(plan_json(plan), problem).problem
    assert parse_problem(problem_json(made)) == made == plan.problem
    assert problem.as_cut_in(made) == made
    assert made.model is not None
    assert sum(len(made.model.partition[stage]) for stage in made.placement.stages_of[2]) <= 3
    with pytest.raises(InvalidInput, match="devices of the problem"):
        replace(problem, devices=("slow", "fast", "fast")).as_cut_in(made)
    with pytest.raises(InvalidInput, match="/devices"):
        best_cut(mixed(), [])  # an executor's order needs equal ranks


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"devices": ["fast", "slow"]}, "/devices", "must be 3, one per rank"),
        ({"devices": ["fast", "fast", "fast"]}, "/layers/1/on", "which no rank has"),
        ({"pp_degree": 9, "devices": list("abcdefghi")}, "/devices", "at most 8"),
        ({"costs": {"link": LINKS[:2]}}, "/costs/link", "found 2 links"),
        ({"costs": {"link": [*LINKS[:2], {"bandwidth": 0}]}}, "/costs/link/2/bandwidth", "positive"),
        ({"costs": {"link": [*LINKS[:2], {"latency": 1}]}}, "/costs/link/2/bandwidth", "required"),
        ({"layers": [{**BLOCK, "on": {"slow": {"forward": -1}}}]}, "/layers/0/on/slow/forward", "negative"),
        ({"layers": [{**BLOCK, "on": {"slow": {"recompute": {}}}}]}, "/layers/0/recompute", "absent"),
        (
            {"layers": [{**BLOCK, "on": SLOW, "recompute": {"backward_input": 4}}]},
            "/layers/0/on/slow/recompute",
            "absent",
        ),
        ({"features": {"tokens": [1] * 4}}, "/features", "layers are the same for every microbatch"),
        ({"sequences": [[1]] * 4}, "/sequences", "layers are the same for every microbatch"),
    ],
)
def test_wrong_devices_and_links_are_refused(change: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as error:
        mixed(**change)
    assert pointer in [issue.pointer for issue in error.value.issues]
