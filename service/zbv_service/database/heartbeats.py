"""Stores agents' heartbeats in batches; the cost of a heartbeat does not grow with the size of its run.

Agents and nodes are written in two transactions, each in the order of the agents' ids. This prevents
deadlocks between services that store heartbeats at the same time, and with transactions that end a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import Select, Table, bindparam, case, func, or_, select, update

from zbv_service.database.engine import BaseTable, columns_of
from zbv_service.database.models import AgentRow, NodeRow, RunRow
from zbv_service.database.run_end import add_event, lock_run
from zbv_service.records.agents import AGENT_PRESENT, BeatAnswer, Heartbeat, RunOrders

_AGENTS, _NODES = cast("Table", AgentRow.__table__), cast("Table", NodeRow.__table__)
_IS_PRESENT = or_(*(_AGENTS.c.state == state for state in sorted(AGENT_PRESENT)))
"""Spelled out, because a statement executed with many rows of parameters cannot take lists."""
_WORKING = ("starting", "running")

# Built once: compiling a statement takes SQLAlchemy longer than executing it, and it caches the result.
_SEEN = (
    update(_AGENTS)
    .where(_AGENTS.c.id == bindparam("agent"), _IS_PRESENT)
    .values(
        seen_at=bindparam("now", type_=_AGENTS.c.seen_at.type),
        port=func.coalesce(bindparam("free_port"), _AGENTS.c.port),
    )
)
_PLACES = (
    update(_NODES)
    .where(
        _NODES.c.agent_id == bindparam("agent"),
        _NODES.c.run_id == bindparam("run"),
        _NODES.c.generation == bindparam("current"),
        _NODES.c.state != "ended",
    )
    .values(
        ranks=bindparam("places", type_=_NODES.c.ranks.type),
        state=case((bindparam("is_running"), "running"), else_=_NODES.c.state),
    )
)
_FOUND = select(_AGENTS.c.id, _AGENTS.c.name, _AGENTS.c.state).where(
    _AGENTS.c.id.in_(bindparam("agents", expanding=True))
)
_ORDERS = select(
    RunRow.id,
    RunRow.state,
    RunRow.generation,
    RunRow.script.is_not(None).label("is_script"),
    *columns_of(RunOrders, RunRow),
).where(RunRow.id.in_(bindparam("runs", expanding=True)))


class HeartbeatTable(BaseTable):
    """The latest heartbeat of each agent in one database."""

    async def store(self, beats: Sequence[tuple[str, Heartbeat]]) -> list[BeatAnswer]:
        """Record that agents are alive and where their ranks are; returns an answer per heartbeat, in order.

        An agent that is lost or has left stays so. ``beats`` has the agents' ids, and at most one entry per
        agent and run.
        """
        ordered = sorted(beats, key=itemgetter(0))
        run_ids = sorted({beat.run_id for _, beat in beats if beat.run_id is not None})
        async with self._database.writing() as session:
            connection = await session.connection()
            now = await self._database.now(session)
            await connection.execute(
                _SEEN, [{"agent": agent_id, "free_port": beat.port, "now": now} for agent_id, beat in ordered]
            )
            named = await connection.execute(_FOUND, {"agents": [agent_id for agent_id, _ in ordered]})
            agents = {row.id: row for row in named}
            orders = (await connection.execute(_ORDERS, {"runs": run_ids})).all() if run_ids else ()
        runs = {row.id: row for row in orders}
        await self._store_places(
            [(agent_id, beat) for agent_id, beat in ordered if agent_id in agents and beat.run_id in runs],
            runs,
        )
        return [_answer(agents.get(agent_id), runs.get(beat.run_id or "")) for agent_id, beat in beats]

    async def _store_places(self, beats: Sequence[tuple[str, Heartbeat]], runs: Mapping[str, Any]) -> None:
        places = [
            {
                "agent": agent_id,
                "run": beat.run_id,
                "current": runs[str(beat.run_id)].generation,
                "places": [place.model_dump() for place in beat.ranks],
                "is_running": beat.is_running(is_script=runs[str(beat.run_id)].is_script),
            }
            for agent_id, beat in beats
            if runs[str(beat.run_id)].state in _WORKING
        ]
        if not places:
            return
        async with self._database.writing() as session:
            await (await session.connection()).execute(_PLACES, places)
        begun = {str(place["run"]) for place in places if place["is_running"]}
        await self._note_running([run_id for run_id in sorted(begun) if runs[run_id].state == "starting"])

    async def _note_running(self, run_ids: Collection[str]) -> None:
        """Mark a run as running once all of its nodes are.

        The states of the nodes are already committed, so at least one of two services sees the last node.
        """
        for run_id in run_ids:
            if await self._database.rows(_nodes_not_running(run_id)):
                continue
            async with self._database.writing() as session:
                run = await lock_run(session, run_id)
                if run is None or run.state != "starting":
                    continue
                if (await session.execute(_nodes_not_running(run_id))).first() is not None:
                    continue
                now = await self._database.now(session)
                run.state, run.started_at, run.updated_at = "running", now, now
                begun = "begun its script" if run.script is not None else "reported a step"
                add_event(session, run_id, "running", f"every node has {begun}")


def _nodes_not_running(run_id: str) -> Select[Any]:
    """A query for one node of the run's current generation that is not in a step yet."""
    query = select(NodeRow.node_rank).join(RunRow, NodeRow.run_id == RunRow.id)
    of_it = (RunRow.id == run_id, NodeRow.generation == RunRow.generation, NodeRow.state != "running")
    return query.where(*of_it).limit(1)


def _answer(agent: Any, run: Any) -> BeatAnswer:
    """The answer to a heartbeat, from the rows of its agent and its run."""
    return BeatAnswer(
        name="" if agent is None else agent.name,
        state=None if agent is None else agent.state,
        orders=None
        if run is None
        else RunOrders(run.cancel_requested, run.stop_requested, run.target_plan_id),
    )
