"""Orders as text and as arrays, relabelling of microbatches, and what ranks send to each other."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import differing_problems, problems
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.channels import Channel, Transfer, TransferKind, channels, channels_of
from zbv_solver.plans.orders import Action, Orders, first_in_first_out
from zbv_solver.problem.problem import LETTERS, Problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders

RIGHT = ["0F0", "12B7", "7I3", "999999999W999999999"]
WRONG = ["", "0F", "F0", "F", "0X0", "0F0xyz", " 0F0", "0F0 ", "0F0\n", "\n", "0F0\n1F0", "0F0F", "00F0"]
WRONG += ["0F01", "0f0", "-1F0", "٣F0", "1000000000F0", "0F1000000000"]


@pytest.mark.parametrize("text", [*WRONG, 7])
def test_malformed_actions_are_refused(text: Any) -> None:
    with pytest.raises(InvalidInput, match="an action is a stage"):
        Action.parse(text)


WORDS = st.one_of(st.sampled_from(RIGHT), st.text("0123456789FIWB", max_size=6), st.sampled_from([*WRONG, 7]))


@given(st.lists(st.lists(WORDS, max_size=4), max_size=3))
def test_lists_are_parsed_like_single_actions_and_refused_at_the_first_wrong_one(
    ranks: list[list[Any]],
) -> None:
    wrong = None
    for rank, texts in enumerate(ranks):
        for index, text in enumerate(texts):
            try:
                Action.parse(text)
            except InvalidInput as error:
                wrong = wrong or error.below(f"/ranks/{rank}/{index}").issues
    if wrong is not None:
        with pytest.raises(InvalidInput) as caught:
            Orders.from_text(ranks)
        assert caught.value.issues == wrong


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.sampled_from(LETTERS), st.integers(0, 999_999_999))),
        min_size=1,
    )
)
def test_orders_round_trip_as_text_and_as_actions(ranks: list[list[tuple[int, str, int]]]) -> None:
    orders = Orders.from_actions(ranks)
    texts = [[f"{stage}{letter}{j}" for stage, letter, j in actions] for actions in ranks]
    assert orders.all_text() == texts
    assert [orders.text(rank, at_most=3) for rank in range(len(ranks))] == [each[:3] for each in texts]
    assert [orders.actions(rank) for rank in range(len(ranks))] == ranks
    assert [str(action) for action in orders.actions(0)] == orders.text(0) == texts[0]
    again = Orders.from_text(texts)
    assert again == orders
    assert len(again) == sum(map(len, ranks))
    kinds = [array.dtype.name for array in (again.stage, again.letter, again.microbatch)]
    assert kinds == ["int32", "int8", "int32"]


def test_invalid_actions_have_a_text_for_messages() -> None:
    assert Orders.pack([[(-1, 7, -2)]]).text_at(0) == "-1(letter 7)-2"
    assert Orders.pack([[(-1, 0, 3)]]).all_text() == [["-1F3"]]


@given(differing_problems(max_p=3, max_m=6), st.integers(0, 2**32))
@settings(max_examples=40)
def test_relabelling_undoes_any_exchange_of_equal_microbatches(problem: Problem, seed: int) -> None:
    kind_of, chance = problem.arrays.kind_of, Random(seed)
    orders = random_orders(problem, chance)
    label = np.arange(problem.microbatches)
    for kind in range(problem.arrays.kinds):
        members = np.flatnonzero(kind_of == kind).tolist()
        label[members] = chance.sample(members, len(members))
    relabelled = first_in_first_out(orders.renamed(label), problem.n_stages, kind_of)
    assert relabelled == first_in_first_out(orders, problem.n_stages, kind_of)
    assert np.array_equal(kind_of[relabelled.microbatch], kind_of[orders.microbatch])
    assert evaluate(problem, relabelled).span <= evaluate(problem, orders).span * (1 + 1e-9)
    verify_orders(replace(problem, memory=replace(problem.memory, limit=None)), relabelled)


@given(problems(max_m=4), st.integers(0, 2**32))
def test_orders_whose_microbatches_ascend_are_relabelled_to_themselves(problem: Problem, seed: int) -> None:
    orders = next(iter(priority_schedules(problem, (1.0,)))).orders
    label = np.array(Random(seed).sample(range(problem.microbatches), problem.microbatches))
    assert first_in_first_out(orders.renamed(label), problem.n_stages) == orders


# --- channels


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
