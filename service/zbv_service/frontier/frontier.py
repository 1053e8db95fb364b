"""The frontier of a plan's model: the best stored plan within each memory limit, and running searches.

Nothing is stored for it. A point of the frontier is the plan's own problem with another limit; its plans
and searches are found by the hash of that problem, whichever client submitted them. If a search cut the
plan's layers, each point is a search that cuts them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zbv_solver.frontiers import limits as frontier
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known, best_within, fits
from zbv_solver.plans.plan import CutCertificate, Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json

from zbv_service.compute.cache import Cache, wait_a_while
from zbv_service.compute.computations import Computations
from zbv_service.database import PlanTable, SearchTable
from zbv_service.documents.packing import unpack
from zbv_service.documents.problems import asked_of
from zbv_service.errors import INVALID_PARAMETER, NOT_FOUND, TOO_MANY_SEARCHES, ProblemError
from zbv_service.frontier.points import CutSummary, Frontier, Point, newest, tightened
from zbv_service.frontier.problems import (
    FrontierProblems,
    holds_up_to,
    problems_of_layers,
    problems_of_stages,
)
from zbv_service.plans.schedules import Schedules
from zbv_service.records.searches import FINISHED, SearchRecord
from zbv_service.searches.searches import Searches

PATIENCE_SECONDS = 1.5
"""How long a page waits for bounds. They are ready when it is loaded again."""
CACHED_PLANS = 4096
MAX_STAGES = 4096
"""Largest number of stages: a frontier is dozens of problems, each with all stages."""
ANSWERED = ("done", "infeasible")

Needs = Callable[[Sequence[float]], float]
Bounds = tuple[float, ...] | None
"""A bound for each point; None while they are computed."""


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
        self._stored: Cache[tuple[float, CutSummary | None]] = Cache(CACHED_PLANS)

    async def of(self, plan: Plan) -> Frontier:
        """The frontier of a plan's model.

        Raises
        ------
        InvalidInput
            The problem has no memory.
        ProblemError
            503: too many computations are waiting.
        """
        needs: Needs
        if plan.cut is None:
            needs = partial(memory_fraction.needed, plan.problem)
            asked, bounds = await self._of_stages(plan.problem)
        else:
            needs = max
            asked, bounds = await self._of_layers(asked_of(plan))
        found = await self._searches.of_requests(list(asked.requests))
        if plan.cut is None:
            results, answered = await self._results_of_stages(asked)
        else:
            results, answered = _results_of_layers(plan, plan.cut, asked, found)
        known, cuts = await self._known(plan, results, needs)
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
                    problem=each.problem,
                    best=best_within(each.at, known),
                    bound=max(proved, default=None),
                    search=searches.get(each.at),
                    is_searched=each.at in answered,
                )
            )
        baselines = tuple(
            Known(each.name, needs(each.peak_memory), getattr(each, plan.problem.objective))
            for each in plan.baselines
        )
        return Frontier(plan.problem, known[0], tightened(points), known, baselines, cuts)

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

    async def _of_stages(self, problem: Problem) -> tuple[FrontierProblems, Bounds]:
        if problem.n_stages > MAX_STAGES:
            raise ProblemError(
                INVALID_PARAMETER,
                f"found a plan of {problem.n_stages} stages; a frontier takes at most {MAX_STAGES}.",
            )
        grid = frontier.grid(problem)
        asked = await self._computations.run(partial(problems_of_stages, grid=grid), problem)
        return asked, await _result_soon(self._schedules.bounds(problem, grid))

    async def _of_layers(self, question: LayeredProblem) -> tuple[FrontierProblems, Bounds]:
        grid = await self._schedules.limits(question)
        asked = await self._computations.run(partial(problems_of_layers, grid=grid), question)
        return asked, await _result_soon(self._schedules.floors(question, grid))

    async def _results_of_stages(self, asked: FrontierProblems) -> tuple[list[_Result], set[float]]:
        """The best stored plan of each problem, and the points that have one."""
        best = await self._plans.best_of(list(asked.keys))
        results = [
            _Result(asked.keys[key], each.plan_id, each.value, each.lower_bound) for key, each in best.items()
        ]
        return results, {each.at for each in asked.points if each.key in best}

    async def _known(
        self, plan: Plan, results: Iterable[_Result], needs: Needs
    ) -> tuple[tuple[Known, ...], dict[str, CutSummary] | None]:
        """The plan itself and the plans of the results, each once; and how a search cut their layers."""
        known = {plan.plan_id: Known(plan.plan_id, needs(plan.metrics.peak_memory), plan.objective)}
        cuts = None if plan.cut is None else {plan.plan_id: CutSummary.of(problem_json(plan.problem))}
        for each in results:
            if each.plan_id is not None and each.value is not None and each.plan_id not in known:
                need, cut = await self._need_and_cut(each.plan_id, needs)
                known[each.plan_id] = Known(each.plan_id, need, each.value)
                if cuts is not None and cut is not None:
                    cuts[each.plan_id] = cut
        return tuple(known.values()), cuts

    async def _need_and_cut(self, plan_id: str, needs: Needs) -> tuple[float, CutSummary | None]:
        """The limit that a stored plan needs, and how its layers are cut. Reads its document once."""

        async def load() -> tuple[float, CutSummary | None]:
            packed = await self._plans.document(plan_id)
            if packed is None:
                raise ProblemError(
                    NOT_FOUND, f"plan {plan_id} was removed in the meantime; load the page again."
                )
            peak_memory, cut = await self._computations.run(memory_and_cut_of, packed)
            return needs(peak_memory), cut

        # Needs are amounts where layers are cut, and fractions elsewhere.
        unit = "amount" if needs is max else "fraction"
        return await self._stored.get(f"{unit} {plan_id}", load)


def _results_of_layers(
    plan: Plan, cut: CutCertificate, asked: FrontierProblems, found: Mapping[str, SearchRecord]
) -> tuple[list[_Result], set[float]]:
    """The searches' results and the plan's own, and the points that a search has answered."""
    results = [
        _Result(asked.requests[key], each.plan_id, each.objective, each.lower_bound)
        for key, each in found.items()
    ]
    own = _Result(holds_up_to(plan.problem.memory.limit), plan.plan_id, plan.objective, cut.lower_bound)
    answered = {asked.requests[key] for key, each in found.items() if each.state in ANSWERED}
    return [*results, own], answered


async def _result_soon(computation: Coroutine[Any, Any, tuple[float, ...]]) -> Bounds:
    """The result of a computation, or None when it takes long; it then continues for later readers."""
    made = asyncio.ensure_future(computation)
    await wait_a_while([made], PATIENCE_SECONDS)
    return made.result() if made.done() else None


def memory_and_cut_of(packed: bytes) -> tuple[list[float], CutSummary | None]:
    """The memory that each rank of a packed plan needs, and how its layers are cut."""
    document = unpack(packed)
    problem = document["problem"]
    return document["metrics"]["peak_memory"], CutSummary.of(problem) if "partition" in problem else None
