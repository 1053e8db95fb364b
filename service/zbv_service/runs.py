"""Accepting runs, and reading and cancelling them. Gathering agents for them is the dispatcher's."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

from zbv_solver.errors import InvalidInput

from zbv_service.agents import parse_body
from zbv_service.database import PlanTable, RunTable
from zbv_service.dispatch import Dispatcher
from zbv_service.problems import NOT_FOUND, ProblemError
from zbv_service.run_documents import RunRequest
from zbv_service.run_records import EventRecord, NewRun, RunRecord


class Runs:
    """The runs of a service."""

    def __init__(self, runs: RunTable, plans: PlanTable, dispatcher: Dispatcher):
        self._runs = runs
        self._plans = plans
        self._dispatcher = dispatcher

    async def submit(self, body: Any) -> RunRecord:
        """Accept the run that a request body asks for, or find it; raises :class:`InvalidInput`."""
        request = parse_body(RunRequest, body)
        _require_json(request.model.arguments)
        pp_degree = await self._plans.pp_degree(request.plan_id)
        if pp_degree is None:
            raise InvalidInput.at(
                "/plan_id", f"found no plan {request.plan_id}; search one, or import it with POST /v1/plans."
            )
        if pp_degree % request.nodes:
            raise InvalidInput.at(
                "/nodes",
                f"found {request.nodes}; the plan's {pp_degree} ranks must spread evenly over the nodes. "
                f"Choose a divisor of {pp_degree}.",
            )
        new = NewRun(
            id=request.id or uuid.uuid4().hex,
            plan_id=request.plan_id,
            model=request.model.model_dump(),
            nodes=request.nodes,
            ranks_per_node=pp_degree // request.nodes,
            steps=request.steps,
            options=request.options.model_dump(),
            created_at=datetime.now(UTC),
        )
        record = await self._runs.add(new)
        self._dispatcher.wake()
        return record

    async def get(self, run_id: str) -> RunRecord:
        """A run; raises :class:`ProblemError` 404."""
        return _found(await self._runs.get(run_id), run_id)

    async def newest(self, limit: int) -> list[RunRecord]:
        """The newest runs first."""
        return await self._runs.newest(limit)

    async def events(self, run_id: str, after: int, limit: int) -> list[EventRecord]:
        """What happened to a run; raises :class:`ProblemError` 404."""
        await self.get(run_id)
        return await self._runs.events(run_id, after, limit)

    async def cancel(self, run_id: str) -> RunRecord:
        """Stop a run on all of its nodes; one that has ended stays as it is."""
        return _found(await self._runs.request_cancel(run_id), run_id)


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
