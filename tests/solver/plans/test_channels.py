"""Which tensors ranks send to each other, and in which order."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, Transfer, TransferKind, channels, channels_of
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem


@given(
    problems(max_p=5, max_m=4, kinds=("v", "loop", "single"), loop_chunks=(1, 2, 3)),
    st.randoms(use_true_random=True),
)
def test_every_crossing_is_transferred_once_in_the_order_of_its_sender(
    problem: Problem, random: Random
) -> None:
    """Whatever the receiver's list is. The orders are shuffled, because they need not be executable."""
    whole = random_orders(problem, random)
    ranks = [random.sample(actions, len(actions)) for actions in map(whole.actions, range(whole.pp_degree))]
    rank_of = problem.placement.rank_of
    expected: dict[tuple[int, int], list[Transfer]] = {}
    for sender, actions in enumerate(ranks):
        for stage, letter, j in actions:
            target = stage + 1 if letter == "F" else stage - 1
            if letter != "W" and 0 <= target < problem.n_stages and rank_of[target] != sender:
                kind: TransferKind = "activation" if letter == "F" else "gradient"
                made = expected.setdefault((sender, rank_of[target]), [])
                made.append(Transfer(kind, min(stage, target), j))
    found = channels(problem, Orders.from_actions(ranks))
    assert found == tuple(Channel(*ends, tuple(made)) for ends, made in sorted(expected.items()))
    for rank in range(whole.pp_degree):
        ends = {(channel.sender, channel.receiver) for channel in channels_of(rank, found)}
        assert ends == {pair for pair in expected if rank in pair}


@pytest.mark.parametrize(
    "text", ["", "A", "1:2", "A1", "A1:", "A:1", "A1:2:3", "A-1:2", "A1:x", "A²:1", "F1:2", "a1:2"]
)
def test_a_malformed_transfer_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="as in 'A3:0'"):
        Transfer.parse(text)


def test_transfers_round_trip_as_text() -> None:
    texts = {"A12:345": Transfer("activation", 12, 345), "G0:0": Transfer("gradient", 0, 0)}
    assert {text: Transfer.parse(text) for text in texts} == texts
    assert [str(transfer) for transfer in texts.values()] == list(texts)
