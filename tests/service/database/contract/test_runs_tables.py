"""Runs and agents on every kind of database, with several services at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import delete
from support.stored import PLAN, a_beat, a_plan, a_run, an_agent, run_in
from zbv_service.database import (
    AgentsTaken,
    AgentTable,
    Database,
    HeartbeatTable,
    KeyReused,
    PlanTable,
    RunTable,
    SearchGone,
)
from zbv_service.database.models import AgentRow, EventRow, RunRow
from zbv_service.records.lists import AgentListQuery, RunListQuery
from zbv_service.records.runs import AvailableAgent, Decision, NodeOutcome, RequestKey, WaitingRun
from zbv_service.runs.scheduler import decide


async def test_concurrent_assignments_give_each_agent_to_one_run(databases: list[Database]) -> None:
    """Four services, 4 agents, runs of 1 to 3 nodes; runs end and release agents during the test."""
    await PlanTable(databases[0]).add(a_plan(PLAN))
    tables = [RunTable(database) for database in databases]
    for index in range(4):
        await AgentTable(databases[0]).add(*an_agent(f"agent-{index}"))
    names = [f"run-{index}" for index in range(4)]
    adding = (tables[index % 4].add(a_run(name, 1 + index % 3)) for index, name in enumerate(names))
    await asyncio.gather(*adding)

    async def serve(table: RunTable) -> None:
        for _ in range(200):
            try:
                await table.assign(decide)
            except AgentsTaken:
                continue
            await check(table)
            for name in names:
                run = await run_in(table, name)
                for node in run.members:
                    await table.ended(node.agent_id, name, 0, "succeeded")
            if all(record.state == "succeeded" for record in (await table.page(RunListQuery())).items):
                return

    async def check(table: RunTable) -> None:
        holders: dict[str, str] = {}
        for run in (await table.page(RunListQuery())).items:
            assert len(run.members) == (0 if run.state == "waiting" else run.nodes)
            for node in run.members:
                if node.state != "ended":
                    assert holders.setdefault(node.agent_id, run.id) == run.id

    await asyncio.gather(*map(serve, tables))
    assert {record.state for record in (await tables[0].page(RunListQuery())).items} == {"succeeded"}
    agents = (await AgentTable(databases[0]).page(AgentListQuery())).items
    assert [agent.run_id for agent in agents] == [None] * 4


async def test_concurrent_changes_wait_without_deadlocks(database: Database, second: Database) -> None:
    """Two services; agents fail, report, get lost and return while runs are assigned and cancelled."""
    databases = [database, second]
    await PlanTable(databases[0]).add(a_plan(PLAN))
    names = [f"run-{index}" for index in range(8)]
    for name in names:
        await RunTable(databases[0]).add(a_run(name, 2))
    for index in range(6):
        await AgentTable(databases[0]).add(*an_agent(f"agent-{index}"))

    async def play(part: int) -> None:
        random = Random(part)
        runs, agents = RunTable(databases[part % 2]), AgentTable(databases[part % 2])
        for turn in range(3):
            with suppress(AgentsTaken):
                await runs.assign(decide)
            for agent in (await agents.page(AgentListQuery())).items:
                run = None if agent.run_id is None else await runs.get(agent.run_id)
                if run is None:
                    continue
                places = ({"rank": 0, "step": turn, "action": None},)
                await HeartbeatTable(databases[part % 2]).store([a_beat(agent.id, None, run.id, places)])
                match random.randrange(4):
                    case 0 | 1:
                        await runs.ended(agent.id, run.id, run.generation, random.choice(OUTCOMES))
                    case 2:
                        await agents.leave(agent.id)
                        await agents.add(*an_agent(f"{part}-{turn}-{agent.name[:10]}"))
                    case _ if random.random() < 0.05:
                        await runs.request_cancel(run.id)
            await agents.lose(0.0, datetime.now(UTC) - timedelta(seconds=random.choice([0.05, 60.0])))
            await agents.add(*an_agent(f"more-{part}-{turn}"))

    async with asyncio.timeout(120):
        await asyncio.gather(*map(play, range(4)))
    states = {record.state for record in (await RunTable(databases[0]).page(RunListQuery())).items}
    assert states & {"succeeded", "failed", "cancelled"}


OUTCOMES: tuple[NodeOutcome, ...] = ("succeeded", "failed", "stopped")


async def test_simultaneous_equal_registrations_and_submissions_are_stored_once(
    database: Database, second: Database
) -> None:
    await PlanTable(database).add(a_plan(PLAN))
    both = [database, second] * 8
    agents = await asyncio.gather(*(AgentTable(each).add(*an_agent("same")) for each in both))
    assert sorted(is_new for _, is_new in agents) == [False] * 15 + [True]
    named = RequestKey("name", "body")
    adding = (RunTable(each).add(a_run(f"r{index}", 1), named) for index, each in enumerate(both))
    runs = await asyncio.gather(*adding)
    assert len({run.id for run in runs}) == 1
    assert [run.id for run in (await RunTable(database).page(RunListQuery())).items] == [runs[0].id]
    assert len(await RunTable(database).events(runs[0].id, 0, 9)) == 1


async def test_a_run_and_its_key_are_stored_together_or_not_at_all(database: Database) -> None:
    await PlanTable(database).add(a_plan(PLAN))
    runs = RunTable(database)
    named = RequestKey("name", "body")
    with pytest.raises(SearchGone):
        await runs.add(a_run("a", plan_id=None, search_id="gone"), named)
    assert await runs.of_request(named) is None, "the name of a request that failed is free"
    assert (await runs.add(a_run("a", 1), named)).id == "a"
    assert (await runs.add(a_run("b", 1), named)).id == "a"
    with pytest.raises(KeyReused):
        await runs.add(a_run("c", 1), replace(named, fingerprint="other"))
    assert [run.id for run in (await runs.page(RunListQuery())).items] == ["a"]
    async with database.writing() as session:
        await session.execute(delete(EventRow))
        await session.execute(delete(RunRow))
    assert (await runs.add(a_run("d", 1), named)).id == "d", "the key of a removed run is free"


async def test_an_agent_with_a_concurrent_heartbeat_is_not_lost(database: Database, second: Database) -> None:
    """The heartbeat comes between the query and the loss: it locks the row, and the loss waits."""
    agents, before = AgentTable(database), datetime.now(UTC)
    await agents.add(*an_agent("quiet"))
    async with second.writing() as session:
        row = await session.get_one(AgentRow, "quiet", with_for_update=True)
        losing = asyncio.create_task(agents.lose(1.0, before))
        await asyncio.sleep(0.3)
        row.seen_at = datetime.now(UTC)
    assert await losing == []
    record: Any = await agents.get("quiet")
    assert record.state == "live"


async def test_runs_are_matched_again_only_if_a_run_or_an_agent_changed(database: Database) -> None:
    passes: list[tuple[int, int]] = []

    def counted(waiting: Sequence[WaitingRun], agents: Sequence[AvailableAgent]) -> Decision:
        passes.append((len(waiting), len(agents)))
        return decide(waiting, agents)

    await PlanTable(database).add(a_plan(PLAN))
    table = RunTable(database)
    await table.add(a_run("pair", 2))
    await AgentTable(database).add(*an_agent("first"))
    for _ in range(3):
        assert await table.assign(counted) == []
    assert passes == [(1, 1)]
    run = await run_in(table, "pair")
    assert "1 of 1 agent can take it" in (run.waits_for or "")
    await AgentTable(database).add(*an_agent("second"))
    assert await table.assign(counted) == ["pair"]
    assert passes == [(1, 1), (1, 2)]
