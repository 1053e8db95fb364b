"""What can be said of layers before they are cut: facts at once, and an estimate of a moment's search."""

from __future__ import annotations

from typing import Any

from zbv_solver.layers.document import parse_layered
from zbv_solver.layers.layer import LayerCosts
from zbv_solver.layers.layered_problem import LayeredProblem
from zbv_solver.layers.reading import to_layered
from zbv_solver.options import SearchOptions
from zbv_solver.plan import Plan

from zbv_service.questions import largest_stages
from zbv_service.searches.check_documents import LayersFacts, PlacementFacts

MAX_CELLS = 16_384
"""Most stages times microbatches of which a plan is made: several placements and cuts take their time."""


def facts_of_layers(problem: LayeredProblem) -> LayersFacts:
    """What can be said of layers at once, wherever they are cut."""
    each = problem.model.each
    return LayersFacts(
        layers=problem.model.n_layers,
        parts=problem.n_atoms,
        placements=[
            PlacementFacts(placement=it.kind, chunks=it.chunks, stages=it.n_stages)
            for it in problem.placements
        ],
        work=least_work(problem),
        mean_busy=mean_busy(problem),
        static=float(sum(layer.costs.memory.static for layer in each)),
        held=float(sum(layer.costs.memory.forward for layer in each)),
        limit=None if problem.limit is None else list(problem.limit),
        can_recompute=problem.model.can_recompute,
    )


def least_work(problem: LayeredProblem) -> float:
    """Of one microbatch on all layers, each as cheap as it can be."""
    return float(
        sum(min(map(_work, filter(None, (layer.costs, layer.recompute)))) for layer in problem.model.each)
    )


def mean_busy(problem: LayeredProblem) -> float:
    """What every rank works if all work alike: no cut's busiest rank has less."""
    return problem.microbatches * least_work(problem) / problem.pp_degree


def _work(costs: LayerCosts) -> float:
    return costs.forward + min(costs.split, costs.fused)


def estimate_of_layers(seconds: float, document: dict[str, Any]) -> tuple[float, Plan | None]:
    """A bound on every cut of a normalised layered document, and a plan unless it is too large for one.

    Raises
    ------
    InfeasibleMemory
        When no cut fits.
    """
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.search import search

    problem = to_layered(parse_layered(document))
    if largest_stages(problem) * problem.microbatches > MAX_CELLS:
        return mean_busy(problem), None
    found = search(problem, SearchOptions("quick", time_limit=seconds))
    return mean_busy(problem) if found.cut is None else found.cut.lower_bound, found
