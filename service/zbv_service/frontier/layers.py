"""The frontier of a plan with layers: each limit is a separate problem with its own cut.

Limits are amounts of memory, equal on all ranks. Only searches of exactly the same problem provide results
for a limit; the plan's own problem is already cut and says nothing about other limits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zbv_solver.frontiers.limits import Known, at_limit, best_within, fits
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS

from zbv_service.compute.cache import Cache, wait_a_while
from zbv_service.compute.computations import Computations
from zbv_service.database import PlanTable, SearchTable
from zbv_service.documents.packing import unpack
from zbv_service.documents.problems import asked_of
from zbv_service.documents.shared import OptionsDocument
from zbv_service.errors import NOT_FOUND, ProblemError
from zbv_service.frontier.points import CutSummary, Frontier, Point, newest, tightened
from zbv_service.plans.schedules import Schedules
from zbv_service.records.searches import SearchRecord
from zbv_service.searches.searches import request_key

PATIENCE_SECONDS = 1.5
"""How long a page waits for bounds; the page after it has them."""
CACHED_PLANS = 4096
ANSWERED = ("done", "infeasible")


class LayeredFrontiers:
    """Reads the frontiers of plans whose layers a search has cut."""

    def __init__(
        self, plans: PlanTable, searches: SearchTable, schedules: Schedules, computations: Computations
    ):
        self._computations = computations
        self._plans = plans
        self._searches = searches
        self._schedules = schedules
        self._stored: Cache[tuple[float, CutSummary]] = Cache(CACHED_PLANS)

    async def of(self, plan: Plan) -> Frontier:
        """The frontier of a plan's layers.

        Raises
        ------
        InvalidInput
            The layers have no memory.
        ProblemError
            503: too many computations are waiting.
        """
        question = asked_of(plan)
        grid = await self._schedules.limits(question)
        asked = await self._computations.run(partial(_questions, grid=grid), question)
        found = await self._searches.of_requests(list(asked.requests))
        known, cuts = await self._known(plan, found.values())
        floors = await self._floors(question, grid)
        searches = newest(asked.requests, found)
        answered = {asked.requests[key] for key, each in found.items() if each.state in ANSWERED}
        points = []
        for index, limit in enumerate(grid):
            proved = [
                each.lower_bound
                for key, each in found.items()
                if each.lower_bound is not None and fits(limit, asked.requests[key])
            ]
            if plan.cut is not None and fits(limit, holds_up_to(plan.problem.memory.limit)):
                proved.append(plan.cut.lower_bound)
            if floors is not None:
                proved.append(floors[index])
            points.append(
                Point(
                    at=limit,
                    limit=limit,
                    problem=asked.documents[index],
                    best=best_within(limit, known),
                    bound=max(proved, default=None),
                    search=searches.get(limit),
                    is_searched=limit in answered,
                )
            )
        baselines = tuple(
            Known(each.name, max(each.peak_memory), getattr(each, plan.problem.objective))
            for each in plan.baselines
        )
        return Frontier(plan.problem, known[0], tightened(points), tuple(known), baselines, cuts)

    async def _known(
        self, plan: Plan, found: Iterable[SearchRecord]
    ) -> tuple[list[Known], Mapping[str, CutSummary]]:
        """The plan itself, and those of the searches; and how each is cut."""
        cuts = {plan.plan_id: CutSummary.of(problem_json(plan.problem))}
        known = [Known(plan.plan_id, max(plan.metrics.peak_memory), plan.objective)]
        for record in found:
            if record.plan_id is None or record.objective is None or record.plan_id in cuts:
                continue
            needs, cut = await self._of_stored(record.plan_id)
            cuts[record.plan_id] = cut
            known.append(Known(record.plan_id, needs, record.objective))
        return known, cuts

    async def _of_stored(self, plan_id: str) -> tuple[float, CutSummary]:
        """What a stored plan needs, and how it is cut: its document is read once."""

        async def load() -> tuple[float, CutSummary]:
            packed = await self._plans.document(plan_id)
            if packed is None:
                raise ProblemError(
                    NOT_FOUND, f"plan {plan_id} was removed in the meantime; load the page again."
                )
            return await self._computations.run(need_and_cut_of, packed)

        return await self._stored.get(plan_id, load)

    async def _floors(self, question: LayeredProblem, grid: Sequence[float]) -> tuple[float, ...] | None:
        """Bounds of the limits, None while they are computed."""
        made = asyncio.ensure_future(self._schedules.floors(question, grid))
        await wait_a_while([made], PATIENCE_SECONDS)
        return made.result() if made.done() else None


def need_and_cut_of(packed: bytes) -> tuple[float, CutSummary]:
    """What a packed plan needs, and how it is cut."""
    document = unpack(packed)
    return max(document["metrics"]["peak_memory"]), CutSummary.of(document["problem"])


@dataclass(frozen=True)
class _Questions:
    """The documents of the limits, and the limit of every request that would tell of one, by its hash."""

    documents: tuple[dict[str, Any], ...]
    requests: dict[str, float]


def _questions(question: LayeredProblem, grid: Sequence[float]) -> _Questions:
    """The layers at every limit, at the plan's own and at none: searches of any effort tell of them."""
    documents = tuple(layered_json(at_limit(question, limit)) for limit in grid)
    own = layered_json(question)
    unlimited = {**own, "memory": {**own["memory"], "limit": None}}
    limited = [(unlimited, math.inf), (own, holds_up_to(question.limit)), *zip(documents, grid, strict=True)]
    requests = {
        request_key(document, OptionsDocument(effort=effort).model_dump()): limit
        for document, limit in limited
        for effort in EFFORTS
    }
    return _Questions(documents, requests)


def holds_up_to(limit: Sequence[float] | None) -> float:
    """Up to which limit of every rank a bound that was proved for limits of ranks holds."""
    return math.inf if limit is None else min(limit)
