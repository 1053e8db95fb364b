"""Which tensors ranks send to each other, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from zbv_solver.construct.baselines import BASELINES, baseline
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, Transfer, TransferKind, channels, channels_of
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import PlacementKind
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify_orders


def problem_of(p: int, m: int, placement: PlacementKind = "v", chunks: int | None = None) -> Problem:
    return parse_problem(
        {
            "pp_degree": p,
            "microbatches": m,
            "placement": placement,
            "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
            **({} if chunks is None else {"chunks": chunks}),
        }
    )


def one_by_one(problem: Problem, fused: bool = False) -> Orders:
    """One microbatch after the other through the whole model: valid under every placement."""
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    rank_of, stages = problem.placement.rank_of, range(problem.n_stages)
    for j in range(problem.microbatches):
        for s in stages:
            ranks[rank_of[s]].append(Action(s, "F", j))
        for s in reversed(stages):
            letters = "B" if fused else "IW"
            ranks[rank_of[s]].extend(Action(s, letter, j) for letter in letters)
    return Orders.from_actions(ranks)


def transfers(*texts: str) -> tuple[Transfer, ...]:
    return tuple(map(Transfer.parse, texts))


@pytest.mark.parametrize("fused", [False, True])
def test_a_channel_of_a_v_has_activations_and_gradients_in_one_order(fused: bool) -> None:
    problem = problem_of(2, 2)  # rank 0: stages 0 and 3, rank 1: stages 1 and 2
    assert channels(problem, one_by_one(problem, fused)) == (
        Channel(0, 1, transfers("A0:0", "G2:0", "A0:1", "G2:1")),
        Channel(1, 0, transfers("A2:0", "G0:0", "A2:1", "G0:1")),
    )


def test_the_turn_of_the_v_transfers_nothing() -> None:
    problem = problem_of(4, 3)
    crossed = {t.boundary for channel in channels(problem, one_by_one(problem)) for t in channel.transfers}
    assert crossed == {0, 1, 2, 4, 5, 6}


@pytest.mark.parametrize(("placement", "chunks"), [("v", None), ("loop", 3), ("single", None)])
def test_one_rank_has_no_channels(placement: PlacementKind, chunks: int | None) -> None:
    problem = problem_of(1, 2, placement, chunks)
    assert channels(problem, one_by_one(problem)) == ()


def test_a_loop_of_two_ranks_has_a_channel_per_direction() -> None:
    problem = problem_of(2, 1, "loop", 2)  # stages 0 1 2 3 on ranks 0 1 0 1
    assert channels(problem, one_by_one(problem)) == (
        Channel(0, 1, transfers("A0:0", "A2:0", "G1:0")),
        Channel(1, 0, transfers("A1:0", "G2:0", "G0:0")),
    )


def test_transfers_have_the_sender_s_order_not_the_receiver_s() -> None:
    problem = problem_of(2, 2, "single")
    orders = Orders.from_text([["0F1", "0F0", "0B0", "0B1"], ["1F0", "1F1", "1I1", "1B0", "1W1"]])
    assert channels(problem, orders) == (
        Channel(0, 1, transfers("A0:1", "A0:0")),
        Channel(1, 0, transfers("G0:1", "G0:0")),
    )


def test_the_channels_of_a_rank_are_those_it_sends_or_receives_on() -> None:
    problem = problem_of(4, 1)
    found = channels(problem, one_by_one(problem))
    assert {(c.sender, c.receiver) for c in channels_of(0, found)} == {(0, 1), (1, 0)}
    assert {(c.sender, c.receiver) for c in channels_of(2, found)} == {(1, 2), (2, 1), (2, 3), (3, 2)}


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([("v", None), ("loop", 1), ("loop", 2), ("loop", 3), ("single", None)]),
    st.booleans(),
    st.randoms(use_true_random=True),
)
def test_every_crossing_is_transferred_once_in_production_order(
    p: int,
    m: int,
    placement: tuple[PlacementKind, int | None],
    fused: bool,
    random: Random,
) -> None:
    problem = problem_of(p, m, *placement)
    whole = one_by_one(problem, fused)
    # channels() accepts orders that cannot be executed, so any permutation must be reproduced.
    shuffled = [list(whole.actions(rank)) for rank in range(p)]
    for actions in shuffled:
        random.shuffle(actions)
    rank_of = problem.placement.rank_of
    boundaries = [s for s in range(problem.n_stages - 1) if rank_of[s] != rank_of[s + 1]]

    found = channels(problem, Orders.from_actions(shuffled))

    moved = [transfer for channel in found for transfer in channel.transfers]
    assert sorted(moved) == [
        Transfer(kind, boundary, j)
        for kind in ("activation", "gradient")
        for boundary in boundaries
        for j in range(m)
    ]
    for channel in found:
        produced = []
        for action in shuffled[channel.sender]:
            kind, target = (
                ("activation", action.stage + 1) if action.letter == "F" else ("gradient", action.stage - 1)
            )
            if (
                action.letter != "W"
                and 0 <= target < problem.n_stages
                and rank_of[target] == channel.receiver
            ):
                produced.append((kind, min(action.stage, target), action.microbatch))
        assert list(channel.transfers) == produced


def execute(problem: Problem, orders: Orders, carried: Iterable[Channel], random: Random) -> None:
    """Run the lists with channels that know nothing but an order, as a worker's do.

    A rank posts the receives of a channel in order, up to the tensor that it needs. The k-th send meets the
    k-th receive. A gradient's receive needs a shape, which the rank knows once it made the activation. Any
    rank that can go on may be next.
    """
    rank_of, last = problem.placement.rank_of, problem.n_stages - 1
    lists = [orders.actions(rank) for rank in range(problem.pp_degree)]
    carries = {(channel.sender, channel.receiver): channel.transfers for channel in carried}
    sent: dict[tuple[int, int], list[Transfer]] = {ends: [] for ends in carries}
    done = [0] * problem.pp_degree
    made: set[tuple[int, int]] = set()

    def can_run(rank: int) -> bool:
        if done[rank] == len(lists[rank]):
            return False
        stage, letter, j = lists[rank][done[rank]]
        source = stage - 1 if letter == "F" else stage + 1
        if letter == "W" or not 0 <= source <= last or rank_of[source] == rank:
            return True
        needed = Transfer("activation" if letter == "F" else "gradient", min(stage, source), j)
        order, arrived = carries[rank_of[source], rank], sent[rank_of[source], rank]
        index = order.index(needed)
        for before in order[: index + 1]:
            assert before.kind == "activation" or (before.boundary, before.microbatch) in made
        assert arrived == list(order[: len(arrived)])
        return index < len(arrived)

    while ready := [rank for rank in range(problem.pp_degree) if can_run(rank)]:
        rank = random.choice(ready)
        stage, letter, j = lists[rank][done[rank]]
        done[rank] += 1
        if letter == "F":
            made.add((stage, j))
        sink = stage + 1 if letter == "F" else stage - 1
        if letter != "W" and 0 <= sink <= last and rank_of[sink] != rank:
            kind: TransferKind = "activation" if letter == "F" else "gradient"
            sent[rank, rank_of[sink]].append(Transfer(kind, min(stage, sink), j))
    assert done == [len(actions) for actions in lists]
    assert all(sent[ends] == list(order) for ends, order in carries.items())


PLACEMENTS: list[tuple[PlacementKind, int | None]] = [
    ("v", None),
    ("loop", 2),
    ("loop", 3),
    ("single", None),
]


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(PLACEMENTS),
    st.randoms(use_true_random=True),
)
def test_no_executable_order_deadlocks_on_its_channels(
    p: int, m: int, placement: tuple[PlacementKind, int | None], random: Random
) -> None:
    problem = problem_of(p, m, *placement)
    orders = random_orders(problem, random)
    verify_orders(problem, orders)
    execute(problem, orders, channels(problem, orders), random)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_deadlocks_on_its_channels(name: str, p: int) -> None:
    problem, orders = baseline(name, problem_of(p, 2 * p))
    execute(problem, orders, channels(problem, orders), Random(0))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_searched_plan_deadlocks_on_its_channels(
    placement: tuple[PlacementKind, int | None], p: int
) -> None:
    plan = search(problem_of(p, 2 * p, *placement), SearchOptions(effort="quick"))
    execute(plan.problem, plan.orders, channels(plan.problem, plan.orders), Random(0))


@given(st.integers(2, 5), st.integers(1, 6), st.sampled_from(PLACEMENTS), st.randoms(use_true_random=True))
def test_forwards_alone_do_not_deadlock_on_the_activations_of_the_channels(
    p: int, m: int, placement: tuple[PlacementKind, int | None], random: Random
) -> None:
    """An evaluation leaves out all other actions, and both ends of a channel leave out its gradients."""
    problem = problem_of(p, m, *placement)
    orders = random_orders(problem, random)
    forwards = Orders.from_actions(
        [[action for action in orders.actions(rank) if action.letter == "F"] for rank in range(p)]
    )
    activations = (
        (c.sender, c.receiver, tuple(t for t in c.transfers if t.kind == "activation"))
        for c in channels(problem, orders)
    )
    carried = [Channel(*fields) for fields in activations if fields[-1]]
    assert carried == list(channels(problem, forwards))
    execute(problem, forwards, carried, random)


@given(
    st.integers(2, 5),
    st.integers(1, 5),
    st.sampled_from(PLACEMENTS),
    st.randoms(use_true_random=True),
)
def test_a_channel_depends_on_the_list_of_its_sender_alone(
    p: int, m: int, placement: tuple[PlacementKind, int | None], random: Random
) -> None:
    """So both ends have one order, whatever the receiver's list is."""
    problem = problem_of(p, m, *placement)
    orders = random_orders(problem, random)
    sender = random.randrange(p)
    lists = [orders.actions(rank) for rank in range(p)]
    others = [actions if rank == sender else actions[::-1] for rank, actions in enumerate(lists)]
    found, again = (
        [channel for channel in channels(problem, each) if channel.sender == sender]
        for each in (orders, Orders.from_actions(others))
    )
    assert found == again
    assert len({channel.receiver for channel in found}) == len(found)


@pytest.mark.parametrize(
    "text", ["", "A", "1:2", "A1", "A1:", "A:1", "A1:2:3", "A-1:2", "A1:x", "A²:1", "F1:2", "a1:2"]
)
def test_a_malformed_transfer_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="as in 'A3:0'"):
        Transfer.parse(text)


def test_transfers_round_trip_as_text() -> None:
    for transfer in (Transfer("activation", 12, 345), Transfer("gradient", 0, 0)):
        assert Transfer.parse(str(transfer)) == transfer
