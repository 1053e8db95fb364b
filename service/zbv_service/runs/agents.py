"""Registers agents, assigns their work, and takes their heartbeats and reports."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zbv_service.compute.waiting import happened
from zbv_service.database import AgentTable, DatabaseAway, HeartbeatTable, RunTable
from zbv_service.errors import AGENT_GONE, AGENT_OF_OTHERS, NOT_FOUND, ApiError
from zbv_service.records.agents import (
    AGENT_ENDED,
    AgentDocument,
    AgentRequest,
    AgentState,
    BeatAnswer,
    Heartbeat,
    HeartbeatAnswer,
    NodeEnd,
    RunOrders,
    WorkDocument,
)
from zbv_service.records.lists import AgentListQuery, Page, Position
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.security.tokens import Grant

PAUSE_SECONDS = 0.05
"""Seconds between two writes, so that each stores many heartbeats; a single one does not wait."""
MOST_BEATS = 256
"""Most heartbeats in one write, which locks as many agents."""
_ALIVE = Heartbeat()
"""That of an agent that asks for work."""

_Waiting = tuple[str, Heartbeat, "asyncio.Future[BeatAnswer]"]


class Heartbeats:
    """The heartbeats that a service receives; those that arrive during a write are stored by the next one."""

    def __init__(self, table: HeartbeatTable):
        self._table = table
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def store(self, agent_id: str, beat: Heartbeat) -> BeatAnswer:
        """Store a heartbeat, and return the answer for its agent; raises :class:`DatabaseAway`."""
        future: asyncio.Future[BeatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append((agent_id, beat, future))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="zbv-heartbeats")
        return await future

    async def stop(self) -> None:
        """Store the remaining heartbeats; no more arrive."""
        if self._writer is not None:
            await self._writer

    async def _write_all(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting[:MOST_BEATS], self._waiting[MOST_BEATS:]
            await self._write(taken)
            if self._waiting or len(taken) > 1:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _write(self, taken: Sequence[_Waiting]) -> None:
        last = {(agent_id, beat.run_id): beat for agent_id, beat, _ in taken}
        try:
            answers = await self._table.store([(agent_id, beat) for (agent_id, _), beat in last.items()])
        except Exception as error:  # all waiting requests get it, as if each had stored alone
            for *_, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        found = dict(zip(last, answers, strict=True))
        for agent_id, beat, future in taken:
            if not future.done():  # the request may have been cancelled
                future.set_result(found[agent_id, beat.run_id])


POLL_SECONDS = 1.0
"""Seconds between queries for work that another service assigned."""

logger = logging.getLogger(__name__)


class Assignments:
    """The agents that wait for work at this service; one query serves all of them."""

    def __init__(self, runs: RunTable, dispatcher: Dispatcher):
        self._runs = runs
        self._dispatcher = dispatcher
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._looker: asyncio.Task[None] | None = None

    @contextmanager
    def expected(self, agent_id: str) -> Iterator[asyncio.Event]:
        """Within the block, an event that is set when an agent may have work, or when the service stops."""
        event = asyncio.Event()
        self._waiting.setdefault(agent_id, set()).add(event)
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._look_on(), name="zbv-waiting-agents")
        try:
            yield event
        finally:
            events = self._waiting[agent_id]
            events.discard(event)
            if not events:
                del self._waiting[agent_id]

    async def _look_on(self) -> None:
        while self._waiting:
            rung = self._dispatcher.assigned  # taken first, to notice assignments during the query
            if self._dispatcher.is_stopping:
                self._wake(list(self._waiting))
                return
            try:
                self._wake(await self._runs.with_work(list(self._waiting)))
            except DatabaseAway as error:
                logger.warning("%s Agents continue to wait for work.", error)
            await happened(rung, POLL_SECONDS)

    def _wake(self, agent_ids: list[str]) -> None:
        for agent_id in agent_ids:
            for event in self._waiting.get(agent_id, ()):
                event.set()


OWNERS_CACHED = 16_384
MOST_DETAILS = 64 * 1024
"""About the most characters of all details in the report of a node's end."""


class Agents:
    """The agents of a service. Only the token that registered an agent, or an admin token, may act for it."""

    def __init__(self, agents: AgentTable, runs: RunTable, heartbeats: Heartbeats, dispatcher: Dispatcher):
        self._agents = agents
        self._runs = runs
        self._heartbeats = heartbeats
        self._dispatcher = dispatcher
        self._assignments = Assignments(runs, dispatcher)
        # An owner changes only if an agent that is gone registers again with its id.
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def register(self, request: AgentRequest, grant: Grant) -> tuple[AgentDocument, bool]:
        """Register an agent; returns its record and whether it is new.

        Raises
        ------
        ApiError
            403: another token has registered this agent.
        """
        record, is_new = await self._agents.add(request, grant.owner)
        if is_new:
            self._owners.pop(record.id, None)
        else:
            await self.require_owner(grant, record.id)
        self._dispatcher.wake()
        _require_present(record.id, record.name, record.state)
        return record, is_new

    async def require_owner(self, grant: Grant, agent_id: str) -> None:
        """Require that a caller may act for an agent; anyone may act for an unknown agent.

        Raises
        ------
        ApiError
            403: the caller may not.
        """
        if "admin" in grant.scopes:
            return
        owner = self._owners.get(agent_id)
        if owner is None:
            agent = await self._agents.get(agent_id)
            if agent is None:
                return
            owner = self._owners[agent_id] = agent.owner
            if len(self._owners) > OWNERS_CACHED:
                self._owners.popitem(last=False)
        if owner != grant.owner:
            raise ApiError(
                AGENT_OF_OTHERS,
                f"agent {agent_id} was registered with another token; only that token, or one with the scope "
                f"admin, may act for it. Register this node under a new id.",
            )

    async def get(self, agent_id: str) -> AgentDocument:
        """An agent; raises :class:`ApiError` 404."""
        return _found(await self._agents.get(agent_id), agent_id)

    async def page(self, wanted: AgentListQuery, after: Position | None = None) -> Page[AgentDocument]:
        """One page of agents, newest first, starting at a position."""
        return await self._agents.page(wanted, after)

    async def work(self, agent_id: str, wait_seconds: float) -> WorkDocument | None:
        """Wait for the work of an agent; the call counts as a heartbeat.

        Raises
        ------
        ApiError
            404: the agent is unknown. 410: it is lost or has left.
        """
        await self.require_present(agent_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while True:
            with self._assignments.expected(agent_id) as assigned:
                work = await self._runs.work_of(agent_id)
                left = deadline - loop.time()
                if work is not None or left <= 0 or self._dispatcher.is_stopping:
                    return work
                await happened(assigned, left)

    async def heartbeat(self, agent_id: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Store the heartbeat of an agent, and return what it must do; raises as :meth:`work`."""
        found = await self._store(agent_id, beat)
        return HeartbeatAnswer(stop=False) if beat.run_id is None else _answer_of(found.orders)

    async def ended(self, agent_id: str, end: NodeEnd) -> None:
        """Record how an agent's node ended; raises as :meth:`work`."""
        await self.require_present(agent_id)
        failures = _shortened([failure.model_dump(mode="json") for failure in end.failures])
        await self._runs.ended(agent_id, end.run_id, end.generation, end.outcome, failures)
        self._dispatcher.wake()

    async def require_present(self, agent_id: str) -> None:
        """Record that an agent is alive; raises as :meth:`work`."""
        await self._store(agent_id, _ALIVE)

    async def drain(self, agent_id: str) -> AgentDocument:
        """Stop assigning work to an agent; raises as :meth:`work`."""
        record = _found(await self._agents.drain(agent_id), agent_id)
        _require_present(agent_id, record.name, record.state)
        return record

    async def leave(self, agent_id: str) -> None:
        """Deregister an agent; a repeated call changes nothing. Raises :class:`ApiError` 404."""
        _found(await self._agents.leave(agent_id), agent_id)

    async def _store(self, agent_id: str, beat: Heartbeat) -> BeatAnswer:
        answer = await self._heartbeats.store(agent_id, beat)
        _require_present(agent_id, answer.name, answer.state)
        return answer


def _answer_of(orders: RunOrders | None) -> HeartbeatAnswer:
    """The answer to a heartbeat of an agent that works on a run."""
    if orders is None:
        return HeartbeatAnswer(stop=True, cause="unknown-run", reason="the service does not know this run")
    if orders.cancel_requested:
        return HeartbeatAnswer(stop=True, cause="cancelled", reason="the run was cancelled")
    if orders.stop_requested:
        return HeartbeatAnswer(stop=True, cause="failed", reason="the run failed elsewhere")
    return HeartbeatAnswer(stop=False, plan_id=orders.target_plan_id)


def _found(record: AgentDocument | None, agent_id: str) -> AgentDocument:
    if record is None:
        raise _unknown(agent_id)
    return record


def _require_present(agent_id: str, name: str, state: AgentState | None) -> None:
    if state is None:
        raise _unknown(agent_id)
    if state in AGENT_ENDED:
        raise ApiError(
            AGENT_GONE,
            f"agent {name} is {state}, and its part of a run is over. Stop its ranks and register again, "
            f"under a new id.",
        )


def _unknown(agent_id: str) -> ApiError:
    return ApiError(NOT_FOUND, f"found no agent {agent_id}; GET /v1/agents lists them.")


def _shortened(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures whose details share :data:`MOST_DETAILS`; a longer detail keeps its beginning and its end."""
    most = MOST_DETAILS // max(1, len(failures))
    for failure in failures:
        detail = failure["detail"]
        if len(detail) > most:
            failure["detail"] = f"{detail[: most // 2]} … {detail[-most // 2 :]}"
    return failures
