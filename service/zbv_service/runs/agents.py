"""Registering agents, giving them work, and hearing from them. Gathering them is the dispatcher's."""

from __future__ import annotations

import asyncio
from typing import Any

from zbv_service.database import AgentTable, RunTable
from zbv_service.documents import parse_body
from zbv_service.http.problems import AGENT_GONE, NOT_FOUND, ProblemError
from zbv_service.records import Page, Position
from zbv_service.runs.agent_documents import AgentRequest, Heartbeat, HeartbeatAnswer, NodeEnd
from zbv_service.runs.agent_owners import AgentOwners
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.records import (
    AGENT_ENDED,
    AgentFilter,
    AgentRecord,
    NewAgent,
    NodeReport,
    RunRecord,
    StopCause,
    Work,
)
from zbv_service.security.grants import Grant
from zbv_service.waiting import happened

POLL_SECONDS = 1.0
"""How often work is looked for that another service may have assigned."""


class Agents:
    """The agents of a service."""

    def __init__(self, agents: AgentTable, runs: RunTable, dispatcher: Dispatcher):
        self._agents = agents
        self._runs = runs
        self._dispatcher = dispatcher
        self.owners = AgentOwners(agents)

    async def register(self, body: Any, grant: Grant) -> tuple[AgentRecord, bool]:
        """The agent of a request body, and whether it is new.

        Raises
        ------
        InvalidInput
            When the body breaks a rule.
        ProblemError
            403 when another token has registered this agent.
        """
        request = parse_body(AgentRequest, body)
        record, is_new = await self._agents.add(NewAgent(**request.model_dump(), owner=grant.owner))
        if not is_new:
            await self.owners.require(grant, record.id)
        self._dispatcher.wake()
        return _present(record, record.id), is_new

    async def get(self, agent_id: str) -> AgentRecord:
        """An agent; raises :class:`ProblemError` 404."""
        return _found(await self._agents.get(agent_id), agent_id)

    async def page(self, wanted: AgentFilter, limit: int, after: Position | None = None) -> Page[AgentRecord]:
        """Some agents, the newest first, from a position on."""
        return await self._agents.page(wanted, limit, after)

    async def work(self, agent_id: str, wait_seconds: float) -> Work | None:
        """An agent's work, waited for; asking is a sign of life.

        Raises
        ------
        ProblemError
            404 for an unknown agent, 410 for one that is lost or has left.
        """
        _present(await self._agents.seen(agent_id), agent_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while True:
            rung = self._dispatcher.assigned
            work = await self._runs.work_of(agent_id)
            left = deadline - loop.time()
            if work is not None or left <= 0 or self._dispatcher.is_stopping:
                return work
            await happened(rung, min(left, POLL_SECONDS))

    async def heartbeat(self, agent_id: str, body: Any) -> HeartbeatAnswer:
        """Note where an agent and its ranks are, and say whether to go on; raises as :meth:`work`."""
        beat = parse_body(Heartbeat, body)
        _present(await self._agents.seen(agent_id, beat.port), agent_id)
        if beat.run_id is None:
            return HeartbeatAnswer(stop=False)
        await self._runs.progressed(agent_id, beat.run_id, [place.model_dump() for place in beat.ranks])
        return _orders_of(await self._runs.get(beat.run_id))

    async def ended(self, agent_id: str, body: Any) -> None:
        """Note how an agent's node ended; raises as :meth:`work`."""
        end = parse_body(NodeEnd, body)
        _present(await self._agents.seen(agent_id), agent_id)
        failures = [failure.stored() for failure in end.failures]
        await self._runs.ended(agent_id, NodeReport(end.run_id, end.generation, end.outcome, failures))
        self._dispatcher.wake()

    async def require_present(self, agent_id: str) -> None:
        """A sign of life of an agent that sends something; raises as :meth:`work`."""
        _present(await self._agents.seen(agent_id), agent_id)

    async def drain(self, agent_id: str) -> AgentRecord:
        """Give an agent no more work; raises as :meth:`work`."""
        return _present(await self._agents.drain(agent_id), agent_id)

    async def leave(self, agent_id: str) -> None:
        """Deregister an agent; one that has left stays so. Raises :class:`ProblemError` 404."""
        _found(await self._agents.leave(agent_id), agent_id)


def _orders_of(run: RunRecord | None) -> HeartbeatAnswer:
    """What an agent is to do about a run."""
    if run is None:
        return _stop("unknown-run", "the service does not know this run")
    if run.cancel_requested:
        return _stop("cancelled", "the run was cancelled")
    if run.stop_requested:
        return _stop("failed", "the run failed elsewhere")
    return HeartbeatAnswer(stop=False, plan_id=run.target_plan_id)


def _stop(cause: StopCause, reason: str) -> HeartbeatAnswer:
    return HeartbeatAnswer(stop=True, cause=cause, reason=reason)


def _found(record: AgentRecord | None, agent_id: str) -> AgentRecord:
    if record is None:
        raise ProblemError(NOT_FOUND, f"found no agent {agent_id}; GET /v1/agents lists them.")
    return record


def _present(record: AgentRecord | None, agent_id: str) -> AgentRecord:
    found = _found(record, agent_id)
    if found.state in AGENT_ENDED:
        raise ProblemError(
            AGENT_GONE,
            f"agent {found.name} is {found.state}, and its part of a run is over. Stop its ranks and "
            f"register again, under a new id.",
        )
    return found
