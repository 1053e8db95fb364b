"""Reads and writes agents: which are present, and which are lost. :mod:`.heartbeats` stores heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Update as UpdateStatement
from sqlalchemy import delete, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from zbv_service.database.engine import BaseTable, record_of
from zbv_service.database.models import AgentRow, ListenerRow, NodeRow, RunRow
from zbv_service.database.paging import begins, read_page
from zbv_service.database.run_end import add_event, changed, end_node, lock_run, node_of
from zbv_service.records.agents import AGENT_PRESENT, AgentDocument, AgentRequest, AgentState
from zbv_service.records.lists import AgentListQuery, Page, Position

_PRESENT = tuple(sorted(AGENT_PRESENT))
_TRIES = 3


class AgentTable(BaseTable):
    """The agents of one database."""

    async def add(self, new: AgentRequest, owner: str) -> tuple[AgentDocument, bool]:
        """Register an agent for a token, and say whether it is new; a repeated registration adds nothing."""
        try:
            async with self._database.writing() as session:
                known = await session.get(AgentRow, new.id)
                if known is not None:
                    return record_of(AgentDocument, known), False
                now = await self._database.now(session)
                row = AgentRow(
                    **new.model_dump(exclude={"allows"}),
                    allowed_models=new.allows.models,
                    allowed_scripts=new.allows.scripts,
                    checkpoint_directories=new.allows.checkpoint_directories,
                    owner=owner,
                    state="live",
                    run_id=None,
                    created_at=now,
                    seen_at=now,
                )
                session.add(row)
        except IntegrityError:  # the same request arrived twice at once
            known_record = await self.get(new.id)
            if known_record is None:
                raise
            return known_record, False
        return record_of(AgentDocument, row), True

    async def get(self, agent_id: str) -> AgentDocument | None:
        """An agent by id."""

        def find(session: Session) -> AgentDocument | None:
            row = session.get(AgentRow, agent_id)
            return None if row is None else record_of(AgentDocument, row)

        return await self._database.read(find)

    async def page(self, wanted: AgentListQuery, after: Position | None = None) -> Page[AgentDocument]:
        """One page of agents, newest first, starting at a position."""
        query = select(AgentRow.id).where(AgentRow.state.in_(wanted.state or _PRESENT))
        if wanted.q:
            named = (
                column.icontains(wanted.q, autoescape=True) for column in (AgentRow.name, AgentRow.address)
            )
            query = query.where(or_(*named, *begins(wanted.q, AgentRow.id, AgentRow.run_id)))

        def find(session: Session) -> Page[AgentDocument]:
            def load(ids: Sequence[str]) -> list[AgentDocument]:
                rows = session.scalars(select(AgentRow).where(AgentRow.id.in_(ids)))
                return [record_of(AgentDocument, row) for row in rows]

            return read_page(session, query, AgentRow, wanted, after, load)

        return await self._database.read(find)

    async def drain(self, agent_id: str) -> AgentDocument | None:
        """Stop assigning work to an agent."""
        async with self._database.writing() as session:
            await session.execute(_present(agent_id).values(state="draining"))
        return await self.get(agent_id)

    async def leave(self, agent_id: str) -> AgentDocument | None:
        """Deregister an agent; if it still works for a run, the run fails."""
        for _ in range(_TRIES):
            async with self._database.writing() as session:
                if await _remove(session, agent_id, "left", "deregistered while it had a node of this run"):
                    break
            record = await self.get(agent_id)
            if record is None or record.state not in _PRESENT:
                break
        return await self.get(agent_id)

    async def lose(self, timeout_seconds: float, before: datetime) -> list[AgentDocument]:
        """Declare agents lost that were last seen before a moment; their runs fail and name them."""
        silent = select(AgentRow.id).where(AgentRow.state.in_(_PRESENT), AgentRow.seen_at < before)
        lost = []
        for (agent_id,) in await self._database.rows(silent):
            async with self._database.writing() as session:
                row = await session.get(AgentRow, agent_id)
                if row is None or row.seen_at >= before:
                    continue  # it came back
                reason = f"gave no sign of life for {timeout_seconds:g} s"
                if await _remove(session, agent_id, "lost", reason, before):
                    lost.append(record_of(AgentDocument, row))
        return lost


async def _remove(
    session: AsyncSession, agent_id: str, state: AgentState, reason: str, before: datetime | None = None
) -> bool:
    """Remove an agent that was not seen since ``before`` from the pool, and end its node.

    Returns False if the agent is unknown, was seen, or changed its run in the meantime.
    """
    row = await session.get(AgentRow, agent_id)
    run = None if row is None or row.run_id is None else await lock_run(session, row.run_id)
    if row is None:
        return False
    unchanged = _present(agent_id).where(AgentRow.run_id == row.run_id)
    if before is not None:
        unchanged = unchanged.where(AgentRow.seen_at < before)
    if not await changed(session, unchanged.values(state=state)):
        return False
    if run is not None:
        await _end_its_node(session, run, row, reason)
    return True


async def _end_its_node(session: AsyncSession, run: RunRow, agent: AgentRow, reason: str) -> None:
    node = await node_of(session, run, agent.id)
    if node is None or node.state == "ended":
        return
    detail = (
        f"agent {agent.name} ({agent.address}, node {node.node_rank}) {reason}; {_places(node)}. "
        f"Check that the host and its zbv-worker agent are up."
    )
    add_event(session, run.id, "agent-lost", f"agent {agent.name} {reason}")
    failure = {"kind": "agent-lost", "rank": None, "step": None, "action": None, "peer": None}
    await end_node(session, run, node, "failed", [{**failure, "detail": detail}])


def _places(node: NodeRow) -> str:
    known = [
        f"rank {place['rank']} step {place['step']} at {place['action'] or '…'}"
        for place in node.ranks
        if place.get("step") is not None
    ]
    return f"last reported steps: {', '.join(known)}" if known else "its ranks had reported no step"


def _present(agent_id: str) -> UpdateStatement:
    return update(AgentRow).where(AgentRow.id == agent_id, AgentRow.state.in_(_PRESENT))


_REMEMBERED = 4
"""A service that stays away for this many agent timeouts is forgotten."""


class ListenerTable(BaseTable):
    """Since when each service has listened to the agents of one database without a pause.

    An agent's silence is evidence only if every service listened all the time: its heartbeats may be waiting
    at a service that is stopped or overloaded. All times come from the database's clock, and all services
    judge by the same rows, so they reach the same decision.
    """

    async def look(self, listener_id: str, silence: timedelta, *, paused: bool) -> datetime | None:
        """Record that a service listens, and return the moment before which a silent agent was last seen.

        Parameters
        ----------
        silence
            How long an agent may be silent before it is lost.
        paused
            Whether this service has just been late, so it may not have read what agents sent.

        Returns
        -------
        None while a service may be the reason for silence: this service or another one has listened for less
        than ``silence`` since its last pause.
        """
        async with self._database.writing() as session:
            now = await self._database.now(session)
            await session.execute(
                delete(ListenerRow).where(
                    ListenerRow.id != listener_id, ListenerRow.looked_at < now - _REMEMBERED * silence
                )
            )
            mine = await session.get(ListenerRow, listener_id)
            if mine is None:
                mine = ListenerRow(id=listener_id, looked_at=now, listening_since=now)
                session.add(mine)
            elif paused or not timedelta(0) <= now - mine.looked_at <= silence / 2:
                mine.listening_since = now  # the database was away, or its clock was changed
            mine.looked_at = now
            await session.flush()
            others = await session.scalars(select(ListenerRow))
            return now - silence if now - _all_since(others, now, silence) >= silence else None


def _all_since(listeners: Iterable[ListenerRow], now: datetime, silence: timedelta) -> datetime:
    """The moment since which every service has listened.

    A late service counts as paused until its agents have had time to reach another service.
    """
    return max(
        row.listening_since if now - row.looked_at <= silence / 2 else row.looked_at + silence
        for row in listeners
    )
