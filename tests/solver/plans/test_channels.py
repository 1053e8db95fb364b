"""Which tensors ranks send to each other, and in which order."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, Transfer, channels, channels_of
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.placement import PlacementKind
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem


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


@pytest.mark.parametrize(
    "text", ["", "A", "1:2", "A1", "A1:", "A:1", "A1:2:3", "A-1:2", "A1:x", "A²:1", "F1:2", "a1:2"]
)
def test_a_malformed_transfer_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="as in 'A3:0'"):
        Transfer.parse(text)


def test_transfers_round_trip_as_text() -> None:
    for transfer in (Transfer("activation", 12, 345), Transfer("gradient", 0, 0)):
        assert Transfer.parse(str(transfer)) == transfer
