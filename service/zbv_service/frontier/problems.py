"""A frontier's points and problems: one for each memory limit, and others whose plans or bounds apply.

The functions about problems read whole plans and hash dozens of documents, so they run in another process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbv_solver.construct.baselines import without_limit
from zbv_solver.documents.files import numbers
from zbv_solver.errors import InvalidInput
from zbv_solver.frontiers import limits as frontier
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import LARGEST, Known, at_limit
from zbv_solver.plans.plan import Plan, gap_of
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS

from zbv_service.documents.problems import (
    asked_of,
    new_search,
    problem_key,
    request_key,
    supported_bound,
    unpack,
)
from zbv_service.errors import INVALID_PARAMETER, ApiError
from zbv_service.plans.renderings import PlanFacts, facts_of, plan_of
from zbv_service.records.searches import FINISHED, NewSearch, OptionsDocument, SearchRecord
from zbv_service.settings import Settings


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


MAX_STAGES = 4096
"""Largest number of stages: a frontier is dozens of problems, each with all stages."""
FINE = 0.025
"""Plans are also looked up at multiples of this fraction, because forms offer these limits."""


@dataclass(frozen=True)
class LimitedProblem:
    """The problem of one point; see :class:`zbv_service.frontier.problems.Point`.

    ``key`` is its hash where stored plans are found by it.
    """

    at: float
    limit: float
    key: str = ""


@dataclass(frozen=True)
class FrontierProblems:
    """The problems of a frontier."""

    points: tuple[LimitedProblem, ...]
    """The points, by ascending limit."""
    keys: dict[str, float]
    """The hashes of all problems whose stored plans matter, each with the limit up to which a lower bound
    for that problem holds; empty if layers are cut again for every limit."""
    requests: dict[str, float]
    """The same for searches, by the key of their request."""


@dataclass(frozen=True)
class FrontierPlan:
    """A plan as its frontier needs it."""

    facts: PlanFacts
    own: Known | None = None
    asked: FrontierProblems | None = None
    """The problems; None if ``fault`` says why there is no frontier."""
    fault: InvalidInput | None = None
    bounds_key: str = ""
    """Names the bounds of the points; plans of one model with other limits have the same."""
    baselines: tuple[Known, ...] = ()
    """The classical schedules; for layers, also other cuts and placements."""
    whole: float = 1.0
    static: tuple[float, ...] = ()
    """The memory of 1F1B and the static memory (p,), which turn amounts of memory into fractions."""
    own_cut: CutSummary | None = None
    cut_bound: float | None = None
    holds_up_to: float = math.inf
    """If a search cut the layers: how, a lower bound for all cuts, and the largest limit at which it
    holds."""

    def needs(self, peak_memory: Sequence[float]) -> float:
        """The smallest limit that holds a memory use per rank (p,): a fraction, or an amount for layers."""
        if self.own_cut is not None:
            return max(peak_memory)
        pairs = zip(peak_memory, self.static, strict=True)
        return max((held - static) / self.whole for held, static in pairs)


def read_plan(packed: bytes) -> FrontierPlan:
    """What the frontier of a packed plan needs to know about it."""
    plan = plan_of(packed)
    own_cut = None if plan.cut is None else CutSummary.of(problem_json(plan.problem))
    found = FrontierPlan(facts_of(packed), own_cut=own_cut)
    try:
        found = replace(found, **(_of_stages(plan) if plan.cut is None else _of_layers(plan)))
    except InvalidInput as error:  # no memory
        return replace(found, fault=error)
    known = [
        Known(each.name, found.needs(each.peak_memory), getattr(each, plan.problem.objective))
        for each in plan.baselines
    ]
    own = Known(plan.plan_id, found.needs(plan.metrics.peak_memory), plan.objective)
    return replace(found, own=own, baselines=tuple(known))


def _of_stages(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    if problem.n_stages > MAX_STAGES:
        raise ApiError(
            INVALID_PARAMETER,
            f"found a plan of {problem.n_stages} stages; a frontier takes at most {MAX_STAGES}.",
        )
    base = problem_json(problem)
    return {
        "asked": problems_of_stages(problem, frontier.grid(problem)),
        "bounds_key": problem_key(_limited(base, None)),
        "whole": memory_fraction.one_f_one_b_memory(problem),
        "static": tuple(problem.memory.static),
    }


def _of_layers(plan: Plan) -> dict[str, Any]:
    from zbv_solver.frontiers.frontier import layer_limits  # loads the solver's kernels

    question = asked_of(plan)
    grid = tuple(layer_limits(replace(question, limit=None)))
    return {
        "asked": problems_of_layers(question, grid),
        "bounds_key": f"{problem_key(layered_json(replace(question, limit=None)))} {grid}",
        "cut_bound": None if plan.cut is None else plan.cut.lower_bound,
        "holds_up_to": holds_up_to(plan.problem.memory.limit),
    }


def bounds_of(grid: Sequence[float], packed: bytes) -> tuple[float, ...]:
    """A lower bound at each limit of the frontier of a packed plan."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.bounds import lower_bound
    from zbv_solver.frontiers.frontier import floor

    plan = plan_of(packed)
    if plan.cut is not None:
        question = replace(asked_of(plan), limit=None)
        return tuple(floor(at_limit(question, limit)) for limit in grid)
    problem = without_limit(plan.problem)
    return tuple(lower_bound(memory_fraction.at_fraction(problem, each)).value for each in grid)


def searches_of(
    settings: Settings, effort: str, wanted: Collection[float], packed: bytes
) -> dict[float, NewSearch]:
    """The searches of points of a packed plan, by their limit.

    Raises
    ------
    InvalidInput
        The service does not accept this effort.
    """
    plan = plan_of(packed)
    documents = dict(_documents(plan, wanted))
    options = {"effort": effort}
    return {at: new_search(settings, {"problem": documents[at], "options": options}) for at in wanted}


def _documents(plan: Plan, wanted: Collection[float]) -> list[tuple[float, dict[str, Any]]]:
    if plan.cut is not None:
        question = asked_of(plan)
        return [(at, layered_json(at_limit(question, at))) for at in wanted]
    base = problem_json(plan.problem)
    return [(at, _limited(base, numbers(memory_fraction.limits(plan.problem, at)))) for at in wanted]


def memory_and_cut_of(packed: bytes) -> tuple[list[float], CutSummary | None]:
    """The memory that each rank of a packed plan needs, and how its layers are cut."""
    document = unpack(packed)
    problem = document["problem"]
    return document["metrics"]["peak_memory"], CutSummary.of(problem) if "partition" in problem else None


def problems_of_stages(problem: Problem, grid: Sequence[float]) -> FrontierProblems:
    """The problem at the fractions of a grid, at fractions in between, at its own limit and without one."""
    base = problem_json(problem)
    own = memory_fraction.of_limit(problem)
    keys = {
        problem_key(_limited(base, None)): math.inf,
        problem_key(base): math.inf if own is None else own,
    }
    points: list[LimitedProblem] = []
    requests: dict[str, float] = {}
    least = grid[0] * (1 + MEMORY_TOLERANCE)
    fine = (round(count * FINE, 3) for count in range(1, round(LARGEST / FINE) + 1))
    for fraction in sorted({*grid, *(each for each in fine if each > least)}):
        limits = memory_fraction.limits(problem, fraction)
        document = _limited(base, numbers(limits))
        key = problem_key(document)
        keys[key] = fraction
        if fraction in grid:
            points.append(LimitedProblem(fraction, max(limits), key))
            requests |= _requests(document, fraction)
    return FrontierProblems(tuple(points), keys, requests)


def problems_of_layers(question: LayeredProblem, grid: Sequence[float]) -> FrontierProblems:
    """The layers at the limits of a grid, at their own limit and without one.

    Plans are found by their searches alone: the problem of a plan is cut already, and says nothing about
    other limits.
    """
    own = layered_json(question)
    requests = _requests(_limited(own, None), math.inf) | _requests(own, holds_up_to(question.limit))
    for limit in grid:
        requests |= _requests(layered_json(at_limit(question, limit)), limit)
    return FrontierProblems(tuple(LimitedProblem(limit, limit) for limit in grid), {}, requests)


def holds_up_to(limit: Sequence[float] | None) -> float:
    """The largest limit, equal on all ranks, at which a bound for these limits per rank holds."""
    return math.inf if limit is None else min(limit)


def _limited(document: dict[str, Any], limit: Any) -> dict[str, Any]:
    return {**document, "memory": {**document["memory"], "limit": limit}}


def _requests(document: Mapping[str, Any], at: float) -> dict[str, float]:
    """The keys of searches of any effort for a document, each with the document's limit."""
    options = (OptionsDocument(effort=effort).stored() for effort in EFFORTS)
    return {request_key(dict(document), each): at for each in options}
