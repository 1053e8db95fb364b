"""Reads and writes runs: assigns agents, follows nodes, ends runs.

Every change locks the run's row. So if two nodes end at the same time, the second one sees the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Row, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from zbv_service.database.engine import BaseTable, record_of
from zbv_service.database.events import RUN_EVENT
from zbv_service.database.models import AgentRow, EventRow, NodeRow, RunRow, SearchRow
from zbv_service.database.paging import begins, created_between, read_page
from zbv_service.database.run_end import (
    add_event,
    changed,
    end_node,
    end_run,
    lock_run,
    node_of,
    nodes_of_agent,
)
from zbv_service.records.agents import WorkDocument
from zbv_service.records.lists import Page, Position, RunListQuery
from zbv_service.records.runs import (
    RUN_ENDED,
    AvailableAgent,
    Decision,
    EventDocument,
    NewRun,
    NodeDocument,
    NodeOutcome,
    RequestKey,
    RunDocument,
    WaitingRun,
)

_CONSIDERED = 200
"""Waiting runs per pass."""


class AgentsTaken(Exception):
    """Another service assigned the agents in the meantime; nothing was changed, so try again."""


class SearchGone(Exception):
    """The search was discarded or cancelled."""


class KeyReused(Exception):
    """The caller used the same Idempotency-Key with another body before."""


Decide = Callable[[Sequence[WaitingRun], Sequence[AvailableAgent]], Decision]
"""Decides which waiting run gets which agents: :func:`zbv_service.runs.scheduler.decide`."""


class RunTable(BaseTable):
    """The runs of one database."""

    _undecided: tuple[list[WaitingRun], list[AvailableAgent]] | None = None
    """What the last pass saw, if no run could start; as long as it is the same, no run can."""

    async def add(
        self, new: NewRun, key: RequestKey | None = None, search_options: bytes | None = None
    ) -> RunDocument:
        """Store a new run, which waits for agents or for its plan, together with its Idempotency-Key.

        A repeated request returns the run that it created the first time.

        Parameters
        ----------
        search_options
            Options of the search for its plan and of later searches for measured costs, packed; None for the
            defaults.

        Raises
        ------
        SearchGone
            The search to wait for has been discarded or cancelled in the meantime.
        KeyReused
            The earlier request with this key had another body.
        """
        row = RunRow(
            **new.model_dump(),
            created_by=new.created_by,
            search_options=search_options,
            state="planning" if new.plan_id is None else "waiting",
            generation=0,
            stop_requested=False,
            cancel_requested=False,
            failures=[],
            refusals=[],
            updated_at=new.created_at,
            key_hash=None if key is None else key.hash,
            key_fingerprint=None if key is None else key.fingerprint,
        )
        try:
            async with self._database.writing() as session:
                if new.search_id is not None and not await _held_search(session, new.search_id):
                    raise SearchGone(new.search_id)
                session.add(row)
                await session.flush()
                if new.plan_id is None:
                    add_event(session, row.id, "planning", f"search {new.search_id}")
                else:
                    add_event(session, row.id, "waiting", f"for {new.nodes} agents")
        except IntegrityError:
            known = None if key is None else await self.of_request(key)
            if known is None:
                raise
            return known  # the same request arrived twice at once
        return _record(row, ())

    async def of_request(self, key: RequestKey) -> RunDocument | None:
        """The run that an earlier request with this key created, None without one.

        Raises
        ------
        KeyReused
            The earlier request had another body.
        """
        query = select(RunRow.id, RunRow.key_fingerprint).where(RunRow.key_hash == key.hash)
        for row in await self._database.rows(query):
            if row.key_fingerprint != key.fingerprint:
                raise KeyReused
            return await self.get(row.id)
        return None

    async def get(self, run_id: str) -> RunDocument | None:
        """A run by id."""
        return await self._database.read(lambda session: next(iter(_records(session, [run_id])), None))

    async def brief(self, run_id: str) -> RunDocument | None:
        """A run by id without its nodes; reads one row for a run of any size."""

        def find(session: Session) -> RunDocument | None:
            row = session.get(RunRow, run_id)
            return None if row is None else _record(row, ())

        return await self._database.read(find)

    async def search_options(self, run_id: str) -> bytes | None:
        """The packed options of a run's searches; None for the defaults."""
        found = await self._database.rows(select(RunRow.search_options).where(RunRow.id == run_id))
        return found[0].search_options if found else None

    async def page(self, wanted: RunListQuery, after: Position | None = None) -> Page[RunDocument]:
        """One page of runs, newest first, starting at a position."""
        query = select(RunRow.id).where(*_conditions(wanted))

        def find(session: Session) -> Page[RunDocument]:
            load = partial(_records, session)
            return read_page(session, query, RunRow, wanted, after, load)

        return await self._database.read(find)

    async def events(self, run_id: str, after: int, limit: int) -> list[EventDocument]:
        """The events of a run after a given event, oldest first."""
        newer = (EventRow.run_id == run_id, EventRow.id > after)
        query = select(*RUN_EVENT).where(*newer).order_by(EventRow.id).limit(limit)
        return [EventDocument(**row._mapping) for row in await self._database.rows(query)]

    async def newest_events(self, run_id: str, limit: int) -> list[EventDocument]:
        """The latest events of a run, newest first."""
        query = select(*RUN_EVENT).where(EventRow.run_id == run_id).order_by(EventRow.id.desc()).limit(limit)
        return [EventDocument(**row._mapping) for row in await self._database.rows(query)]

    async def request_cancel(self, run_id: str) -> RunDocument | None:
        """Cancel a run without nodes at once; for any other unfinished run, stop its nodes first."""
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            if run is not None and run.state not in RUN_ENDED and not run.cancel_requested:
                run.cancel_requested = run.stop_requested = True
                run.updated_at = datetime.now(UTC)
                add_event(session, run_id, "cancel", "was asked for")
                if run.state in ("planning", "waiting"):
                    end_run(session, run, "cancelled")
        return await self.get(run_id)

    async def assign(self, decide: Decide) -> list[str]:
        """Assign agents to every waiting run that can start, and return the ids of these runs.

        The decision is made in a thread and outside of transactions, because it takes a second for hundreds
        of runs and agents. What changes meanwhile is noticed when the agents are taken.

        Raises
        ------
        AgentsTaken
            Another service was faster.
        """
        waiting, agents = await self._database.read(_waiting)
        decision = await asyncio.to_thread(self._decision, decide, waiting, agents)
        if decision is None:
            return []
        placed, runs = decision.placed, {run.run_id: run for run in waiting}
        if placed:
            async with self._database.writing() as session:
                await _lock(session, placed)
                for run_id, agent_ids in placed.items():
                    await _take(session, runs[run_id], agent_ids)
        await self._store_lack(
            {run_id: text for run_id, text in decision.lacking.items() if runs[run_id].waits_for != text}
        )
        self._undecided = None if placed else (waiting, agents)
        return list(placed)

    def _decision(
        self, decide: Decide, runs: list[WaitingRun], agents: list[AvailableAgent]
    ) -> Decision | None:
        """The decision; None if no run waits, or if none of the same runs could start before."""
        return decide(runs, agents) if runs and (runs, agents) != self._undecided else None

    async def _store_lack(self, lacking: Mapping[str, str]) -> None:
        """Store what waiting runs lack."""
        if not lacking:
            return
        async with self._database.writing() as session:
            for run_id in sorted(lacking):
                waits = update(RunRow).where(RunRow.id == run_id, RunRow.state == "waiting")
                await session.execute(waits.values(waits_for=lacking[run_id]))

    async def work_of(self, agent_id: str) -> WorkDocument | None:
        """The node that an agent has to run; repeated calls return the same."""

        def find(session: Session) -> WorkDocument | None:
            run_id = session.scalar(select(AgentRow.run_id).where(AgentRow.id == agent_id))
            run = None if run_id is None else session.get(RunRow, run_id)
            mine = None if run is None else session.scalar(nodes_of_agent(run, agent_id))
            if run is None or mine is None or mine.state == "ended":
                return None
            place = {name: getattr(mine, name) for name in ("generation", "node_rank", "rendezvous")}
            return record_of(WorkDocument, run, run_id=run.id, **place)

        return await self._database.read(find)

    async def with_work(self, agent_ids: Sequence[str]) -> list[str]:
        """The ids of those agents that have a node."""
        query = select(AgentRow.id).where(AgentRow.id.in_(agent_ids), AgentRow.run_id.is_not(None))
        return [row.id for row in await self._database.rows(query)]

    async def ended(
        self,
        agent_id: str,
        run_id: str,
        generation: int,
        outcome: NodeOutcome,
        failures: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record how an agent's node ended; a repeated or outdated report changes nothing.

        Parameters
        ----------
        failures
            The failure documents of its ranks.
        """
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)
            node = None if run is None else await node_of(session, run, agent_id)
            if run is not None and node is not None and node.generation == generation:
                await end_node(session, run, node, outcome, list(failures))


def _conditions(wanted: RunListQuery) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.state:
        found.append(RunRow.state.in_(wanted.state))
    texts = (RunRow.name, RunRow.model["factory"].as_string(), RunRow.script["path"].as_string())
    found += begins(wanted.q, RunRow.id, RunRow.plan_id, RunRow.search_id, parts_of=texts)
    return found + created_between(wanted, RunRow)


def _records(session: Session, run_ids: Sequence[str]) -> list[RunDocument]:
    """Runs with the nodes of their current generation, in the order of node ranks."""
    query = select(NodeRow).join(RunRow, NodeRow.run_id == RunRow.id)
    query = query.where(RunRow.id.in_(run_ids), NodeRow.generation == RunRow.generation)
    nodes: dict[str, list[NodeRow]] = {}
    for node in session.scalars(query.order_by(NodeRow.run_id, NodeRow.node_rank)):
        nodes.setdefault(node.run_id, []).append(node)
    rows = session.scalars(select(RunRow).where(RunRow.id.in_(run_ids)))
    return [_record(row, nodes.get(row.id, ())) for row in rows]


def _waiting(session: Session) -> tuple[list[WaitingRun], list[AvailableAgent]]:
    """The runs that wait for agents, oldest first, and the live agents; no agents if no run waits."""
    query = select(RunRow).where(RunRow.state == "waiting").order_by(RunRow.created_at, RunRow.id)
    rows = list(session.scalars(query.limit(_CONSIDERED)))
    if not rows:
        return [], []
    live = select(*_OFFER).where(AgentRow.state == "live").order_by(AgentRow.created_at, AgentRow.id)
    return [*map(_waiting_run, rows)], [_available_agent(row) for row in session.execute(live)]


async def _lock(session: AsyncSession, placed: Mapping[str, Sequence[str]]) -> None:
    """Lock runs and then their agents, both by id, so that two assigning services cannot deadlock."""
    agent_ids = [agent_id for ids in placed.values() for agent_id in ids]
    for column, ids in ((RunRow.id, list(placed)), (AgentRow.id, agent_ids)):
        await session.execute(select(column).where(column.in_(ids)).order_by(column).with_for_update())


async def _take(session: AsyncSession, run: WaitingRun, ids: list[str]) -> None:
    """Assign all agents of a run, or abort the transaction."""
    now = datetime.now(UTC)
    places = select(AgentRow.id, AgentRow.name, AgentRow.address, AgentRow.port).where(AgentRow.id.in_(ids))
    found = {agent.id: agent for agent in await session.execute(places)}
    agents = [found[agent_id] for agent_id in ids if agent_id in found]
    started = await changed(
        session,
        update(RunRow)
        .where(RunRow.id == run.run_id, RunRow.state == "waiting", RunRow.generation == run.generation)
        .values(state="starting", waits_for=None, updated_at=now),
    )
    free = update(AgentRow).where(AgentRow.id.in_(ids), AgentRow.run_id.is_(None), AgentRow.state == "live")
    if started != 1 or await changed(session, free.values(run_id=run.run_id)) != len(ids):
        raise AgentsTaken
    for node_rank, agent in enumerate(agents):
        session.add(
            NodeRow(
                run_id=run.run_id,
                generation=run.generation,
                node_rank=node_rank,
                agent_id=agent.id,
                agent_name=agent.name,
                rendezvous=_rendezvous(agents[0]),
                state="assigned",
                ranks=[],
                failures=[],
            )
        )
    names = ", ".join(agent.name for agent in agents)
    add_event(session, run.run_id, "starting", f"generation {run.generation} on {names}")


def _rendezvous(first: Row[str, str, str, int]) -> str:
    host = f"[{first.address}]" if ":" in first.address else first.address
    return f"{host}:{first.port}"


def _waiting_run(run: RunRow) -> WaitingRun:
    checkpoint = run.options.get("checkpoint")
    return WaitingRun(
        run.id,
        run.nodes,
        run.ranks_per_node,
        None if run.model is None else run.model["factory"],
        script=None if run.script is None else run.script["path"],
        checkpoint_directory=None if checkpoint is None else checkpoint["directory"],
        refused_by=frozenset(refusal["agent_id"] for refusal in run.refusals),
        generation=run.generation,
        waits_for=run.waits_for,
    )


_OFFER = (
    AgentRow.id,
    AgentRow.slots,
    AgentRow.run_id.is_(None),
    AgentRow.allowed_models,
    AgentRow.owner,
    AgentRow.checkpoint_directories,
    AgentRow.allowed_scripts,
)


def _available_agent(row: Sequence[Any]) -> AvailableAgent:
    agent_id, slots, is_idle, models, owner, directories, scripts = row
    return AvailableAgent(
        agent_id,
        slots,
        bool(is_idle),
        tuple(models),
        owner,
        checkpoint_directories=None if directories is None else tuple(directories),
        allowed_scripts=tuple(scripts),
    )


def _record(row: RunRow, nodes: Iterable[NodeRow]) -> RunDocument:
    return record_of(RunDocument, row, members=[record_of(NodeDocument, node) for node in nodes])


async def _held_search(session: AsyncSession, search_id: str) -> bool:
    """Whether a search can still give a plan; locks it so that nobody removes it in this transaction."""
    query = select(SearchRow.cancel_requested).where(SearchRow.id == search_id)
    return await session.scalar(query.with_for_update(read=True, key_share=True)) is False
