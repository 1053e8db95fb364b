"""``/v1/runs``."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse

from zbv_service.api.bodies import MEDIUM, read_json, read_text
from zbv_service.api.cursors import neighbours, position_of
from zbv_service.api.error_handlers import documented
from zbv_service.api.idempotency import KEY_PARAMETER
from zbv_service.api.listing import RunListQuery, page_at
from zbv_service.api.negotiation import VARY, wants_page
from zbv_service.api.openapi import body_of
from zbv_service.api.state import SEE_PAGE, caller_of, most_searches, request_key, state_of
from zbv_service.documents.parsing import parse_body
from zbv_service.errors import (
    BODY_TOO_LARGE,
    IDEMPOTENCY_KEY_IN_USE,
    IDEMPOTENCY_KEY_REUSED,
    INVALID_BODY,
    INVALID_IDEMPOTENCY_KEY,
    INVALID_PARAMETER,
    MALFORMED_JSON,
    NOT_FOUND,
    RUN_REMOVED,
    RUN_STATE,
    TOO_MANY_SEARCHES,
    UNSUPPORTED_MEDIA_TYPE,
)
from zbv_service.records.runs import RUN_ENDED, RunRecord
from zbv_service.runs.documents import (
    EventDocument,
    EventList,
    PlanChange,
    RunDocument,
    RunList,
    RunRequest,
)
from zbv_service.security.scheme import READ, needs

RETRY_SECONDS = 1
_MAX_EVENT = 2**31 - 1
_MAX_RANK = 2**31 - 1

Generation = Annotated[int | None, Query(ge=0, le=_MAX_EVENT)]
Rank = Annotated[int, Path(ge=0, le=_MAX_RANK)]

LAUNCH = needs("launch")

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post(
    "",
    operation_id="submit_run",
    dependencies=[LAUNCH],
    summary="Run a plan, or a problem's plan, on agents",
    status_code=202,
    response_model=RunDocument,
    response_description="Accepted: it starts once its plan is found and all its agents are free. Follow the "
    "Location.",
    openapi_extra={**body_of(RunRequest), "parameters": [KEY_PARAMETER]},
    responses=documented(
        MALFORMED_JSON,
        INVALID_IDEMPOTENCY_KEY,
        IDEMPOTENCY_KEY_IN_USE,
        RUN_REMOVED,
        BODY_TOO_LARGE,
        UNSUPPORTED_MEDIA_TYPE,
        INVALID_BODY,
        IDEMPOTENCY_KEY_REUSED,
        TOO_MANY_SEARCHES,
    ),
)
async def submit_run(request: Request) -> Response:
    """It gets all its agents at once, or none. Send an Idempotency-Key: without one, a repeated request
    starts a second run."""
    found = state_of(request)
    key, limit = request_key(request), min(MEDIUM, found.settings.max_body_bytes)
    async with read_text(request, limit) as body:
        record = await found.runs.submit(
            body, key=key, caller=caller_of(request), most=most_searches(request)
        )
    return _answer(record, 202)


@router.get(
    "",
    operation_id="list_runs",
    dependencies=[READ],
    summary="Runs, the newest first",
    response_model=RunList,
    responses={**SEE_PAGE, **documented(INVALID_PARAMETER)},
)
async def list_runs(request: Request, query: Annotated[RunListQuery, Query()]) -> Response:
    """By pages: ``next`` leads to older ones, ``previous`` to newer ones."""
    if wants_page(request):
        return page_at(request, "/runs")
    found = state_of(request)
    async with found.computations.listing(query.limit):
        page = await found.runs.page(query.filter, query.limit, position_of(query.cursor))
    around = neighbours(request, page)

    def write() -> str:
        runs = [*map(_json, page.items)]
        return json.dumps({"runs": runs, "next": around.next, "previous": around.previous})

    headers = {**VARY, **around.fields, "Cache-Control": "no-store"}
    text = await found.computations.write(write)
    return Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{run_id}",
    operation_id="get_run",
    dependencies=[READ],
    summary="A run",
    response_model=RunDocument,
    responses={**SEE_PAGE, **documented(NOT_FOUND)},
)
async def get_run(request: Request, run_id: str) -> Response:
    """Its state, where its ranks are, and why it failed."""
    if wants_page(request):
        return page_at(request, f"/runs/{run_id}")
    return _answer(await state_of(request).runs.get(run_id), 200)


@router.get(
    "/{run_id}/events",
    operation_id="list_run_events",
    dependencies=[READ],
    summary="What happened to a run",
    responses=documented(NOT_FOUND, INVALID_PARAMETER),
)
async def list_run_events(
    request: Request,
    run_id: str,
    after: Annotated[int, Query(ge=0, le=_MAX_EVENT)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> EventList:
    """The oldest first, from the one after ``after``."""
    records = await state_of(request).runs.events(run_id, after, limit)
    return EventList(events=[EventDocument.of(record) for record in records])


@router.post(
    "/{run_id}/cancel",
    operation_id="cancel_run",
    dependencies=[LAUNCH],
    summary="Stop a run",
    status_code=202,
    response_model=RunDocument,
    response_description="Its ranks will be stopped soon, everywhere.",
    responses={200: {"model": RunDocument, "description": "It has ended."}, **documented(NOT_FOUND)},
)
async def cancel_run(request: Request, run_id: str) -> Response:
    """A run that has ended stays as it is."""
    record = await state_of(request).runs.cancel(run_id)
    return _answer(record, 200 if record.state in RUN_ENDED else 202)


@router.post(
    "/{run_id}/plan",
    operation_id="change_plan",
    dependencies=[LAUNCH],
    summary="Change a run over to another plan",
    status_code=202,
    response_model=RunDocument,
    response_description="Its ranks change over between two steps; the event swapped says that they have.",
    openapi_extra=body_of(PlanChange),
    responses=documented(
        MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, INVALID_BODY, NOT_FOUND, RUN_STATE
    ),
)
async def change_plan(request: Request, run_id: str) -> Response:
    """Takes an offer, or any stored plan with the same ranks, placement and microbatches."""
    found = state_of(request)
    change = await read_json(request, found.settings.max_body_bytes, partial(parse_body, PlanChange))
    return _answer(await found.runs.change_plan(run_id, change.plan_id), 202)


@router.get(
    "/{run_id}/trace",
    operation_id="get_run_trace",
    dependencies=[READ],
    summary="What the ranks measured, on one clock",
    response_class=Response,
    responses={
        200: {
            "description": "The newest step that all ranks have sent, in the Trace Event Format.",
            "content": {"application/json": {}},
        },
        **documented(NOT_FOUND, INVALID_PARAMETER),
    },
)
async def get_run_trace(request: Request, run_id: str, generation: Generation = None) -> Response:
    """Opens in Perfetto and chrome://tracing; of the newest generation that has traces, unless told."""
    found = state_of(request)
    text = await found.parts.merged_trace(await found.runs.brief(run_id), generation)
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


@router.get(
    "/{run_id}/ranks/{rank}/log",
    operation_id="get_rank_log",
    dependencies=[READ],
    summary="The end of a rank's log",
    response_class=PlainTextResponse,
    responses=documented(NOT_FOUND, INVALID_PARAMETER),
)
async def get_rank_log(
    request: Request,
    run_id: str,
    rank: Annotated[int, Path(ge=0, le=_MAX_RANK)],
    generation: Generation = None,
) -> PlainTextResponse:
    """Sent when a generation has ended; of the newest that has one, unless told."""
    found = state_of(request)
    await found.runs.brief(run_id)
    return PlainTextResponse(
        await found.parts.log(run_id, rank, generation), headers={"Cache-Control": "no-store"}
    )


def _answer(record: RunRecord, status: int) -> Response:
    headers = {**VARY, "Location": f"/v1/runs/{record.id}", "Cache-Control": "no-store"}
    if record.state not in RUN_ENDED:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return Response(json.dumps(_json(record)), status, headers, "application/json")


def _json(record: RunRecord) -> dict[str, Any]:
    document = RunDocument.of(record)
    made: dict[str, Any] = document.model_dump(mode="json")
    if document.error is not None:
        made["error"] = document.error.model_dump(mode="json", exclude_none=True)
    return made
