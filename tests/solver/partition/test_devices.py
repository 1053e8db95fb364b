"""Ranks with different devices and links: documents, costs of stages, cuts, and bounds over all cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cuts import BLOCK, EMBEDDING, HEAD, every_cut, layered, worst_load
from zbv_models.fixed_orders.best_cut import best_cut
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.refit import with_stage_costs
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
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
    body = {
        "pp_degree": 3,
        "layers": [EMBEDDING, {**BLOCK, "on": SLOW}, HEAD],
        "devices": ["fast", "fast", "slow"],
        "costs": {"link": LINKS},
    }
    return layered(**{**body, **changes})


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def test_a_stage_costs_what_its_layers_cost_on_the_device_of_its_rank() -> None:
    problem = mixed()
    made = problem.cut_into(problem.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10)))
    assert list(made.costs.forward) == [3, 2, 12, 6, 4, 7]  # stages 2 and 3 are on rank 2
    assert list(made.costs.backward_input) == [2, 2, 10, 5, 4, 7]
    assert list(made.costs.backward_weight) == [2, 1, 2, 1, 2, 6]
    assert list(made.memory.forward) == [4, 4, 6, 3, 8, 4]
    assert made.arrays.latency[:, 0].tolist() == [2, 4, 0, 4, 2]  # rank 2 hosts stages 2 and 3
    assert list(made.memory.static) == [2, 3, 3]
    loop = mixed(placement="loop")
    around = loop.cut_into(loop.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10)))
    assert list(around.costs.p2p) == [2, 4, 9, 2, 4]
    assert list(around.costs.forward) == [3, 2, 12, 2, 4, 11]


def test_documents_keep_devices_and_links() -> None:
    problem = mixed()
    assert parse_any_problem(layered_json(problem)) == problem
    made = problem.cut_into(problem.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10)))
    assert parse_problem(problem_json(made)) == made
    assert problem.as_cut_in(made) == made
    with pytest.raises(InvalidInput, match="devices of the problem"):
        replace(problem, devices=("slow", "fast", "fast")).as_cut_in(made)


def test_a_plan_for_several_devices_passes_its_check() -> None:
    problem = mixed(placement="single", memory={"limit": [60, 60, 30]})
    plan = search(problem, SearchOptions(effort="quick"))
    assert plan.cut is not None
    assert plan.cut.lower_bound <= bound_over_all_cuts(problem) * (1 + 1e-9)
    checked = check_plan(plan_json(plan), problem)
    assert checked.problem == plan.problem
    model = checked.problem.model
    assert model is not None
    assert sum(len(model.partition[stage]) for stage in checked.problem.placement.stages_of[2]) <= 3


def test_the_floor_packs_whole_layers_into_ranks() -> None:
    # The mean is 55 / (2 + 55 / 154) = 23.3. A slow rank has one block of 14, and the fast ones have blocks
    # of 5 and the head of 15: with the other 7 blocks, one of them has 25.
    block = {**BLOCK, "on": {"slow": {"forward": 6, "backward_input": 6, "backward_weight": 2}}}
    head = {**HEAD, "on": {"slow": {"forward": 14, "backward_input": 14, "backward_weight": 14}}}
    problem = mixed(layers=[block, head], devices=["slow", "fast", "fast"], placement="single")
    floor = least_worst_load(problem, CutTables.of(problem))
    best = min(worst_load(cut) for cut in every_cut(problem, problem.placements[0]))
    assert floor == pytest.approx(best) == pytest.approx(25)


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"devices": ["fast", "slow"]}, "/devices", "must be 3, one per rank"),
        ({"devices": ["fast", "fast", "fast"]}, "/layers/1/on", "which no rank has"),
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
        (
            {"pp_degree": 9, "devices": list("abcdefghi"), "layers": [{**BLOCK, "repeat": 30}]},
            "/devices",
            "at most 8",
        ),
    ],
)
def test_wrong_devices_and_links_are_refused(change: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as error:
        mixed(**change)
    assert pointer in [issue.pointer for issue in error.value.issues]


def test_cuts_for_the_order_of_an_executor_need_equal_ranks() -> None:
    with pytest.raises(InvalidInput, match="/devices"):
        best_cut(mixed(), [])


def test_measured_costs_of_stages_scale_layers_on_every_device() -> None:
    problem = mixed()
    made = problem.cut_into(problem.placements[0], Cut.at((0, 2, 3, 5, 6, 8, 10)))
    double = made.costs.mapped(lambda values: tuple(2 * value for value in values), made.costs.p2p)
    found = with_stage_costs(made, double)
    assert found.costs == double
    assert found.model is not None
    assert found.model.devices == problem.devices
    assert found.model.model.each[3].on[0].costs.forward == 12  # block.2, which is on the slow rank
    assert found.model.model.each[3].costs.forward == 4
