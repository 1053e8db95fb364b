"""Orders as text and as arrays, and relabelling of microbatches."""

from __future__ import annotations

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
from zbv_solver.plans.orders import Action, Orders, first_in_first_out
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders


@pytest.mark.parametrize(
    "text", ["", "0F", "F0", "0X0", "0F0xyz", " 0F0", "0F0\n", "00F0", "0f0", "-1F0", "٣F0"]
)
def test_malformed_actions_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="an action is a stage"):
        Action.parse(text)


def test_errors_point_at_the_action() -> None:
    with pytest.raises(InvalidInput) as caught:
        Orders.from_text([["0F0"], ["1F0", "what"]])
    assert caught.value.issues[0].pointer == "/ranks/1/1"


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.sampled_from("FIWB"), st.integers(0, 9999))), min_size=1
    )
)
def test_text_round_trips(ranks: list[list[tuple[int, str, int]]]) -> None:
    orders = Orders.from_actions(ranks)
    assert Orders.from_text(orders.all_text()) == orders
    assert [orders.actions(rank) for rank in range(len(ranks))] == ranks
    assert len(orders) == sum(map(len, ranks))


WORDS = st.one_of(
    st.sampled_from(["0F0", "12B7", "7I3", "999999999W999999999"]),
    st.text("0123456789FIWB", max_size=6),
    st.sampled_from(
        ["", "0F0\n", "\n", "0F0\n1F0", "F", "0F0F", "00F0", "0F01", "1000000000F0", "٣F0", "0F0 ", 7]
    ),
)


@given(st.lists(st.lists(WORDS, max_size=4), max_size=3))
def test_lists_are_parsed_like_single_actions(ranks: list[list[Any]]) -> None:
    wrong = None
    for rank, texts in enumerate(ranks):
        for index, text in enumerate(texts):
            try:
                Action.parse(text)
            except InvalidInput as error:
                wrong = wrong or error.below(f"/ranks/{rank}/{index}").issues
    if wrong is None:
        orders = Orders.from_text(ranks)
        assert [orders.actions(rank) for rank in range(len(ranks))] == [
            [Action.parse(text) for text in texts] for texts in ranks
        ]
        assert orders.all_text() == ranks
        assert [orders.text(rank) for rank in range(len(ranks))] == ranks
        kinds = [array.dtype.name for array in (orders.stage, orders.letter, orders.microbatch)]
        assert kinds == ["int32", "int8", "int32"]
    else:
        with pytest.raises(InvalidInput) as caught:
            Orders.from_text(ranks)
        assert caught.value.issues == wrong


def test_invalid_actions_have_a_text_for_messages() -> None:
    orders = Orders.pack([[(-1, 7, -2)]])
    assert orders.text_at(0) == "-1(letter 7)-2"
    assert Orders.pack([[(-1, 0, 3)]]).all_text() == [["-1F3"]]


@given(differing_problems(max_p=3, max_m=6), st.integers(0, 2**32))
@settings(max_examples=40)
def test_relabelling_swaps_only_equal_microbatches(problem: Problem, seed: int) -> None:
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


@given(problems(max_m=4), st.integers(0, 2**32))
def test_relabelling_undoes_any_permutation_of_microbatches(problem: Problem, seed: int) -> None:
    for attempt in priority_schedules(problem, (1.0,)):
        orders = attempt.orders
        labels = list(range(problem.microbatches))
        Random(seed).shuffle(labels)
        shuffled = Orders.from_actions(
            [[(s, x, labels[j]) for s, x, j in orders.actions(rank)] for rank in range(orders.pp_degree)]
        )
        relabelled = first_in_first_out(shuffled, problem.n_stages)
        assert relabelled == orders
        verify_orders(problem, relabelled)
        assert evaluate(problem, relabelled).span <= evaluate(problem, shuffled).span + 1e-9
        break
