"""Facts and a quick estimate of layers that are not cut into stages yet."""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.validation import validated
from zbv_solver.partition.cut_tables import CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.documents import LayeredProblemDocument
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import to_layered

from zbv_service.documents.packing import supported_bound
from zbv_service.documents.problems import largest_stages
from zbv_service.problems.documents import LayersFacts, PlacementFacts

MAX_STAGES = 512
MAX_CELLS = 16_384
"""Largest number of stages, and of stages times microbatches, for which an estimate makes a plan."""


def facts_of_layers(problem: LayeredProblem) -> LayersFacts:
    """Facts about layers that hold for every cut."""
    each, tables = problem.model.each, CutTables.of(problem)
    return LayersFacts(
        layers=problem.model.n_layers,
        parts=problem.n_atoms,
        placements=[
            PlacementFacts(placement=it.kind, chunks=it.chunks, stages=it.n_stages)
            for it in problem.placements
        ],
        work=float(tables.cheapest[-1]),
        least_busy=problem.microbatches * least_worst_load(problem, tables),
        static=float(sum(layer.costs.memory.static for layer in each)),
        held=float(sum(layer.costs.memory.forward for layer in each)),
        limit=None if problem.limit is None else list(problem.limit),
        can_recompute=problem.model.can_recompute,
    )


def estimate_of_layers(seconds: float, document: dict[str, Any]) -> tuple[float, Plan | None]:
    """A bound on every cut of a normalised layered document, and a plan unless the problem is too large.

    Raises
    ------
    InfeasibleMemory
        When no cut fits.
    ContradictedBound
        When the plan undercuts the bound.
    """
    problem = to_layered(validated(LayeredProblemDocument, document))
    stages = largest_stages(problem)
    if stages > MAX_STAGES or stages * problem.microbatches > MAX_CELLS:
        return problem.microbatches * least_worst_load(problem, CutTables.of(problem)), None
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.frontiers.by_layers import floor

    from zbv_service.problems.sketch import sketch

    found = sketch(problem, seconds)
    bound = supported_bound(found.objective, floor(problem), "the bound of every cut", lambda: document)
    return bound, found
