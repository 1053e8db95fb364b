"""The frontier of a plan's model: the best stored plan within each memory limit, and running searches.

Nothing is stored for it. A point of the frontier is the plan's own problem with another limit; its plans
and searches are found by the hash of that problem, whoever submitted them. If a search cut the plan's layers,
each point is a search that cuts them again (:mod:`.layers`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zbv_solver.documents.text import numbers
from zbv_solver.frontiers import limits as frontier
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.options import EFFORTS

from zbv_service.compute.cache import Cache, wait_a_while
from zbv_service.compute.computations import Computations
from zbv_service.database import PlanTable, SearchTable
from zbv_service.documents.packing import problem_key, unpack
from zbv_service.documents.shared import OptionsDocument
from zbv_service.errors import INVALID_PARAMETER, NOT_FOUND, TOO_MANY_SEARCHES, ProblemError
from zbv_service.frontier.layers import LayeredFrontiers
from zbv_service.frontier.points import Frontier, Point, newest, tightened
from zbv_service.plans.schedules import Schedules
from zbv_service.records.searches import FINISHED, PlanSummary
from zbv_service.searches.searches import Searches, request_key

FINE = 0.025
"""Plans are also looked up at multiples of this fraction, because forms offer these limits."""
PATIENCE_SECONDS = 1.5
"""How long a page waits for bounds; the page after it has them."""
CACHED_NEEDS = 4096
MAX_STAGES = 4096
"""Of a frontier: it is dozens of problems, each with all stages."""


@dataclass(frozen=True)
class SubmittedPoints:
    """The result of a request to search points.

    Attributes
    ----------
    searched
        Points with a new or running search.
    refused
        Points beyond the caller's limit of searches.
    known
        Points with an ended search of this effort, which would give the same result again.
    """

    searched: int
    refused: int
    known: int


class Frontiers:
    """Reads frontiers, and submits searches for missing points."""

    def __init__(
        self,
        plans: PlanTable,
        searches: SearchTable,
        submit: Searches,
        schedules: Schedules,
        computations: Computations,
    ):
        self._computations = computations
        self._plans = plans
        self._searches = searches
        self._submit = submit
        self._schedules = schedules
        self._layered = LayeredFrontiers(plans, searches, schedules, computations)
        self._needs: Cache[float] = Cache(CACHED_NEEDS)

    async def of(self, plan: Plan) -> Frontier:
        """The frontier of a plan's model.

        Raises
        ------
        InvalidInput
            The problem has no memory.
        ProblemError
            503: too many computations are waiting.
        """
        if plan.cut is not None:
            return await self._layered.of(plan)
        problem = plan.problem
        if problem.n_stages > MAX_STAGES:
            raise ProblemError(
                INVALID_PARAMETER,
                f"found a plan of {problem.n_stages} stages; a frontier takes at most {MAX_STAGES}.",
            )
        grid = frontier.grid(problem)
        documents, others = await self._computations.run(partial(_documents, grid=grid), problem)
        summaries = await self._plans.best_of([*(each.key for each in documents.values()), *others])
        known = await self._known(plan, summaries.values())
        requests = {key: each for each in grid for key in documents[each].requests}
        searches = newest(requests, await self._searches.of_requests(list(requests)))
        bounds = await self._bounds(problem, grid)
        held = {**others, **{each.key: fraction for fraction, each in documents.items()}}
        points = []
        for index, fraction in enumerate(grid):
            there = documents[fraction]
            proved = [each.lower_bound for key, each in summaries.items() if held[key] >= fraction]
            if bounds is not None:
                proved.append(bounds[index])
            bound = max(proved, default=None)
            best = frontier.best_within(fraction, known)
            searched = there.key in summaries
            points.append(
                Point(fraction, there.limit, there.problem, best, bound, searches.get(fraction), searched)
            )
        return Frontier(problem, known[0], tightened(points), tuple(known), _baselines(plan))

    async def search_missing(
        self, plan: Plan, effort: str, caller: str | None, most: int | None, *, again: bool = False
    ) -> SubmittedPoints:
        """Submit searches for points without one, or with ``again`` for all points that are not proven.

        Raises
        ------
        InvalidInput
            The service does not accept this effort, or the problem has no memory.
        """
        found = await self.of(plan)
        wanted = [p for p in found.points if p.is_missing or (again and not p.is_proved and not p.is_open)]
        known = 0
        for done, point in enumerate(wanted):
            body = {"problem": point.problem, "options": {"effort": effort}}
            try:
                record = await self._submit.submit(body, caller=caller, most=most)
            except ProblemError as error:
                if error.kind is not TOO_MANY_SEARCHES:
                    raise
                return SubmittedPoints(done - known, len(wanted) - done, known)
            known += record.state in FINISHED
        return SubmittedPoints(len(wanted) - known, 0, known)

    async def _known(self, plan: Plan, summaries: Iterable[PlanSummary]) -> list[Known]:
        """The plan itself and the other stored plans."""
        problem = plan.problem
        needs = memory_fraction.needed(problem, plan.metrics.peak_memory)
        known = [Known(plan.plan_id, needs, plan.objective)]
        for summary in summaries:
            if summary.plan_id != plan.plan_id:
                known.append(Known(summary.plan_id, await self._need(problem, summary), summary.value))
        return known

    async def _need(self, problem: Problem, summary: PlanSummary) -> float:
        """The fraction that a stored plan needs: its document is read once."""

        async def load() -> float:
            packed = await self._plans.document(summary.plan_id)
            if packed is None:
                raise ProblemError(
                    NOT_FOUND, f"plan {summary.plan_id} was removed in the meantime; load the page again."
                )
            peak = await self._computations.run(peak_memory_of, packed)
            return memory_fraction.needed(problem, peak)

        return await self._needs.get(summary.plan_id, load)

    async def _bounds(self, problem: Problem, grid: Sequence[float]) -> tuple[float, ...] | None:
        """Bounds of the points, None while they are computed."""
        made = asyncio.ensure_future(self._schedules.bounds(problem, grid))
        await wait_a_while([made], PATIENCE_SECONDS)
        return made.result() if made.done() else None


@dataclass(frozen=True)
class _Limited:
    """The problem at a limit: its document if it is a point, its hash, and the keys of its searches."""

    problem: dict[str, Any]
    limit: float
    key: str
    requests: tuple[str, ...]


def _documents(problem: Problem, grid: Sequence[float]) -> tuple[dict[float, _Limited], dict[str, float]]:
    """The problem at every limit of the grid, and at limits in between that may have been searched.

    Also the hashes of the problem itself and of the problem without a limit, each with the
    largest fraction within its limit.
    """
    base = problem_json(problem)
    unlimited = {**base, "memory": {**base["memory"], "limit": None}}
    least = grid[0] * (1 + MEMORY_TOLERANCE)
    fine = (round(count * FINE, 3) for count in range(1, round(frontier.LARGEST / FINE) + 1))
    found = {}
    for fraction in sorted({*grid, *(each for each in fine if each > least)}):
        limits = memory_fraction.limits(problem, fraction)
        document = {**base, "memory": {**base["memory"], "limit": numbers(limits)}}
        asked = (
            [OptionsDocument(effort=effort).model_dump() for effort in EFFORTS] if fraction in grid else []
        )
        found[fraction] = _Limited(
            document if fraction in grid else {},
            max(limits),
            problem_key(document),
            tuple(request_key(document, options) for options in asked),
        )
    own = memory_fraction.of_limit(problem)
    return found, {problem_key(unlimited): math.inf, problem_key(base): math.inf if own is None else own}


def peak_memory_of(packed: bytes) -> list[float]:
    """The memory needs of the ranks of a packed plan."""
    found: list[float] = unpack(packed)["metrics"]["peak_memory"]
    return found


def _baselines(plan: Plan) -> tuple[Known, ...]:
    objective = plan.problem.objective
    return tuple(
        Known(each.name, memory_fraction.needed(plan.problem, each.peak_memory), getattr(each, objective))
        for each in plan.baselines
    )
