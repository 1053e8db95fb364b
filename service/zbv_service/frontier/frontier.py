"""The frontier of a plan's model: the best stored plan within each memory limit, and running searches.

Nothing is stored for it. A point of the frontier is the plan's own problem with another limit; its plans
and searches are found by the hash of that problem, whichever client submitted them. If a search cut the
plan's layers, each point is a search that cuts them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zbv_solver.frontiers.limits import Known, best_within, fits

from zbv_service.compute.waiting import Cache, wait_a_while
from zbv_service.database import PlanTable, SearchTable
from zbv_service.errors import TOO_MANY_SEARCHES, ApiError
from zbv_service.frontier.problems import (
    CutSummary,
    Frontier,
    FrontierPlan,
    FrontierProblems,
    Point,
    bounds_of,
    memory_and_cut_of,
    newest,
    read_plan,
    searches_of,
    tightened,
)
from zbv_service.plans.plans import Plans
from zbv_service.records.searches import FINISHED, SearchRecord
from zbv_service.searches.searches import Searches
from zbv_service.security.tokens import Grant
from zbv_service.settings import Settings

PATIENCE_SECONDS = 1.5
"""How long a page waits for bounds. They are ready when it is loaded again."""
CACHED_PLANS = 4096
CACHED_FRONTIERS = 64
CACHED_BOUNDS = 256

Bounds = tuple[float, ...] | None
"""A bound for each point; None while they are computed."""


@dataclass(frozen=True)
class SubmittedPoints:
    """The result of a request to search points."""

    searched: int
    """Points with a new or running search."""
    refused: int
    """Points beyond the caller's limit of searches."""
    known: int
    """Points with an ended search of this effort, which would give the same result again."""


@dataclass(frozen=True)
class _Result:
    """A stored plan, or a search with or without one. Its bound holds at limits up to ``at``."""

    at: float
    plan_id: str | None
    value: float | None
    lower_bound: float | None


class Frontiers:
    """Reads frontiers, and submits searches for missing points."""

    def __init__(
        self, table: PlanTable, searches: SearchTable, submit: Searches, plans: Plans, settings: Settings
    ):
        self._table = table
        self._searches = searches
        self._submit = submit
        self._plans = plans
        self._settings = settings
        self._read: Cache[FrontierPlan] = Cache(CACHED_FRONTIERS)
        self._bounds: Cache[tuple[float, ...]] = Cache(CACHED_BOUNDS)
        self._stored: Cache[tuple[list[float], CutSummary | None]] = Cache(CACHED_PLANS)

    async def plan(self, plan_id: str) -> FrontierPlan:
        """A plan as its frontier needs it; raises :class:`ApiError` 404."""
        return await self._read.get(plan_id, lambda: self._plans.compute(read_plan, plan_id))

    async def of(self, plan_id: str) -> Frontier:
        """The frontier of a plan's model.

        Raises
        ------
        InvalidInput
            The problem has no memory.
        ApiError
            404: there is no such plan. 503: too many computations are waiting.
        """
        plan = await self.plan(plan_id)
        if plan.fault is not None or plan.asked is None or plan.own is None:
            raise plan.fault or ValueError("a frontier without problems has a fault")
        asked = plan.asked
        bounds = await self._bounds_soon(plan_id, plan, asked)
        found = await self._searches.of_requests(list(asked.requests))
        if plan.own_cut is None:
            results, answered = await self._results_of_stages(asked)
        else:
            results, answered = _results_of_layers(plan, asked, found)
        known, cuts = await self._known(plan, plan.own, results)
        searches = newest(asked.requests, found)
        points = []
        for index, each in enumerate(asked.points):
            proved = [
                result.lower_bound
                for result in results
                if result.lower_bound is not None and fits(each.at, result.at)
            ]
            if bounds is not None:
                proved.append(bounds[index])
            points.append(
                Point(
                    at=each.at,
                    limit=each.limit,
                    best=best_within(each.at, known),
                    bound=max(proved, default=None),
                    search=searches.get(each.at),
                    is_searched=each.at in answered,
                )
            )
        facts = plan.facts
        return Frontier(
            facts.objective, facts.units, known[0], tightened(points), known, plan.baselines, cuts
        )

    async def search_missing(
        self, plan_id: str, effort: str, grant: Grant, *, again: bool = False
    ) -> SubmittedPoints:
        """Submit searches for points without one, or with ``again`` for all points that are not proven.

        Raises
        ------
        InvalidInput
            The service does not accept this effort, or the problem has no memory.
        """
        found = await self.of(plan_id)
        wanted = [p for p in found.points if p.is_missing or (again and not p.is_proved and not p.is_open)]
        read = partial(searches_of, self._settings, effort, [point.at for point in wanted])
        searches = await self._plans.compute(read, plan_id)
        known = 0
        for done, point in enumerate(wanted):
            try:
                record = await self._submit.submit_read(searches[point.at], grant)
            except ApiError as error:
                if error.kind is not TOO_MANY_SEARCHES:
                    raise
                return SubmittedPoints(done - known, len(wanted) - done, known)
            known += record.state in FINISHED
        return SubmittedPoints(len(wanted) - known, 0, known)

    async def _bounds_soon(self, plan_id: str, plan: FrontierPlan, asked: FrontierProblems) -> Bounds:
        """The bounds of the points, or None when they take long; their computation then goes on."""
        compute = partial(bounds_of, [each.at for each in asked.points])
        return await _result_soon(
            self._bounds.get(plan.bounds_key, lambda: self._plans.compute(compute, plan_id))
        )

    async def _results_of_stages(self, asked: FrontierProblems) -> tuple[list[_Result], set[float]]:
        """The best stored plan of each problem, and the points that have one."""
        best = await self._table.best_of(list(asked.keys))
        results = [
            _Result(asked.keys[key], each.plan_id, each.value, each.lower_bound) for key, each in best.items()
        ]
        return results, {each.at for each in asked.points if each.key in best}

    async def _known(
        self, plan: FrontierPlan, own: Known, results: Iterable[_Result]
    ) -> tuple[tuple[Known, ...], dict[str, CutSummary] | None]:
        """The plan itself and the plans of the results, each once; and how a search cut their layers."""
        known = {own.name: own}
        cuts = None if plan.own_cut is None else {own.name: plan.own_cut}
        for each in results:
            if each.plan_id is not None and each.value is not None and each.plan_id not in known:
                peak_memory, cut = await self._memory_and_cut(each.plan_id)
                known[each.plan_id] = Known(each.plan_id, plan.needs(peak_memory), each.value)
                if cuts is not None and cut is not None:
                    cuts[each.plan_id] = cut
        return tuple(known.values()), cuts

    async def _memory_and_cut(self, plan_id: str) -> tuple[list[float], CutSummary | None]:
        """The memory of each rank of a stored plan, and how its layers are cut. Reads its document once."""
        return await self._stored.get(plan_id, lambda: self._plans.compute(memory_and_cut_of, plan_id))


def _results_of_layers(
    plan: FrontierPlan, asked: FrontierProblems, found: Mapping[str, SearchRecord]
) -> tuple[list[_Result], set[float]]:
    """The searches' results and the plan's own, and the points that a search has answered."""
    results = [
        _Result(asked.requests[key], each.plan_id, each.objective, each.lower_bound)
        for key, each in found.items()
    ]
    facts = plan.facts
    own = _Result(plan.holds_up_to, facts.plan_id, facts.value, plan.cut_bound)
    answered = {asked.requests[key] for key, each in found.items() if each.state in FINISHED}
    return [*results, own], answered


async def _result_soon(computation: Coroutine[Any, Any, tuple[float, ...]]) -> Bounds:
    """The result of a computation, or None when it takes long; it then continues for later readers."""
    made = asyncio.ensure_future(computation)
    await wait_a_while([made], PATIENCE_SECONDS)
    return made.result() if made.done() else None
