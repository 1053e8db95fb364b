"""The scheduler: all agents at once or none, and never one agent for two runs."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st
from zbv_service.client.admission import is_directory_allowed, is_model_allowed
from zbv_service.records.runs import AvailableAgent, WaitingRun
from zbv_service.runs.scheduler import decide

runs = st.lists(
    st.builds(
        WaitingRun,
        run_id=st.uuids().map(str),
        nodes=st.integers(1, 4),
        ranks_per_node=st.integers(1, 2),
        factory=st.sampled_from(["a.b:c", "x.y:z"]),
        checkpoint_directory=st.sampled_from([None, "/data/run", "/home/run"]),
    ),
    max_size=8,
)
agents = st.lists(
    st.builds(
        AvailableAgent,
        agent_id=st.uuids().map(str),
        slots=st.integers(1, 3),
        is_idle=st.booleans(),
        allowed_models=st.sampled_from([(), ("a.*",), ("*",)]),
        checkpoint_directories=st.sampled_from([None, (), ("/data",)]),
        owner=st.sampled_from([None, "one", "two"]),
    ),
    max_size=10,
)


def takes(agent: AvailableAgent, run: WaitingRun) -> bool:
    """Whether an agent is suitable for a run, busy or not."""
    return (
        agent.slots >= run.ranks_per_node
        and is_model_allowed(str(run.factory), agent.allowed_models)
        and is_directory_allowed(run.checkpoint_directory, agent.checkpoint_directories)
    )


@example(
    [WaitingRun("pair", 2, 1, "a:b")],
    [AvailableAgent(owner, 1, True, ("*",), owner=owner) for owner in ("one", "two")],
)
@given(runs, agents)
def test_chosen_agents_are_sufficient_idle_suitable_and_of_one_owner(
    waiting: list[WaitingRun], offers: list[AvailableAgent]
) -> None:
    placed = decide(waiting, offers).placed
    known = {offer.agent_id: offer for offer in offers}
    assigned = [agent_id for ids in placed.values() for agent_id in ids]
    assert len(assigned) == len(set(assigned))
    for run in waiting:
        chosen = [known[agent_id] for agent_id in placed.get(run.run_id, [])]
        assert len(chosen) in (0, run.nodes)
        assert all(agent.is_idle and takes(agent, run) for agent in chosen)
        assert len({agent.owner for agent in chosen}) <= 1


@given(runs, agents)
def test_the_oldest_run_starts_if_it_can(waiting: list[WaitingRun], offers: list[AvailableAgent]) -> None:
    if not waiting:
        return
    oldest = waiting[0]
    idle = Counter(offer.owner for offer in offers if offer.is_idle and takes(offer, oldest))
    can_start = max(idle.values(), default=0) >= oldest.nodes
    assert (oldest.run_id in decide(waiting, offers).placed) == can_start


def test_a_large_run_reserves_agents_but_an_impossible_one_does_not() -> None:
    def offer(name: str, *, is_idle: bool) -> AvailableAgent:
        return AvailableAgent(name, 1, is_idle, ("*",))

    offers = [offer("p", is_idle=True), offer("q", is_idle=False)]
    small = WaitingRun("small", 1, 1, "a:b")
    assert decide([WaitingRun("large", 2, 1, "a:b"), small], offers).placed == {}
    assert decide([WaitingRun("huge", 3, 1, "a:b"), small], offers).placed == {"small": ["p"]}


def test_the_reasons_why_a_run_waits_are_listed() -> None:
    offers = [
        AvailableAgent("small", 1, True, ("a.*",)),
        AvailableAgent("closed", 2, True, ()),
        AvailableAgent("elsewhere", 2, True, ("*",), checkpoint_directories=("/home",)),
        AvailableAgent("refuser", 2, True, ("*",)),
        AvailableAgent("busy", 2, False, ("*",)),
    ]
    run = WaitingRun("r", 2, 2, "a.b:c", "/data", frozenset({"refuser"}))
    assert decide([run], offers).placed == {}
    assert decide([run], offers).lacking["r"] == (
        "2 agents with 2 slots each that allow model a.b:c and checkpoints in /data; 1 of 5 agents can "
        "take it, 1 of these busy, 1 with too few slots, 1 not allowing the model, 1 not allowing the "
        "checkpoint directory, 1 having refused it"
    )


def test_a_directory_is_allowed_with_its_subdirectories() -> None:
    for directory, allowed, expected in (
        (None, (), True),
        ("/data/run", None, True),
        ("/data/run", (), False),
        ("/data/run", ("/data",), True),
        ("/data", ("/data/",), True),
        ("/data//run/", ("/data/run",), True),
        ("/database", ("/data",), False),
        ("/data/../home", ("/data",), False),
        ("/", ("/data",), False),
    ):
        assert is_directory_allowed(directory, allowed) == expected, (directory, allowed)
