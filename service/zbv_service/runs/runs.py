"""Accepting runs, and reading, cancelling and changing them. The dispatcher gathers agents for them."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.plan import Plan

from zbv_service.database import PlanTable, RunPlanTable, RunTable, SearchGone
from zbv_service.documents import parse_body
from zbv_service.http.problems import NOT_FOUND, RUN_STATE, ProblemError
from zbv_service.plans import Plans
from zbv_service.records import Page, Position, SearchRecord
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.documents import PlanChange, RunRequest
from zbv_service.runs.records import EventRecord, NewRun, RunFilter, RunRecord
from zbv_service.searches.searches import Searches


class Runs:
    """The runs of a service."""

    def __init__(
        self,
        runs: RunTable,
        run_plans: RunPlanTable,
        plan_table: PlanTable,
        plans: Plans,
        searches: Searches,
        dispatcher: Dispatcher,
    ):
        self._runs = runs
        self._run_plans = run_plans
        self._plan_table = plan_table
        self._plans = plans
        self._searches = searches
        self._dispatcher = dispatcher

    async def submit(self, body: Any, caller: str | None = None, most: int | None = None) -> RunRecord:
        """Accept the run that a request body asks for, or find it.

        Parameters
        ----------
        caller
            Who asks.
        most
            Unfinished searches that the caller may have, None for any number.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            429 when a search is needed and the caller has too many.
        """
        request = parse_body(RunRequest, body)
        _require_one_plan(request)
        _require_json(request.model.arguments)
        known = None if request.id is None else await self._runs.get(request.id)
        if known is not None:
            return known
        ranks_per_node = _spread(request, await self._pp_degree(request))
        now = datetime.now(UTC)
        chosen = request.search_options
        new = NewRun(
            id=request.id or uuid.uuid4().hex,
            plan_id=request.plan_id,
            search_id=None,
            search_options=None if chosen is None else chosen.model_dump(),
            model=request.model.model_dump(),
            nodes=request.nodes,
            ranks_per_node=ranks_per_node,
            steps=request.steps,
            options=request.options.model_dump(),
            created_at=now,
            created_by=caller,
        )
        record = await self._accepted(new, body, caller, most)
        self._dispatcher.wake()
        return record

    async def _accepted(self, new: NewRun, body: Any, caller: str | None, most: int | None) -> RunRecord:
        """The stored run; one without a plan waits for a search, which exists then."""
        if new.plan_id is not None:
            return await self._runs.add(new)
        while True:
            search = await self._search(body, caller, most)
            try:
                return await self._runs.add(replace(new, search_id=search.id))
            except SearchGone:
                continue  # somebody took the search of the same problem away just now: ask for another

    async def get(self, run_id: str) -> RunRecord:
        """A run; raises :class:`ProblemError` 404."""
        return _found(await self._runs.get(run_id), run_id)

    async def brief(self, run_id: str) -> RunRecord:
        """A run without its nodes; raises :class:`ProblemError` 404."""
        return _found(await self._runs.brief(run_id), run_id)

    async def page(self, wanted: RunFilter, limit: int, after: Position | None = None) -> Page[RunRecord]:
        """Some runs, the newest first, from a position on."""
        return await self._runs.page(wanted, limit, after)

    async def events(self, run_id: str, after: int, limit: int) -> list[EventRecord]:
        """What happened to a run; raises :class:`ProblemError` 404."""
        await self.brief(run_id)
        return await self._runs.events(run_id, after, limit)

    async def newest_events(self, run_id: str, limit: int) -> list[EventRecord]:
        """What happened to a run last, the newest first; raises :class:`ProblemError` 404."""
        await self.brief(run_id)
        return await self._runs.newest_events(run_id, limit)

    async def cancel(self, run_id: str) -> RunRecord:
        """Stop a run on all of its nodes; one that has ended stays as it is.

        The search for its plan is cancelled, too, unless others want it.
        """
        record = _found(await self._runs.request_cancel(run_id), run_id)
        if record.state == "cancelled" and record.plan_id is None and record.search_id is not None:
            await self._searches.cancel_unwanted(record.search_id)
        return record

    async def change_plan(self, run_id: str, body: Any) -> RunRecord:
        """Have a run change over to another plan of the same shape.

        Raises
        ------
        InvalidInput
            When there is no such plan, or its stages are not where the run's are.
        ProblemError
            404 for an unknown run, 409 for one that has ended or has no plan yet.
        """
        wanted = parse_body(PlanChange, body).plan_id
        record = await self.brief(run_id)
        if record.plan_id is not None:
            await self._require_same_shape(record.plan_id, wanted)
        if not await self._run_plans.change(run_id, wanted):
            state = (await self.brief(run_id)).state
            raise ProblemError(
                RUN_STATE, f"run {run_id} is {state}; only a run that has a plan and goes on can change it."
            )
        return await self.get(run_id)

    async def _pp_degree(self, request: RunRequest) -> int:
        if request.problem is not None:
            return request.problem.pp_degree
        plan_id = request.plan_id or ""
        found = await self._plan_table.pp_degree(plan_id)
        if found is None:
            raise InvalidInput.at(
                "/plan_id", f"found no plan {plan_id}; search one, or import it with POST /v1/plans."
            )
        return found

    async def _search(self, body: Any, caller: str | None, most: int | None) -> SearchRecord:
        """The search for a run's problem; its errors point into the run's body."""
        try:
            return await self._searches.submit(
                {"problem": body["problem"], "options": body.get("search_options") or {}},
                caller=caller,
                most=most,
                for_run=True,
            )
        except InvalidInput as error:
            raise InvalidInput([_of_run(issue) for issue in error.issues]) from None

    async def _require_same_shape(self, plan_id: str, wanted: str) -> None:
        if await self._plan_table.pp_degree(wanted) is None:
            raise InvalidInput.at("/plan_id", f"found no plan {wanted}; search one, or import it.")
        ours, theirs = await self._plans.plan(plan_id), await self._plans.plan(wanted)
        mine, other = _shape(ours), _shape(theirs)
        if mine != other:
            raise InvalidInput.at(
                "/plan_id",
                f"found a plan with {other}; the run has {mine}. A run keeps its ranks, its stages' places "
                f"and its microbatches.",
            )
        if _partition(ours) != _partition(theirs):
            raise InvalidInput.at(
                "/plan_id",
                "found a plan that cuts the model elsewhere; a run keeps every stage's layers. Begin a new "
                "run of that plan, from a checkpoint of this one.",
            )


def _partition(plan: Plan) -> tuple[tuple[str, ...], ...] | None:
    """The layers of every stage; None where stages were given."""
    return None if plan.problem.model is None else plan.problem.model.partition


def _shape(plan: Plan) -> str:
    """What cannot change while ranks go on, as text."""
    problem, placement = plan.problem, plan.problem.placement
    return (
        f"{placement.pp_degree} ranks, {placement.chunks} stages each, placement {placement.kind}, "
        f"{problem.microbatches} microbatches"
    )


def _require_one_plan(request: RunRequest) -> None:
    if (request.plan_id is None) == (request.problem is None):
        found = "neither" if request.plan_id is None else "both"
        raise InvalidInput.at("/plan_id", f"found {found}; give exactly one of plan_id and problem.")


def _spread(request: RunRequest, pp_degree: int) -> int:
    """Ranks per node; raises :class:`InvalidInput` when they do not spread evenly."""
    replicas = request.options.data_parallel
    ranks = pp_degree * replicas
    if ranks % request.nodes:
        raise InvalidInput.at(
            "/nodes",
            f"found {request.nodes}; {pp_degree} ranks of a pipeline times {replicas} replicas must spread "
            f"evenly over the nodes. Choose a divisor of {ranks}.",
        )
    return ranks // request.nodes


def _of_run(issue: Issue) -> Issue:
    """An issue of a search's body as one of the run's."""
    if issue.pointer.startswith("/options"):
        return Issue("/search_options" + issue.pointer.removeprefix("/options"), issue.detail)
    return issue


def _require_json(arguments: dict[str, Any]) -> None:
    """Numbers such as 1e999 are read as infinities, which JSON cannot say to the agents."""
    try:
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidInput.at(
            "/model/arguments", "holds a number too large or too many levels; agents must get it as JSON."
        ) from None


def _found(record: RunRecord | None, run_id: str) -> RunRecord:
    if record is None:
        raise ProblemError(NOT_FOUND, f"found no run {run_id}; GET /v1/runs lists them.")
    return record
