"""``/v1/runs``."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.sse import format_sse_event

from zbv_service.api import event_streams
from zbv_service.api.bodies import MEDIUM, read_json, read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.event_streams import EventNumber, LastEventId
from zbv_service.api.listing import list_response
from zbv_service.api.negotiation import EVENT_STREAM, accepts
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.compute.computations import ROWS_OF_NODE
from zbv_service.documents.parsing import parse_body
from zbv_service.errors import (
    CONFLICT,
    INVALID_BODY,
    INVALID_PARAMETER,
    TOO_MANY_SEARCHES,
    TOO_MUCH_STORED,
)
from zbv_service.records.lists import RunListQuery
from zbv_service.records.runs import RUN_ENDED, EventDocument, EventList, RunDocument, RunList, StepList
from zbv_service.runs.requests import PlanChange, RunRequest
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

RETRY_SECONDS = 1
_MOST = 2**31 - 1
_NO_STORE = {"Cache-Control": "no-store"}
LAUNCH = needs("launch")

IdempotencyKey = Annotated[
    str | None,
    Header(
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="A key, such as a UUID, so that a repeated request starts no second run: while the first "
        "run is stored, it is the answer. Each token has its own keys.",
    ),
]
Generation = Annotated[int | None, Query(ge=0, le=_MOST)]

router = APIRouter(prefix="/v1/runs", tags=["runs"], generate_unique_id_function=operation_id)


@router.post(
    "",
    dependencies=[LAUNCH, STORES["runs"]],
    summary="Run a plan, or search a problem's plan and run it",
    status_code=202,
    response_model=RunDocument,
    response_description="Accepted: it starts once its plan is found and all its agents are free. Follow the "
    "Location.",
    openapi_extra=body_of(RunRequest),
    responses=documented(INVALID_PARAMETER, INVALID_BODY, TOO_MANY_SEARCHES, TOO_MUCH_STORED),
)
async def submit_run(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """The run gets all its agents at once, or none. Send an Idempotency-Key: without one, a repeated request
    starts a second run."""
    found, grant = state_of(request), grant_of(request)
    # Each token has its own keys. Clients of the draft "The Idempotency-Key HTTP Header Field" quote them.
    key = None if idempotency_key is None else (grant.owner, idempotency_key.strip('"'))
    async with read_text(request, min(MEDIUM, found.settings.max_body_bytes)) as body:
        record = await found.runs.submit(body, grant, key)
    return await _response(record, 202)


@router.get(
    "",
    dependencies=[READ],
    summary="List runs, newest first",
    response_model=RunList,
)
async def list_runs(request: Request, query: Annotated[RunListQuery, Query()]) -> Response:
    """``next`` leads to older runs."""
    runs = state_of(request).runs
    return await list_response(
        request,
        query,
        runs.page,
        "runs",
        RunDocument.text,
    )


@router.get(
    "/{run_id}",
    dependencies=[READ],
    summary="Get a run",
    response_model=RunDocument,
)
async def get_run(request: Request, run_id: str) -> Response:
    """The state of the run, the places of its ranks, and why it failed."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        return await _response(await found.runs.get(run_id), 200)


@router.get(
    "/{run_id}/events",
    dependencies=[READ],
    summary="List or follow the events of a run",
    response_model=EventList,
    response_description=event_streams.DESCRIPTION,
    responses=event_streams.responses(
        "run", 'event: running\ndata: {"id":9,"kind":"running","detail":""}\nid: 9\n\n'
    ),
)
async def list_run_events(
    request: Request,
    run_id: str,
    after: EventNumber = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    last_event_id: LastEventId = None,
) -> Response:
    """The events after the one with the id ``after``, oldest first.

    With `Accept: text/event-stream`, the events are streamed until the run ends. A broken stream resumes
    after `Last-Event-ID`, at any service on the same database.
    """
    found, number = state_of(request), max(after or 0, last_event_id or 0)
    if not accepts(request, EVENT_STREAM):
        async with found.computations.listing(limit):
            events = await found.runs.events(run_id, number, limit)
            return await event_streams.listed(partial(EventList, events=events))
    is_over = (await found.runs.brief(run_id)).state in RUN_ENDED
    if is_over and not await found.runs.events(run_id, number, 1):
        return event_streams.over()
    return event_streams.followed(request, found.run_events, run_id, number, _encoded)


@router.post(
    "/{run_id}/cancel",
    dependencies=[LAUNCH],
    summary="Cancel a run",
    status_code=202,
    response_model=RunDocument,
    response_description="Its ranks will be stopped soon on all nodes.",
    responses={200: {"model": RunDocument, "description": "It has ended."}},
)
async def cancel_run(request: Request, run_id: str) -> Response:
    """A run that has ended does not change."""
    record = await state_of(request).runs.cancel(run_id)
    return await _response(record, 200 if record.state in RUN_ENDED else 202)


@router.post(
    "/{run_id}/plan",
    dependencies=[LAUNCH],
    summary="Change the plan of a run",
    status_code=202,
    response_model=RunDocument,
    response_description="Its ranks will change plans between two steps, and add the event `swapped`.",
    openapi_extra=body_of(PlanChange),
    responses=documented(INVALID_BODY, CONFLICT),
)
async def change_plan(request: Request, run_id: str) -> Response:
    """Accepts an offer, or any stored plan with the same ranks, placement and microbatches."""
    found = state_of(request)
    change = await read_json(request, found.settings.max_body_bytes, partial(parse_body, PlanChange))
    return await _response(await found.runs.change_plan(run_id, change.plan_id), 202)


@router.get(
    "/{run_id}/trace",
    dependencies=[READ],
    summary="Get the measured step of all ranks",
    response_class=Response,
    responses={
        200: {
            "description": "The newest step that all ranks have sent, in the Trace Event Format.",
            "content": {"application/json": {}},
        }
    },
)
async def get_run_trace(request: Request, run_id: str, generation: Generation = None) -> Response:
    """For Perfetto and chrome://tracing. The default is the newest generation that has traces."""
    found = state_of(request)
    text = await found.parts.merged_trace(await found.runs.brief(run_id), generation)
    return Response(text, media_type="application/json", headers=_NO_STORE)


@router.get(
    "/{run_id}/steps",
    dependencies=[READ],
    summary="Get the losses and times of a run's steps",
    response_model=StepList,
    response_description="All steps of a short run; of a long one some 500, with the first and the newest.",
)
async def get_run_steps(request: Request, run_id: str) -> Response:
    """Ranks send steps every few seconds. After a restart, steps that were run again replace earlier ones."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        steps = await found.steps.of(run_id, await found.parts.index(run_id))
    text = await asyncio.to_thread(StepList(steps=steps).model_dump_json)
    return Response(text, media_type="application/json", headers=_NO_STORE)


@router.get(
    "/{run_id}/ranks/{rank}/log",
    dependencies=[READ],
    summary="Get the end of a rank's log",
    response_class=PlainTextResponse,
)
async def get_rank_log(
    request: Request,
    run_id: str,
    rank: Annotated[int, Path(ge=0, le=_MOST)],
    generation: Generation = None,
) -> PlainTextResponse:
    """Agents send logs when a generation has ended. The default is the newest generation with a log."""
    found = state_of(request)
    await found.runs.brief(run_id)
    return PlainTextResponse(await found.parts.log(run_id, rank, generation), headers=_NO_STORE)


async def _response(record: RunDocument, status: int) -> Response:
    headers = {**_NO_STORE, "Location": f"/v1/runs/{record.id}"}
    if record.state not in RUN_ENDED:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return Response(await asyncio.to_thread(record.text), status, headers, "application/json")


def _encoded(record: EventDocument) -> bytes:
    if record.kind == "end":  # it is not stored, so it has no id to continue after
        return format_sse_event(event="end", data_str=json.dumps({"state": record.detail}))
    return format_sse_event(event=record.kind, id=str(record.id), data_str=record.model_dump_json())
