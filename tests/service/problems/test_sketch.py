"""Quick plans of layers: verified, within the limit, and no worse than simple cuts."""

from __future__ import annotations

from typing import Any

import pytest
from support.layered import LAYERED, RECOMPUTED
from zbv_service.problems.sketch import sketch
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.frontiers.frontier import floor
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

SECONDS = 60.0
"""Far more than these small problems need."""


def layered(document: dict[str, Any], **changes: Any) -> LayeredProblem:
    question = parse_any_problem({**document, **changes})
    assert isinstance(question, LayeredProblem)
    return question


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_a_sketch_is_a_verified_plan_with_simple_cuts_as_baselines(placement: str) -> None:
    problem = layered(LAYERED, placement=placement)
    plan = sketch(problem, SECONDS)
    verify(plan)
    assert plan.problem.placement == problem.placements[0]
    assert floor(problem) <= plan.objective
    named = {each.name: each for each in plan.baselines}
    assert {"1f1b", "even-cut", "histogram-cut"} <= set(named)
    assert plan.objective <= min(named["even-cut"].span, named["histogram-cut"].span)
    # In the even cut, the stage with the head has as many blocks as the other stages.
    assert named["even-cut"].span > plan.objective
    assert named["even-cut"].fits


def test_stages_are_recomputed_to_fit_and_a_simple_cut_is_marked_as_not_fitting() -> None:
    plan = sketch(layered(RECOMPUTED, memory={"limit": 20}), SECONDS)
    assert plan.problem.model is not None
    assert any(plan.problem.model.cut.recompute)
    assert max(plan.metrics.peak_memory) <= 20 * (1 + 1e-9)
    (histogram,) = (each for each in plan.baselines if each.name == "histogram-cut")
    assert not histogram.fits
    assert max(histogram.peak_memory) > 20


def test_another_placement_is_used_if_v_does_not_fit() -> None:
    """With V, the first and the last stage are on the same rank."""
    blocks = [{**LAYERED["layers"][1], "repeat": 8}]
    document = {**LAYERED, "placement": "auto", "layers": blocks, "cut": {"first": 3, "last": 3}}
    plan = sketch(layered(document, memory={"limit": 30}), SECONDS)
    assert (plan.problem.placement.kind, plan.problem.placement.chunks) == ("loop", 2)
    assert max(plan.metrics.peak_memory) <= 30 * (1 + 1e-9)
    with pytest.raises(InfeasibleMemory) as error:
        sketch(layered(document, memory={"limit": 20}), SECONDS)
    assert min(error.value.smallest) > 0


def test_with_little_memory_a_sketch_is_close_to_a_search() -> None:
    """The first cut that fits has one microbatch in flight; more recomputation fills the pipeline."""
    blocks = [{**RECOMPUTED["layers"][1], "repeat": 16}]
    tight = {"pp_degree": 4, "microbatches": 12, "layers": blocks, "cut": {}, "memory": {"limit": 30}}
    problem = layered(RECOMPUTED, **tight)
    assert sketch(problem, SECONDS).objective <= 1.1 * search(problem, SearchOptions("quick")).objective
