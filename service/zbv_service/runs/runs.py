"""Accepts, reads, cancels and changes runs. The dispatcher assigns their agents."""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from zbv_solver.errors import InvalidInput

from zbv_service.compute.computations import Computations
from zbv_service.database import KeyReused, PlanTable, RunPlanTable, RunTable, SearchGone
from zbv_service.errors import CONFLICT, INVALID_PARAMETER, NOT_FOUND, ApiError
from zbv_service.plans.plans import Plans
from zbv_service.records.lists import Page, Position, RunListQuery
from zbv_service.records.runs import EventDocument, NewRun, RequestKey, RunDocument
from zbv_service.records.searches import NewSearch
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.requests import AskedRun, RunRequest, hash_of, read_run
from zbv_service.searches.searches import Searches
from zbv_service.security.tokens import Grant
from zbv_service.settings import Settings


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
        computations: Computations,
        settings: Settings,
    ):
        self._runs = runs
        self._run_plans = run_plans
        self._plan_table = plan_table
        self._plans = plans
        self._searches = searches
        self._dispatcher = dispatcher
        self._computations = computations
        self._settings = settings

    async def submit(
        self, body: bytes | bytearray, grant: Grant, key: tuple[str, str] | None = None
    ) -> RunDocument:
        """Accept the run of a request body, or return the run that this request created before.

        Parameters
        ----------
        body
            JSON text.
        key
            Names the request: the caller's name and its Idempotency-Key.

        Raises
        ------
        InvalidInput
            The body breaks a rule.
        ApiError
            422: the key belongs to another body. 429: a search is needed and the caller has too many.
        """
        asked = await self._computations.of_body(partial(read_run, self._settings), body)
        named = None if key is None else RequestKey(hash_of(key), asked.fingerprint)
        try:
            # A repeated request gets its run, even if the plan was removed since.
            known = None if named is None else await self._runs.of_request(named)
            return known or await self._add(asked, named, grant)
        except KeyReused:
            detail = "This key came with another body before; a new request needs a new key."
            errors = [{"parameter": "Idempotency-Key", "detail": detail}]
            raise ApiError(INVALID_PARAMETER, f"Idempotency-Key: {detail}", errors) from None

    async def _add(self, asked: AskedRun, named: RequestKey | None, grant: Grant) -> RunDocument:
        request = asked.request
        new = NewRun(
            id=uuid.uuid4().hex,
            name=request.name,
            plan_id=request.plan_id,
            search_id=None,
            model=request.model,
            script=request.script,
            nodes=request.nodes,
            ranks_per_node=_ranks_per_node(request, await self._pp_degree(asked)),
            steps=request.steps,
            options=request.options,
            created_at=datetime.now(UTC),
            created_by=grant.name,
        )
        if asked.search is None:
            record = await self._runs.add(new, named, asked.search_options)
        else:
            record = await self._add_with_search(new, named, asked, asked.search, grant)
        self._dispatcher.wake()
        return record

    async def _add_with_search(
        self,
        new: NewRun,
        named: RequestKey | None,
        asked: AskedRun,
        wanted: NewSearch,
        grant: Grant,
    ) -> RunDocument:
        while True:
            search = await self._searches.submit_read(wanted, grant, for_run=True)
            with suppress(SearchGone):  # it was shared, and removed or cancelled just now; submit another
                planning = new.model_copy(update={"search_id": search.id})
                return await self._runs.add(planning, named, asked.search_options)

    async def get(self, run_id: str) -> RunDocument:
        """A run; raises :class:`ApiError` 404."""
        return _found(await self._runs.get(run_id), run_id)

    async def brief(self, run_id: str) -> RunDocument:
        """A run without its nodes; raises :class:`ApiError` 404."""
        return _found(await self._runs.brief(run_id), run_id)

    async def page(self, wanted: RunListQuery, after: Position | None = None) -> Page[RunDocument]:
        """One page of runs, newest first, starting at a position."""
        return await self._runs.page(wanted, after)

    async def events(self, run_id: str, after: int, limit: int) -> list[EventDocument]:
        """The events of a run after a given event; raises :class:`ApiError` 404."""
        await self.brief(run_id)
        return await self._runs.events(run_id, after, limit)

    async def newest_events(self, run_id: str, limit: int) -> list[EventDocument]:
        """The newest events of a run, newest first; raises :class:`ApiError` 404."""
        await self.brief(run_id)
        return await self._runs.newest_events(run_id, limit)

    async def cancel(self, run_id: str) -> RunDocument:
        """Stop a run on all its nodes; a run that has ended does not change.

        The search for its plan is cancelled too, unless others use it.
        """
        record = _found(await self._runs.request_cancel(run_id), run_id)
        if record.state == "cancelled" and record.plan_id is None and record.search_id is not None:
            await self._searches.cancel_unwanted(record.search_id)
        return record

    async def change_plan(self, run_id: str, wanted: str) -> RunDocument:
        """Change a run to another plan of the same shape.

        Raises
        ------
        InvalidInput
            The plan does not exist, or its stages or microbatches differ from the run's.
        ApiError
            404: the run is unknown. 409: it has ended, has no plan yet, or runs a script.
        """
        record = await self.brief(run_id)
        if record.script is not None:
            raise ApiError(
                CONFLICT,
                f"run {run_id} runs a script, which keeps its plan. Cancel it, and start a run of the other "
                f"plan.",
            )
        if record.plan_id is not None:
            await self._require_same_shape(record.plan_id, wanted)
        if not await self._run_plans.change(run_id, wanted):
            state = (await self.brief(run_id)).state
            raise ApiError(
                CONFLICT, f"run {run_id} is {state}; only a run that has a plan and has not ended can."
            )
        return await self.get(run_id)

    async def _pp_degree(self, asked: AskedRun) -> int:
        if asked.pp_degree is not None:
            return asked.pp_degree
        plan_id = asked.request.plan_id or ""
        found = await self._plan_table.pp_degree(plan_id)
        if found is None:
            raise InvalidInput.at(
                "/plan_id", f"found no plan {plan_id}; search one, or import it with POST /v1/plans."
            )
        return found

    async def _require_same_shape(self, plan_id: str, wanted: str) -> None:
        if await self._plan_table.pp_degree(wanted) is None:
            raise InvalidInput.at("/plan_id", f"found no plan {wanted}; search one, or import it.")
        current, found = await self._plans.facts(plan_id), await self._plans.facts(wanted)
        if current.shape != found.shape:
            raise InvalidInput.at(
                "/plan_id",
                f"found a plan with {found.shape}; the run has {current.shape}. A run keeps its ranks, "
                f"placement and microbatches.",
            )
        if current.cut != found.cut:
            raise InvalidInput.at(
                "/plan_id",
                "found a plan that partitions the model differently; a run keeps the layers of every stage. "
                "Start a new run of that plan from a checkpoint of this one.",
            )


def _ranks_per_node(request: RunRequest, pp_degree: int) -> int:
    """Ranks per node; raises :class:`InvalidInput` if the nodes cannot have equal numbers."""
    replicas = request.options.data_parallel
    ranks = pp_degree * replicas
    if ranks % request.nodes:
        raise InvalidInput.at(
            "/nodes",
            f"found {request.nodes}; {pp_degree} ranks of a pipeline times {replicas} replicas must be "
            f"divided evenly among the nodes. Choose a divisor of {ranks}.",
        )
    return ranks // request.nodes


def _found(record: RunDocument | None, run_id: str) -> RunDocument:
    if record is None:
        raise ApiError(NOT_FOUND, f"found no run {run_id}; GET /v1/runs lists them.")
    return record
