"""A plan of layers in a moment: verified, within the limit, and no worse than the cuts beside it."""

from __future__ import annotations

from typing import Any

import pytest
from support.layered import LAYERED, RECOMPUTED
from zbv_service.problems.sketch import sketch
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.frontiers.by_layers import floor
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.search import SearchOptions, search
from zbv_solver.verify.verifier import verify

SECONDS = 60.0
"""A small problem is done long before."""


def layered(document: dict[str, Any], **changes: Any) -> LayeredProblem:
    question = parse_any_problem({**document, **changes})
    assert isinstance(question, LayeredProblem)
    return question


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_it_is_a_verified_plan_beside_simple_cuts(placement: str) -> None:
    problem = layered(LAYERED, placement=placement)
    plan = sketch(problem, SECONDS)
    verify(plan)
    assert plan.problem.placement == problem.placements[0]
    assert floor(problem) <= plan.objective
    beside = {each.name: each for each in plan.baselines}
    assert {"1f1b", "even-cut", "histogram-cut"} <= set(beside)
    assert plan.objective <= min(beside["even-cut"].span, beside["histogram-cut"].span)
    # Under V and in loops the even cut has the head on top of as many blocks as others have.
    assert (beside["even-cut"].span > plan.objective) == (placement != "single")
    assert beside["even-cut"].fits


def test_what_does_not_fit_is_recomputed_and_a_simple_cut_is_said_not_to_fit() -> None:
    plan = sketch(layered(RECOMPUTED, memory={"limit": 20}), SECONDS)
    assert plan.problem.model is not None
    assert any(plan.problem.model.cut.recompute)
    assert max(plan.metrics.peak_memory) <= 20 * (1 + 1e-9)
    (histogram,) = (each for each in plan.baselines if each.name == "histogram-cut")
    assert not histogram.fits
    assert max(histogram.peak_memory) > 20


def test_another_placement_has_its_turn_where_v_does_not_fit() -> None:
    """Under V the first and the last stage are one rank's."""
    blocks = [{**LAYERED["layers"][1], "repeat": 8}]
    document = {**LAYERED, "placement": "auto", "layers": blocks, "cut": {"first": 3, "last": 3}}
    plan = sketch(layered(document, memory={"limit": 30}), SECONDS)
    assert (plan.problem.placement.kind, plan.problem.placement.chunks) == ("loop", 2)
    assert max(plan.metrics.peak_memory) <= 30 * (1 + 1e-9)
    with pytest.raises(InfeasibleMemory) as error:
        sketch(layered(document, memory={"limit": 20}), SECONDS)
    assert min(error.value.smallest) > 0


def test_it_comes_near_what_a_search_finds_where_memory_is_short() -> None:
    """What just fits has one microbatch in flight; the pipeline is full only with more recomputed."""
    blocks = [{**RECOMPUTED["layers"][1], "repeat": 16}]
    tight = {"pp_degree": 4, "microbatches": 12, "layers": blocks, "cut": {}, "memory": {"limit": 30}}
    problem = layered(RECOMPUTED, **tight)
    assert sketch(problem, SECONDS).objective <= 1.1 * search(problem, SearchOptions("quick")).objective
