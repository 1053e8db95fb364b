"""Gangs: all agents at once or none, and never one agent for two runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_service.client_runs import is_allowed
from zbv_service.runs.gang import Offer, Wanted, choose

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
        owner=st.sampled_from([None, "one", "two"]),
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
        assert len({agent.owner for agent in gang}) <= 1


@given(runs, agents)
def test_nobody_stands_idle_whom_the_oldest_run_could_use(waiting: list[Wanted], offers: list[Offer]) -> None:
    if not waiting:
        return
    oldest = waiting[0]
    large = [offer for offer in offers if offer.slots >= oldest.ranks_per_node]
    willing = [offer for offer in large if is_allowed(oldest.factory, offer.allowed_models)]
    per_owner = [
        [offer for offer in pool if offer.owner == owner]
        for pool in (willing, large)
        for owner in {offer.owner for offer in pool}
    ]
    pools = [pool for pool in per_owner if len(pool) >= oldest.nodes]
    allowed = [pool for pool in pools if all(is_allowed(oldest.factory, o.allowed_models) for o in pool)]
    can_start = any(sum(offer.is_idle for offer in pool) >= oldest.nodes for pool in allowed or pools)
    assert (oldest.run_id in choose(waiting, offers)) == can_start


def test_agents_of_two_owners_are_never_one_run() -> None:
    offers = [Offer("a", 1, True, ("*",), "one"), Offer("b", 1, True, ("*",), "two")]
    pair = Wanted("pair", 2, 1, "a:b")
    assert choose([pair], offers) == {}
    assert choose([pair], [*offers, Offer("c", 1, True, ("*",), "two")]) == {"pair": ["b", "c"]}
    assert choose([pair, Wanted("small", 1, 1, "a:b")], offers) == {"small": ["a"]}


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
