"""``/v1/agents``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from zbv_solver.measure.rank_trace import RankTraceDocument

from zbv_service.api.bodies import is_gzip, read_json, read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import list_response
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.documents.parsing import decompressed, parse_body
from zbv_service.errors import AGENT_GONE, AGENT_OF_OTHERS, INVALID_BODY, TOO_MUCH_STORED
from zbv_service.records.agents import (
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
from zbv_service.records.lists import AgentListQuery
from zbv_service.runs.parts import MAX_LOG_BYTES, RankKey
from zbv_service.security.access import READ, READ_SCOPES, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import allows, grant_of

MAX_WAIT = 60.0
AGENT = needs("agent")


async def _require_own_agent(request: Request, agent_id: str) -> None:
    await state_of(request).agents.require_owner(grant_of(request), agent_id)


OWN_AGENT = [AGENT, Depends(_require_own_agent)]
"""The dependencies of a route that acts for an agent."""
_PRESENT = (AGENT_OF_OTHERS, AGENT_GONE)
"""Errors of a route that only a present agent of the caller's token may use."""

router = APIRouter(prefix="/v1/agents", tags=["agents"], generate_unique_id_function=operation_id)


@router.post(
    "",
    dependencies=[AGENT, STORES["agents"]],
    summary="Register an agent",
    status_code=201,
    response_model=RegisteredAgent,
    response_description="Registered. Send heartbeats, and ask for work.",
    openapi_extra=body_of(AgentRequest),
    responses={
        200: {"model": RegisteredAgent, "description": "This id was already registered."},
        **documented(INVALID_BODY, TOO_MUCH_STORED, *_PRESENT),
    },
)
async def register_agent(request: Request) -> Response:
    """The agent chooses its id, so it can repeat a registration whose response was lost."""
    found = state_of(request)
    body = await read_json(request, found.settings.max_body_bytes, partial(parse_body, AgentRequest))
    record, is_new = await found.agents.register(body, grant_of(request))
    document = RegisteredAgent(
        agent=record,
        heartbeat_seconds=found.settings.agent_heartbeat_seconds,
        timeout_seconds=found.settings.agent_timeout_seconds,
    )
    headers = {"Location": f"/v1/agents/{record.id}"}
    return Response(document.model_dump_json(), 201 if is_new else 200, headers, "application/json")


@router.get(
    "",
    dependencies=[READ],
    summary="List agents, newest first",
    response_model=AgentList,
)
async def list_agents(request: Request, query: Annotated[AgentListQuery, Query()]) -> Response:
    """By default, only agents that are live or draining. Paged like the other lists."""
    agents = state_of(request).agents
    return await list_response(
        request,
        query,
        agents.page,
        "agents",
        AgentDocument.text,
    )


@router.get(
    "/{agent_id}",
    dependencies=[needs("read", "agent")],
    summary="Get an agent",
    responses=documented(AGENT_OF_OTHERS),
)
async def get_agent(request: Request, agent_id: str) -> AgentDocument:
    """Includes agents that left or are lost. A token without the scope read can only get its own agents."""
    if not allows(grant_of(request).scopes, READ_SCOPES):
        await _require_own_agent(request, agent_id)
    return await state_of(request).agents.get(agent_id)


@router.get(
    "/{agent_id}/work",
    dependencies=OWN_AGENT,
    summary="Wait for an agent's work",
    response_model=WorkDocument,
    response_description="The agent's node of a run; the same until the agent reports its end.",
    responses={204: {"description": "No work in this time; ask again."}, **documented(*_PRESENT)},
)
async def get_work(
    request: Request, agent_id: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0
) -> Response:
    """Waits up to ``wait`` seconds. The request counts as a heartbeat."""
    found = state_of(request)
    # A longer wait without heartbeats would make the agent seem lost.
    longest = found.settings.agent_timeout_seconds / 2
    work = await found.agents.work(agent_id, min(wait, longest))
    if work is None:
        return Response(status_code=204)
    return Response(work.model_dump_json(), media_type="application/json")


@router.post(
    "/{agent_id}/heartbeat",
    dependencies=OWN_AGENT,
    summary="Send a heartbeat with the places of the ranks",
    response_model=HeartbeatAnswer,
    openapi_extra=body_of(Heartbeat),
    responses=documented(INVALID_BODY, *_PRESENT),
)
async def beat(request: Request, agent_id: str) -> HeartbeatAnswer:
    """The response says whether the agent must stop its ranks."""
    found = state_of(request)
    body = await read_json(request, found.settings.max_body_bytes, partial(parse_body, Heartbeat))
    return await found.agents.heartbeat(agent_id, body)


@router.post(
    "/{agent_id}/ended",
    dependencies=OWN_AGENT,
    summary="Report how an agent's node ended",
    status_code=204,
    openapi_extra=body_of(NodeEnd),
    responses=documented(INVALID_BODY, *_PRESENT),
)
async def report_end(request: Request, agent_id: str) -> Response:
    """Afterwards the agent is free. A repeated report changes nothing."""
    found = state_of(request)
    end = await read_json(request, found.settings.max_body_bytes, partial(parse_body, NodeEnd))
    await found.agents.ended(agent_id, end)
    return Response(status_code=204)


_PART = "/{agent_id}/runs/{run_id}/generations/{generation}/ranks/{rank}"
_Index = Annotated[int, Path(ge=0, le=2**31 - 1)]


async def _own_rank(
    request: Request, agent_id: str, run_id: str, generation: _Index, rank: _Index
) -> RankKey:
    """The rank of an address; the agent must be present and run or have run this rank."""
    found, key = state_of(request), RankKey(run_id, generation, rank)
    await found.agents.require_present(agent_id)
    await found.parts.require_owner(agent_id, key)
    return key


_Key = Annotated[RankKey, Depends(_own_rank)]


@router.put(
    _PART + "/trace",
    dependencies=OWN_AGENT,
    summary="Store a rank's trace",
    status_code=204,
    openapi_extra=body_of(RankTraceDocument),
    responses=documented(INVALID_BODY, *_PRESENT),
)
async def put_trace(request: Request, key: _Key) -> Response:
    """Replaces the rank's earlier trace. May be sent as gzip."""
    found = state_of(request)
    limit = found.settings.max_trace_bytes
    async with read_text(request, limit, None, may_be_gzip=True) as body:
        await found.parts.put_trace(key, body, limit if is_gzip(request) else None)
    return Response(status_code=204)


@router.put(
    _PART + "/log",
    dependencies=OWN_AGENT,
    summary="Store the end of a rank's log",
    status_code=204,
    openapi_extra={
        "requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
    responses=documented(*_PRESENT),
)
async def put_log(request: Request, key: _Key) -> Response:
    """At most 256 KiB, as text or gzip. Replaces an earlier log."""
    async with _small_body(request) as text:
        await state_of(request).parts.put_log(key, text)
    return Response(status_code=204)


@router.put(
    _PART + "/events",
    dependencies=OWN_AGENT,
    summary="Store events of a rank",
    status_code=204,
    openapi_extra=body_of(RankEvents),
    responses=documented(INVALID_BODY, *_PRESENT),
)
async def put_events(request: Request, key: _Key) -> Response:
    """Adds them to the events of the run; repeated events are ignored. May be sent as gzip."""
    async with _small_body(request) as text:
        await state_of(request).parts.put_events(key, text)
    return Response(status_code=204)


@asynccontextmanager
async def _small_body(request: Request) -> AsyncIterator[bytes]:
    """Within the block, a log or events, which count as a body in memory until they are stored."""
    async with read_text(request, MAX_LOG_BYTES, None, may_be_gzip=True) as body:
        yield decompressed(body, MAX_LOG_BYTES) if is_gzip(request) else bytes(body)


@router.post(
    "/{agent_id}/drain",
    dependencies=OWN_AGENT,
    summary="Stop assigning work to an agent",
    responses=documented(*_PRESENT),
)
async def drain_agent(request: Request, agent_id: str) -> AgentDocument:
    """The agent's current run continues."""
    return await state_of(request).agents.drain(agent_id)


@router.delete(
    "/{agent_id}",
    dependencies=OWN_AGENT,
    summary="Deregister an agent",
    status_code=204,
    responses=documented(AGENT_OF_OTHERS),
)
async def remove_agent(request: Request, agent_id: str) -> Response:
    """The agent's unfinished run fails."""
    await state_of(request).agents.leave(agent_id)
    return Response(status_code=204)
