"""``/v1/agents``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from zbv_solver.measure.rank_trace import RankTraceDocument

from zbv_service.api.bodies import read_json, read_packed
from zbv_service.api.cursors import neighbours, position_of
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import AgentListQuery, page_at
from zbv_service.api.negotiation import VARY, wants_page
from zbv_service.api.openapi import body_of, text_body
from zbv_service.api.state import SEE_PAGE, state_of
from zbv_service.documents.parsing import decompressed, parse_body
from zbv_service.errors import (
    AGENT_GONE,
    AGENT_OF_OTHERS,
    BODY_TOO_LARGE,
    INVALID_BODY,
    INVALID_PARAMETER,
    MALFORMED_JSON,
    NOT_FOUND,
    UNSUPPORTED_MEDIA_TYPE,
)
from zbv_service.runs.agent_documents import (
    AgentDocument,
    AgentList,
    AgentRequest,
    Heartbeat,
    HeartbeatAnswer,
    NodeEnd,
    RankEvents,
    RegisteredAgent,
    WorkDocument,
)
from zbv_service.runs.parts import MAX_LOG_BYTES
from zbv_service.security.grants import grant_of
from zbv_service.security.scheme import READ, READ_SCOPES, needs
from zbv_service.security.scopes import allows

MAX_WAIT = 60.0
_BODY = (MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, INVALID_BODY)

AGENT = needs("agent")
READ_OR_AGENT = needs("read", "agent")


async def _own_agent(request: Request, agent_id: str) -> None:
    await state_of(request).agents.owners.require(grant_of(request), agent_id)


OWN_AGENT = [AGENT, Depends(_own_agent)]
"""The dependencies of a route that acts for an agent."""

router = APIRouter(prefix="/v1/agents", tags=["agents"])


@router.post(
    "",
    operation_id="register_agent",
    dependencies=[AGENT],
    summary="Offer a node",
    status_code=201,
    response_model=RegisteredAgent,
    response_description="Registered: give signs of life, and ask for work.",
    openapi_extra=body_of(AgentRequest),
    responses={
        200: {"model": RegisteredAgent, "description": "Registered before, under this id."},
        **documented(*_BODY, AGENT_OF_OTHERS, AGENT_GONE),
    },
)
async def register_agent(request: Request) -> Response:
    """The agent chooses its id, so a registration whose answer was lost can be repeated."""
    found = state_of(request)
    offered = await read_json(request, found.settings.max_body_bytes, partial(parse_body, AgentRequest))
    record, is_new = await found.agents.register(offered, grant_of(request))
    answer = RegisteredAgent(
        agent=AgentDocument.of(record),
        heartbeat_seconds=found.settings.agent_heartbeat_seconds,
        timeout_seconds=found.settings.agent_timeout_seconds,
    )
    headers = {"Location": f"/v1/agents/{record.id}"}
    return Response(answer.model_dump_json(), 201 if is_new else 200, headers, "application/json")


@router.get(
    "",
    operation_id="list_agents",
    dependencies=[READ],
    summary="Agents, the newest first",
    response_model=AgentList,
    responses={**SEE_PAGE, **documented(INVALID_PARAMETER)},
)
async def list_agents(request: Request, query: Annotated[AgentListQuery, Query()]) -> Response:
    """Those that are there, unless ``state`` asks for others; by pages, as the other lists."""
    if wants_page(request):
        return page_at(request, "/agents")
    found = state_of(request)
    async with found.computations.listing(query.limit):
        page = await found.agents.page(query.filter, query.limit, position_of(query.cursor))
    around = neighbours(request, page)

    def write() -> str:
        agents = [AgentDocument.of(record) for record in page.items]
        return AgentList(agents=agents, next=around.next, previous=around.previous).model_dump_json()

    headers = {**VARY, **around.fields, "Cache-Control": "no-store"}
    text = await found.computations.write(write)
    return Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{agent_id}",
    operation_id="get_agent",
    dependencies=[READ_OR_AGENT],
    summary="An agent",
    responses=documented(AGENT_OF_OTHERS, NOT_FOUND),
)
async def get_agent(request: Request, agent_id: str) -> AgentDocument:
    """Also one that left or was lost. A token without the scope read sees its own agents only."""
    if not allows(grant_of(request).scopes, READ_SCOPES):
        await _own_agent(request, agent_id)
    return AgentDocument.of(await state_of(request).agents.get(agent_id))


@router.get(
    "/{agent_id}/work",
    operation_id="get_work",
    dependencies=OWN_AGENT,
    summary="An agent's work, waited for",
    response_model=WorkDocument,
    response_description="Its node of a run; the same until its end is reported.",
    responses={
        204: {"description": "There was none for so long; ask again."},
        **documented(AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE, INVALID_PARAMETER),
    },
)
async def get_work(
    request: Request, agent_id: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0
) -> Response:
    """Waits up to ``wait`` seconds. Asking is a sign of life, as a heartbeat is."""
    found = state_of(request)
    # Longer than half the timeout, and the agent would seem lost while it waits here.
    longest = found.settings.agent_timeout_seconds / 2
    work = await found.agents.work(agent_id, min(wait, longest))
    if work is None:
        return Response(status_code=204)
    return Response(WorkDocument.of(work).model_dump_json(), media_type="application/json")


@router.post(
    "/{agent_id}/heartbeat",
    operation_id="beat",
    dependencies=OWN_AGENT,
    summary="A sign of life, and where the ranks are",
    response_model=HeartbeatAnswer,
    openapi_extra=body_of(Heartbeat),
    responses=documented(*_BODY, AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE),
)
async def beat(request: Request, agent_id: str) -> HeartbeatAnswer:
    """The answer says whether the ranks must end."""
    found = state_of(request)
    sent = await read_json(request, found.settings.max_body_bytes, partial(parse_body, Heartbeat))
    return await found.agents.heartbeat(agent_id, sent)


@router.post(
    "/{agent_id}/ended",
    operation_id="report_end",
    dependencies=OWN_AGENT,
    summary="How the node of a run ended",
    status_code=204,
    openapi_extra=body_of(NodeEnd),
    responses=documented(*_BODY, AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE),
)
async def report_end(request: Request, agent_id: str) -> Response:
    """The agent is free afterwards. Saying it twice changes nothing."""
    found = state_of(request)
    end = await read_json(request, found.settings.max_body_bytes, partial(parse_body, NodeEnd))
    await found.agents.ended(agent_id, end)
    return Response(status_code=204)


_PART = "/{agent_id}/runs/{run_id}/generations/{generation}/ranks/{rank}"
Index = Annotated[int, Path(ge=0, le=2**31 - 1)]


@router.put(
    _PART + "/trace",
    operation_id="put_trace",
    dependencies=OWN_AGENT,
    summary="What a rank measured",
    status_code=204,
    openapi_extra=body_of(RankTraceDocument),
    responses=documented(*_BODY, AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE, INVALID_PARAMETER),
)
async def put_trace(request: Request, agent_id: str, run_id: str, generation: Index, rank: Index) -> Response:
    """Takes the place of the rank's former trace. May be sent as gzip."""
    found = state_of(request)
    await found.agents.require_present(agent_id)
    await found.parts.require_owner(agent_id, run_id, generation, rank)
    limit = found.settings.max_trace_bytes
    async with read_packed(request, limit) as (body, is_gzip):
        await found.parts.put_trace(run_id, generation, rank, body, is_gzip, limit)
    return Response(status_code=204)


@router.put(
    _PART + "/log",
    operation_id="put_log",
    dependencies=OWN_AGENT,
    summary="The end of a rank's log",
    status_code=204,
    openapi_extra=text_body(),
    responses=documented(
        MALFORMED_JSON,
        BODY_TOO_LARGE,
        UNSUPPORTED_MEDIA_TYPE,
        AGENT_OF_OTHERS,
        NOT_FOUND,
        AGENT_GONE,
        INVALID_PARAMETER,
    ),
)
async def put_log(request: Request, agent_id: str, run_id: str, generation: Index, rank: Index) -> Response:
    """At most 256 KiB, as text or gzip of it; takes the place of a former one."""
    found = state_of(request)
    await found.agents.require_present(agent_id)
    await found.parts.require_owner(agent_id, run_id, generation, rank)
    async with read_packed(request, MAX_LOG_BYTES) as (body, is_gzip):
        text = decompressed(body, MAX_LOG_BYTES) if is_gzip else bytes(body)
        await found.parts.put_log(run_id, generation, rank, text)
    return Response(status_code=204)


@router.put(
    _PART + "/events",
    operation_id="put_events",
    dependencies=OWN_AGENT,
    summary="What happened on a rank",
    status_code=204,
    openapi_extra=body_of(RankEvents),
    responses=documented(*_BODY, AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE, INVALID_PARAMETER),
)
async def put_events(
    request: Request, agent_id: str, run_id: str, generation: Index, rank: Index
) -> Response:
    """They become events of the run. Sending one again changes nothing. May be sent as gzip."""
    found = state_of(request)
    await found.agents.require_present(agent_id)
    await found.parts.require_owner(agent_id, run_id, generation, rank)
    async with read_packed(request, MAX_LOG_BYTES) as (body, is_gzip):
        text = decompressed(body, MAX_LOG_BYTES) if is_gzip else bytes(body)
        await found.parts.put_events(run_id, generation, rank, text)
    return Response(status_code=204)


@router.post(
    "/{agent_id}/drain",
    operation_id="drain_agent",
    dependencies=OWN_AGENT,
    summary="Give an agent no more work",
    responses=documented(AGENT_OF_OTHERS, NOT_FOUND, AGENT_GONE),
)
async def drain_agent(request: Request, agent_id: str) -> AgentDocument:
    """A run that it has goes on."""
    return AgentDocument.of(await state_of(request).agents.drain(agent_id))


@router.delete(
    "/{agent_id}",
    operation_id="remove_agent",
    dependencies=OWN_AGENT,
    summary="Deregister an agent",
    status_code=204,
    responses=documented(AGENT_OF_OTHERS, NOT_FOUND),
)
async def remove_agent(request: Request, agent_id: str) -> Response:
    """A run that it still has fails."""
    await state_of(request).agents.leave(agent_id)
    return Response(status_code=204)
