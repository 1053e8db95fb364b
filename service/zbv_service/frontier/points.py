"""What a frontier consists of: limits, what is known within each, and what was asked of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbv_solver.frontiers import limits as frontier
from zbv_solver.frontiers.limits import Known
from zbv_solver.plans.certificate import gap_of
from zbv_solver.problem.problem import Problem

from zbv_service.documents.packing import supported_bound
from zbv_service.records.searches import FINISHED, SearchRecord


@dataclass(frozen=True)
class Point:
    """A limit of the frontier.

    Attributes
    ----------
    at
        Its place among what plans need: a fraction of 1F1B's memory; where layers are cut anew, ``limit``.
    limit
        The largest of any rank, in the problem's memory unit.
    problem
        The document whose search tells of it.
    best
        The best plan that fits, None while there is none.
    bound
        No plan within the limit has a smaller objective; None until it is computed.
    search
        The last one for exactly this limit, None when there was none.
    is_searched
        Whether a search for exactly this limit has ended with an answer.
    """

    at: float
    limit: float
    problem: dict[str, Any]
    best: Known | None
    bound: float | None
    search: SearchRecord | None
    is_searched: bool

    @property
    def is_open(self) -> bool:
        """Whether it is being searched."""
        return self.search is not None and self.search.state not in FINISHED

    @property
    def is_proved(self) -> bool:
        """Whether nothing better can be found."""
        if self.best is None or self.bound is None:
            return False
        return gap_of(self.best.value, self.bound) == 0

    @property
    def is_missing(self) -> bool:
        """Whether a search would tell something that nobody has asked yet."""
        return not (self.is_searched or self.is_open or self.is_proved)


@dataclass(frozen=True)
class CutSummary:
    """How a plan has cut its layers, in short."""

    placement: str
    chunks: int
    stages: int
    recomputed: int

    @classmethod
    def of(cls, problem: Mapping[str, Any]) -> CutSummary:
        """That of a plan's problem document."""
        stages, recompute = len(problem["partition"]), problem.get("recompute", [])
        return cls(problem["placement"], stages // problem["pp_degree"], stages, sum(recompute))


@dataclass(frozen=True)
class Frontier:
    """What is known of a model's objective over memory.

    Attributes
    ----------
    own
        The plan itself.
    plans
        All stored plans that were found, the plan itself among them, by plan id.
    baselines
        The classical schedules, and of layers other cuts and placements.
    cuts
        Of every plan that was found, where layers are cut anew for every limit; None where they are not.
    """

    problem: Problem
    own: Known
    points: tuple[Point, ...]
    plans: tuple[Known, ...]
    baselines: tuple[Known, ...]
    cuts: Mapping[str, CutSummary] | None = None

    @property
    def missing(self) -> tuple[Point, ...]:
        """Points that nobody has searched yet."""
        return tuple(point for point in self.points if point.is_missing)

    @property
    def open(self) -> tuple[Point, ...]:
        """Points that are being searched."""
        return tuple(point for point in self.points if point.is_open)


def newest(requests: Mapping[str, float], found: Mapping[str, SearchRecord]) -> dict[float, SearchRecord]:
    """The search of every limit that matters most: one that goes on, else the newest."""
    chosen: dict[float, SearchRecord] = {}
    for key, record in sorted(found.items(), key=lambda item: _urgency(item[1])):
        chosen[requests[key]] = record
    return chosen


def _urgency(record: SearchRecord) -> tuple[bool, Any]:
    return record.state not in FINISHED, record.created_at


def tightened(points: Sequence[Point]) -> tuple[Point, ...]:
    """A bound at a larger limit holds at every smaller one.

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
    bound = supported_bound(point.best.value, point.bound, source, lambda: point.problem)
    return replace(point, bound=bound)
