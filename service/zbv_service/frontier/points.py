"""The parts of a frontier: its limits, the best known plan and bound at each, and the searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbv_solver.frontiers import limits as frontier
from zbv_solver.frontiers.limits import Known
from zbv_solver.plans.plan import gap_of
from zbv_solver.problem.problem import Units

from zbv_service.documents.problems import supported_bound
from zbv_service.records.searches import FINISHED, SearchRecord


@dataclass(frozen=True)
class Point:
    """A limit of the frontier."""

    at: float
    """The limit as a fraction of 1F1B's memory; equal to ``limit`` if layers are cut again for every
    limit."""
    limit: float
    """The largest limit of any rank, in the problem's memory unit."""
    best: Known | None
    """The best known plan that fits; None if there is none."""
    bound: float | None
    """No plan within the limit has a smaller objective; None until it is computed."""
    search: SearchRecord | None
    """The most important search for exactly this limit; None if there was none."""
    is_searched: bool
    """Whether a search for exactly this limit has ended with an answer."""

    @property
    def is_open(self) -> bool:
        """Whether a search is queued or running."""
        return self.search is not None and self.search.state not in FINISHED

    @property
    def is_proved(self) -> bool:
        """Whether the best plan reaches the bound."""
        if self.best is None or self.bound is None:
            return False
        return gap_of(self.best.value, self.bound) == 0

    @property
    def is_missing(self) -> bool:
        """Whether a search could improve the point, and there has been none."""
        return not (self.is_searched or self.is_open or self.is_proved)


@dataclass(frozen=True)
class CutSummary:
    """How the layers of a plan are cut into stages."""

    placement: str
    chunks: int
    stages: int
    recomputed: int

    @classmethod
    def of(cls, problem: Mapping[str, Any]) -> CutSummary:
        """Summarise a plan's problem document."""
        stages, recompute = len(problem["partition"]), problem.get("recompute", [])
        return cls(problem["placement"], stages // problem["pp_degree"], stages, sum(recompute))


@dataclass(frozen=True)
class Frontier:
    """The best known objective of a model as a function of memory."""

    objective: str
    units: Units
    """Of the plan's problem."""
    own: Known
    """The plan for which the frontier was made."""
    points: tuple[Point, ...]
    plans: tuple[Known, ...]
    """All stored plans that were found, including ``own``; their names are plan ids."""
    baselines: tuple[Known, ...]
    """The classical schedules; for layers, also other cuts and placements."""
    cuts: Mapping[str, CutSummary] | None = None
    """For each plan id, how the layers are cut; None unless layers are cut again for every limit."""

    @property
    def missing(self) -> tuple[Point, ...]:
        """Points that still need a search."""
        return tuple(point for point in self.points if point.is_missing)

    @property
    def open(self) -> tuple[Point, ...]:
        """Points with a queued or running search."""
        return tuple(point for point in self.points if point.is_open)


def newest(requests: Mapping[str, float], found: Mapping[str, SearchRecord]) -> dict[float, SearchRecord]:
    """The most important search of every limit: an unfinished one, otherwise the newest."""
    ascending = sorted(found.items(), key=lambda item: (item[1].state not in FINISHED, item[1].created_at))
    return {requests[key]: record for key, record in ascending}


def tightened(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, with the bounds of larger limits, which hold at smaller ones, too.

    Raises
    ------
    ContradictedBound
        When the best plan within a limit undercuts the bound there.
    """
    if all(point.bound is not None for point in points):
        raised = frontier.tightened([point.bound or 0.0 for point in points])
        points = [replace(point, bound=bound) for point, bound in zip(points, raised, strict=True)]
    return tuple(map(_supported, points))


def _supported(point: Point) -> Point:
    if point.best is None or point.bound is None:
        return point
    source = f"the bound at the memory limit {point.limit:.15g}"
    bound = supported_bound(point.best.value, point.bound, source, lambda: {"limit": point.limit})
    return replace(point, bound=bound)
