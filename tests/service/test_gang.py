"""Gangs: all agents at once or none, and never one agent for two runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_service.client_runs import is_allowed
from zbv_service.database import AgentsTaken, AgentTable, Database, PlanTable, RunTable
from zbv_service.records import NewPlan, PlanSummary
from zbv_service.runs.gang import Offer, Wanted, choose
from zbv_service.runs.records import NewAgent, NewRun, NodeOutcome, NodeReport

PLAN = "f" * 64

runs = st.lists(
    st.builds(
        Wanted,
        run_id=st.uuids().map(str),
        nodes=st.integers(1, 4),
        ranks_per_node=st.integers(1, 2),
        factory=st.sampled_from(["a.b:c", "x.y:z"]),
    ),
    max_size=8,
)
agents = st.lists(
    st.builds(
        Offer,
        agent_id=st.uuids().map(str),
        slots=st.integers(1, 3),
        is_idle=st.booleans(),
        allowed_models=st.sampled_from([(), ("a.*",), ("*",)]),
    ),
    max_size=10,
)


@given(runs, agents)
def test_a_gang_is_whole_idle_large_enough_and_its_own(waiting: list[Wanted], offers: list[Offer]) -> None:
    placed = choose(waiting, offers)
    known = {offer.agent_id: offer for offer in offers}
    given_away = [agent_id for ids in placed.values() for agent_id in ids]
    assert len(given_away) == len(set(given_away))
    for run in waiting:
        gang = [known[agent_id] for agent_id in placed.get(run.run_id, [])]
        assert len(gang) in (0, run.nodes)
        assert all(agent.is_idle and agent.slots >= run.ranks_per_node for agent in gang)


@given(runs, agents)
def test_nobody_stands_idle_whom_the_oldest_run_could_use(waiting: list[Wanted], offers: list[Offer]) -> None:
    if not waiting:
        return
    oldest = waiting[0]
    large = [offer for offer in offers if offer.slots >= oldest.ranks_per_node]
    willing = [offer for offer in large if is_allowed(oldest.factory, offer.allowed_models)]
    pool = willing if len(willing) >= oldest.nodes else large
    can_start = sum(offer.is_idle for offer in pool) >= oldest.nodes
    assert (oldest.run_id in choose(waiting, offers)) == can_start


def test_a_large_run_keeps_its_agents_from_younger_ones_and_an_impossible_one_does_not() -> None:
    def offer(name: str, *, is_idle: bool) -> Offer:
        return Offer(name, 1, is_idle, ("*",))

    offers = [offer("p", is_idle=True), offer("q", is_idle=False)]
    small = Wanted("small", 1, 1, "a:b")
    assert choose([Wanted("large", 2, 1, "a:b"), small], offers) == {}
    assert choose([Wanted("huge", 3, 1, "a:b"), small], offers) == {"small": ["p"]}


def test_a_run_goes_where_its_model_is_allowed() -> None:
    offers = [Offer("none", 1, True, ()), Offer("right", 1, True, ("a.*",))]
    assert choose([Wanted("r", 1, 1, "a.b:c")], offers) == {"r": ["right"]}
    assert choose([Wanted("r", 1, 1, "z.b:c")], offers) == {"r": ["none"]}


@pytest.mark.parametrize(
    ("factory", "patterns", "expected"),
    [
        ("a.b:c", (), False),
        ("a.b:c", ("a.b",), True),
        ("a.b:c", ("a.*",), True),
        ("a.b:c", ("a",), False),
        ("a.b:c", ("a.b:d",), False),
        ("a.b:c", ("a.*:c",), True),
        ("ab.x:c", ("a.*",), False),
        ("A.b:c", ("a.b",), False),
    ],
)
def test_patterns_are_held_against_the_module_or_the_whole_name(
    factory: str, patterns: tuple[str, ...], expected: bool
) -> None:
    assert is_allowed(factory, patterns) == expected


def new_agent(name: str) -> NewAgent:
    return NewAgent(name, name, "127.0.0.1", 1000, 1, [], {}, ["*"])


def new_run(name: str, nodes: int) -> NewRun:
    model = {"factory": "a.b:c", "arguments": {}, "seed": 0}
    return NewRun(name, PLAN, None, None, model, nodes, 1, 5, {}, datetime.now(UTC))


def a_plan() -> NewPlan:
    now = datetime.now(UTC)
    summary = PlanSummary(PLAN, 2, 4, "v", "span", 3.0, 2.0, 0.5, "feasible", 0.1, "fake", "us", now)
    return NewPlan(summary, b"document")


@pytest.mark.anyio
async def test_services_that_assign_at_once_give_each_agent_to_one_run(database_url: str) -> None:
    """Three services, 12 agents, runs of 1 to 5 nodes; runs end and agents come free all the while."""
    databases = [Database(database_url) for _ in range(3)]
    await databases[0].migrate()
    await PlanTable(databases[0]).add(a_plan())
    tables = [RunTable(database) for database in databases]
    for index in range(12):
        await AgentTable(databases[0]).add(new_agent(f"agent-{index}"))
    names = [f"run-{index}" for index in range(24)]
    await asyncio.gather(
        *(tables[index % 3].add(new_run(name, 1 + index % 5)) for index, name in enumerate(names))
    )

    async def serve(table: RunTable) -> None:
        for _ in range(200):
            try:
                await table.assign()
            except AgentsTaken:
                continue
            await check(table)
            for name in names:
                run = await table.get(name)
                assert run is not None
                for node in run.members:
                    await table.ended(node.agent_id, NodeReport(name, 0, "succeeded", []))
            if all(record.state == "succeeded" for record in await table.newest(100)):
                return

    async def check(table: RunTable) -> None:
        holders: dict[str, str] = {}
        for run in await table.newest(100):
            assert len(run.members) == (0 if run.state == "waiting" else run.nodes)
            for node in run.members:
                if node.state != "ended":
                    assert holders.setdefault(node.agent_id, run.id) == run.id

    await asyncio.gather(*map(serve, tables))
    assert {record.state for record in await tables[0].newest(100)} == {"succeeded"}
    assert [agent.run_id for agent in await AgentTable(databases[0]).newest(100)] == [None] * 12
    for database in databases:
        await database.close()


@pytest.mark.anyio
async def test_changes_from_all_sides_at_once_wait_for_each_other_and_never_for_ever(
    database_url: str,
) -> None:
    """Two services; agents fail, report, are lost and come back while runs are assigned and cancelled."""
    databases = [Database(database_url) for _ in range(2)]
    await databases[0].migrate()
    await PlanTable(databases[0]).add(a_plan())
    names = [f"run-{index}" for index in range(8)]
    for name in names:
        await RunTable(databases[0]).add(new_run(name, 2))
    for index in range(6):
        await AgentTable(databases[0]).add(new_agent(f"agent-{index}"))

    async def play(part: int) -> None:
        random = Random(part)
        runs, agents = RunTable(databases[part % 2]), AgentTable(databases[part % 2])
        for turn in range(25):
            with suppress(AgentsTaken):
                await runs.assign()
            for agent in await agents.newest(100):
                run = None if agent.run_id is None else await runs.get(agent.run_id)
                if run is None:
                    continue
                await runs.progressed(agent.id, run.id, [{"rank": 0, "step": turn, "action": None}])
                report = NodeReport(run.id, run.generation, random.choice(OUTCOMES), [])
                match random.randrange(4):
                    case 0 | 1:
                        await runs.ended(agent.id, report)
                    case 2:
                        await agents.leave(agent.id)
                        await agents.add(new_agent(f"{part}-{turn}-{agent.name[:10]}"))
                    case _ if random.random() < 0.05:
                        await runs.request_cancel(run.id)
            await agents.lose(0.0, datetime.now(UTC) - timedelta(seconds=random.choice([0.05, 60.0])))
            await agents.add(new_agent(f"more-{part}-{turn}"))

    async with asyncio.timeout(120):
        await asyncio.gather(*map(play, range(4)))
    states = {record.state for record in await RunTable(databases[0]).newest(100)}
    assert states & {"succeeded", "failed", "cancelled"}
    for database in databases:
        await database.close()


OUTCOMES: tuple[NodeOutcome, ...] = ("succeeded", "failed", "stopped")
