"""Heartbeats on every kind of database: their cost, their answers, and the loss of silent agents."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import starmap
from typing import Any, cast

from sqlalchemy import update
from support.serving import DEADLINE
from support.stored import a_beat, an_agent, begin, counting, run_in
from zbv_service.database import AgentTable, Database, HeartbeatTable, ListenerTable, RunTable
from zbv_service.database.models import AgentRow, ListenerRow
from zbv_service.records.agents import BeatAnswer, Heartbeat, RunOrders
from zbv_service.records.lists import AgentListQuery
from zbv_service.runs.agents import Assignments, Heartbeats
from zbv_service.runs.dispatch import AgentWatch, Dispatcher

GO_ON = RunOrders(cancel_requested=False, stop_requested=False, target_plan_id=None)
SILENCE = timedelta(seconds=60)


def in_step(agent_id: str, run_id: str, step: int | None = 1) -> tuple[str, Heartbeat]:
    return a_beat(agent_id, None, run_id, ({"rank": 0, "step": step, "action": None},))


async def state_of(database: Database, run_id: str) -> str:
    return str((await run_in(RunTable(database), run_id)).state)


async def test_a_heartbeat_costs_the_same_in_a_run_of_any_size(database: Database) -> None:
    table, costs = HeartbeatTable(database), []
    for nodes in (2, 24):
        agents = await begin(database, f"run-{nodes}", nodes)
        await table.store([in_step(agent, f"run-{nodes}") for agent in agents])
        assert await state_of(database, f"run-{nodes}") == "running"
        with counting() as counts:
            await table.store([in_step(agents[1], f"run-{nodes}", 2)])
        costs.append(counts)
    assert costs[0] == costs[1]
    assert costs[0].nodes == 0


async def test_the_work_and_the_end_of_a_node_read_one_node_the_last_end_all(database: Database) -> None:
    agents, runs = await begin(database, "run", 12), RunTable(database)
    with counting() as counts:
        work: Any = await runs.work_of(agents[5])
    assert (work.node_rank, counts.nodes) == (5, 1)
    with counting() as counts:
        for agent in agents[:-1]:
            await runs.ended(agent, "run", 0, "succeeded")
    assert counts.nodes == 11
    assert await state_of(database, "run") == "starting"
    await runs.ended(agents[-1], "run", 0, "succeeded")
    assert await state_of(database, "run") == "succeeded"


async def test_the_answer_to_a_heartbeat_has_the_agents_state_and_its_runs_orders(database: Database) -> None:
    first, second = await begin(database, "run", 2)
    table, runs, agents = HeartbeatTable(database), RunTable(database), AgentTable(database)
    await agents.add(*an_agent("idle"))
    beats = [in_step(first, "run"), a_beat("idle", 2000), a_beat("nobody"), in_step(second, "other")]
    assert await table.store(beats) == [
        BeatAnswer(first, "live", GO_ON),
        BeatAnswer("idle", "live", None),
        BeatAnswer("", None, None),
        BeatAnswer(second, "live", None),
    ]
    idle: Any = await agents.get("idle")
    assert idle.port == 2000
    await runs.request_cancel("run")
    (answer,) = await table.store([in_step(first, "run")])
    assert answer.orders == RunOrders(cancel_requested=True, stop_requested=True, target_plan_id=None)
    await agents.leave("idle")
    assert [found.state for found in await table.store([a_beat("idle"), a_beat(first)])] == ["left", "live"]


async def test_first_steps_reported_to_many_services_at_once_start_a_run_once(
    database: Database, second: Database
) -> None:
    agents = await begin(database, "run", 12)
    tables = [HeartbeatTable(each) for each in (database, second)]
    await tables[0].store([in_step(agent, "run", None) for agent in agents])
    assert await state_of(database, "run") == "starting"
    beats = (tables[index % 2].store([in_step(agent, "run")]) for index, agent in enumerate(agents))
    await asyncio.gather(*beats)
    assert await state_of(database, "run") == "running"
    events = await RunTable(database).events("run", 0, 99)
    assert [event.kind for event in events].count("running") == 1


async def test_a_heartbeat_does_not_revive_a_node_that_ends(database: Database, second: Database) -> None:
    agents = await begin(database, "run", 8)
    table, runs = HeartbeatTable(database), RunTable(second)

    async def beat(turn: int) -> None:
        await table.store([in_step(agent, "run", turn) for agent in agents])

    ends = (runs.ended(agent, "run", 0, "succeeded") for agent in agents)
    async with asyncio.timeout(60):
        await asyncio.gather(*map(beat, range(4)), *ends)
    run = await run_in(runs, "run")
    assert (run.state, {node.state for node in run.members}) == ("succeeded", {"ended"})


async def test_simultaneous_heartbeats_are_written_together(database: Database) -> None:
    agents = await begin(database, "run", 6)
    heartbeats = Heartbeats(HeartbeatTable(database))
    with counting() as alone:
        assert (await heartbeats.store(*in_step(agents[0], "run"))).orders == GO_ON
    with counting() as together:
        # One agent sends two heartbeats at once, and gets two answers.
        beats = [in_step(agents[1], "run"), *map(a_beat, agents[1:])]
        answers = await asyncio.gather(*starmap(heartbeats.store, beats))
    assert [answer.orders for answer in answers] == [GO_ON, *[None] * 5]
    assert together.statements < 3 * alone.statements
    run = await run_in(RunTable(database), "run")
    assert [bool(node.ranks) for node in run.members] == [True, True, *[False] * 4]
    await heartbeats.stop()


class Bell:
    """The part of a dispatcher that waiting agents use."""

    def __init__(self) -> None:
        self.assigned = asyncio.Event()
        self.is_stopping = False

    def ring(self) -> None:
        rung, self.assigned = self.assigned, asyncio.Event()
        rung.set()


async def test_agents_that_wait_for_work_share_one_query(database: Database) -> None:
    agents, bell = AgentTable(database), Bell()
    runs = RunTable(database)
    names = [f"idle-{index}" for index in range(20)]
    for name in names:
        await agents.add(*an_agent(name))
    assignments = Assignments(runs, cast("Dispatcher", bell))
    with ExitStack() as waits:
        events = {name: waits.enter_context(assignments.expected(name)) for name in names}
        with counting() as counts:
            for _ in range(4):
                bell.ring()
                await asyncio.sleep(0.1)
        assert counts.statements <= 5
        assert not any(event.is_set() for event in events.values())
        (holder,) = await begin(database, "run", 1)
        bell.ring()
        await asyncio.wait_for(events[holder].wait(), DEADLINE)
        assert [name for name in names if events[name].is_set()] == [holder]
        bell.is_stopping = True
        bell.ring()
        await asyncio.gather(*(asyncio.wait_for(event.wait(), DEADLINE) for event in events.values()))


async def age(database: Database, seconds: float) -> None:
    """Move the recorded times of agents and services into the past."""
    past = datetime.now(UTC) - timedelta(seconds=seconds)
    async with database.writing() as session:
        await session.execute(update(AgentRow).values(seen_at=past))
        await session.execute(update(ListenerRow).values(listening_since=past))


async def test_the_silence_of_an_agent_counts_only_while_every_service_listens(database: Database) -> None:
    agents, listeners = AgentTable(database), ListenerTable(database)
    await agents.add(*an_agent("quiet"))

    async def look(name: str, *, paused: bool = False) -> bool:
        before = await listeners.look(name, SILENCE, paused=paused)
        return before is not None and bool(await agents.lose(60, before))

    assert not await look("one")
    await age(database, 70)
    assert not await look("two")  # it has just begun
    assert not await look("one")  # and reaches the same decision
    await age(database, 70)
    assert not await look("one", paused=True)
    assert not await look("two")
    await age(database, 70)
    await agents.add(*an_agent("talks"))
    assert await look("two")
    assert [record.id for record in (await agents.page(AgentListQuery())).items] == ["talks"]


async def test_a_stopped_service_delays_losses_until_agents_could_reach_another(database: Database) -> None:
    listeners = ListenerTable(database)
    for name in ("stopped", "alive"):
        assert await listeners.look(name, SILENCE, paused=False) is None
    for seconds, may_judge in ((40, False), (110, False), (130, True)):
        await age(database, 200)
        async with database.writing() as session:
            past = datetime.now(UTC) - timedelta(seconds=seconds)
            stopped = update(ListenerRow).where(ListenerRow.id == "stopped")
            await session.execute(stopped.values(looked_at=past))
        assert (await listeners.look("alive", SILENCE, paused=False) is not None) == may_judge
    # It returns, and must read the waiting heartbeats first; the other service waits for this, too.
    assert await listeners.look("stopped", SILENCE, paused=False) is None
    assert await listeners.look("alive", SILENCE, paused=False) is None


async def test_a_service_with_a_late_event_loop_loses_no_agent(database: Database) -> None:
    agents, now = AgentTable(database), 0.0
    await agents.add(*an_agent("quiet"))
    watch = AgentWatch(agents, ListenerTable(database), 60, clock=lambda: now)
    assert await watch.look() == []
    await age(database, 70)
    now += watch.interval + 5
    assert await watch.look() == []
    await age(database, 70)
    now += watch.interval
    assert await watch.look() == ["quiet"]
