"""Which tensors ranks send to each other, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, Transfer, TransferKind, channels, channels_of
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem

PROBLEMS = problems(max_p=5, max_m=6, kinds=("v", "loop", "single"), loop_chunks=(1, 2, 3))
CHANCE = st.randoms(use_true_random=True)


def output(problem: Problem, action: Action) -> tuple[int, int, Transfer] | None:
    """Sender, receiver and tensor of what an action produces; None if it does not leave its rank."""
    stage, letter, j = action
    target = stage + 1 if letter == "F" else stage - 1
    if letter == "W" or not (0 <= stage < problem.n_stages and 0 <= target < problem.n_stages):
        return None
    sender, receiver = (problem.placement.rank_of[s] for s in (stage, target))
    kind: TransferKind = "activation" if letter == "F" else "gradient"
    return None if sender == receiver else (sender, receiver, Transfer(kind, min(stage, target), j))


@given(PROBLEMS, CHANCE)
def test_every_crossing_is_transferred_once_in_the_order_of_its_sender(
    problem: Problem, random: Random
) -> None:
    """Whatever the receiver's list is. The orders are shuffled, because they need not be executable."""
    whole = random_orders(problem, random)
    ranks = [random.sample(actions, len(actions)) for actions in map(whole.actions, range(whole.pp_degree))]
    expected: dict[tuple[int, int], list[Transfer]] = {}
    for action in (action for actions in ranks for action in actions):
        if made := output(problem, action):
            expected.setdefault(made[:2], []).append(made[2])
    found = channels(problem, Orders.from_actions(ranks))
    assert found == tuple(Channel(*ends, tuple(made)) for ends, made in sorted(expected.items()))
    for rank in range(whole.pp_degree):
        ends = {(c.sender, c.receiver) for c in channels_of(rank, found)}
        assert ends == {pair for pair in expected if rank in pair}


def execute(problem: Problem, orders: Orders, carried: Iterable[Channel], random: Random) -> None:
    """Run the lists with channels that know nothing but an order, as a worker's do.

    A rank posts the receives of a channel in order, up to the tensor that it needs. The k-th send meets the
    k-th receive. A gradient's receive needs a shape, which the rank knows once it made the activation. Any
    rank that can go on may be next.
    """
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
        needed = None if letter == "W" else output(problem, Action(source, letter, j))
        if needed is None:
            return True
        order, arrived = carries[needed[:2]], sent[needed[:2]]
        index = order.index(needed[2])
        for before in order[: index + 1]:
            assert before.kind == "activation" or (before.boundary, before.microbatch) in made
        assert arrived == list(order[: len(arrived)])
        return index < len(arrived)

    while ready := [rank for rank in range(problem.pp_degree) if can_run(rank)]:
        rank = random.choice(ready)
        action = lists[rank][done[rank]]
        done[rank] += 1
        if action.letter == "F":
            made.add((action.stage, action.microbatch))
        if produced := output(problem, action):
            sent[produced[:2]].append(produced[2])
    assert done == [len(actions) for actions in lists]
    assert all(sent[ends] == list(order) for ends, order in carries.items())


@given(PROBLEMS, CHANCE)
def test_no_executable_order_deadlocks_on_its_channels(problem: Problem, random: Random) -> None:
    orders = random_orders(problem, random)
    whole = channels(problem, orders)
    execute(problem, orders, whole, random)
    # An evaluation leaves out all other actions, and both ends of a channel leave out its gradients.
    ranks = [orders.actions(rank) for rank in range(orders.pp_degree)]
    forwards = Orders.from_actions([[action for action in rank if action.letter == "F"] for rank in ranks])
    activations = [
        Channel(c.sender, c.receiver, kept)
        for c in whole
        if (kept := tuple(transfer for transfer in c.transfers if transfer.kind == "activation"))
    ]
    assert activations == list(channels(problem, forwards))
    execute(problem, forwards, activations, random)


@pytest.mark.parametrize(
    "text", ["", "A", "1:2", "A1", "A1:", "A:1", "A1:2:3", "A-1:2", "A1:x", "A²:1", "F1:2", "a1:2"]
)
def test_a_malformed_transfer_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="as in 'A3:0'"):
        Transfer.parse(text)


def test_transfers_round_trip_as_text() -> None:
    for transfer, text in (
        (Transfer("activation", 12, 345), "A12:345"),
        (Transfer("gradient", 0, 0), "G0:0"),
    ):
        assert (str(transfer), Transfer.parse(text)) == (text, transfer)
