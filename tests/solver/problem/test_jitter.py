"""Draws: distributions, common random numbers, and documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.problems import uniform
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.jitter import Jitter, Spread, draw, jitter_json, parse_jitter
from zbv_solver.problem.problem import B, F, I

PROBLEM = uniform(4, 64, p2p=1)


def test_a_lognormal_factor_has_mean_1_and_the_given_deviation() -> None:
    normal = np.random.default_rng(1).standard_normal(100_000)
    factors = Spread(0.2).factors(normal)
    assert factors.mean() == pytest.approx(1, abs=2e-3)
    assert factors.std() == pytest.approx(0.2, rel=1e-2)
    assert factors.min() > 0


def test_samples_are_drawn_with_equal_probability() -> None:
    normal = np.random.default_rng(1).standard_normal(30_000)
    values, counts = np.unique(Spread(samples=(2.0, 0.5, 1.0)).factors(normal), return_counts=True)
    assert values.tolist() == [0.5, 1.0, 2.0]
    assert counts == pytest.approx(10_000, rel=0.03)


def test_draws_of_a_kind_do_not_depend_on_the_other_kinds() -> None:
    both, only = Jitter.of(0.05, 0.2, 0.1), Jitter.of(transfer=0.2)
    first, second = draw(both, PROBLEM, 7, range(2), 3), draw(only, PROBLEM, 7, range(2), 3)
    assert np.array_equal(first.transfer, second.transfer)
    assert (second.action == 1).all()
    assert (second.rank == 1).all()


def test_a_chain_draws_the_same_alone_and_among_others() -> None:
    jitter = Jitter.of(0.05, 0.2, 0.1)
    together, alone = draw(jitter, PROBLEM, 7, range(4), 3), draw(jitter, PROBLEM, 7, [2], 3)
    for many, one in zip(together, alone, strict=True):
        assert np.array_equal(many[:, 2:3], one)


def test_scenarios_differ() -> None:
    jitter = Jitter.of(0.05)
    drawn = [
        draw(jitter, PROBLEM, seed, [chain], iteration).action
        for seed, chain, iteration in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    assert all(not np.array_equal(drawn[0], other) for other in drawn[1:])


def test_a_fused_backward_shares_the_draw_of_its_input_half() -> None:
    action = draw(Jitter.of(0.05), PROBLEM, 0, [0], 0).action.reshape(4, -1)
    assert np.array_equal(action[B], action[I])
    assert not np.array_equal(action[F], action[I])


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("5%", {"action": 0.05, "rank": 0, "transfer": 0.05}),
        ("action=5%,transfer=20%", {"action": 0.05, "rank": 0, "transfer": 0.2}),
        ("rank=0.5, W=10%", {"action": {"F": 0, "I": 0, "W": 0.1, "B": 0}, "rank": 0.5, "transfer": 0}),
        ("action=1,B=0", {"action": {"F": 1, "I": 1, "W": 1, "B": 0}, "rank": 0, "transfer": 0}),
    ],
)
def test_the_short_form(text: str, document: dict[str, Any]) -> None:
    jitter = parse_jitter(text)
    assert jitter_json(jitter) == document
    assert parse_jitter(document) == jitter


def test_a_document_with_samples_and_ranks_is_written_as_it_was_read() -> None:
    document = {"action": {"samples": [0.9, 1.1]}, "rank": [0, {"samples": [1, 1.5]}], "transfer": 0.2}
    assert jitter_json(parse_jitter(document)) == document


@pytest.mark.parametrize(
    ("given", "pointer", "said"),
    [
        ("", "", "jitter is written as 5%"),
        ("five", "", "jitter is written as 5%"),
        ("colour=5%", "", "jitter is written as 5%"),
        ("action=5%,action=6%", "", "found action twice"),
        ("-5%", "", "must be from 0 to 10"),
        ("nan", "", "must be from 0 to 10"),
        ("1e9", "", "must be from 0 to 10"),
        ({"action": -1}, "/action", "must be from 0 to 10"),
        ({"action": {"F": 11}}, "/action/F", "must be from 0 to 10"),
        ({"action": {"X": 1}}, "/action/X", "unknown key"),
        ({"action": [1]}, "/action", "valid number"),
        ({"rank": [0, -1]}, "/rank/1", "must be from 0 to 10"),
        ({"rank": []}, "/rank", "at least 1"),
        ({"transfer": {"samples": [-1]}}, "/transfer/samples/0", "must be a factor"),
        ({"transfer": {"samples": []}}, "/transfer/samples", "at least 1"),
        ({"noise": 1}, "/noise", "unknown key"),
    ],
)
def test_wrong_jitter_is_refused(given: object, pointer: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_jitter(given)
    (issue,) = caught.value.issues
    assert issue.pointer == pointer
    assert said in issue.detail


def test_factors_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="found 2 values; must be one, or one per rank"):
        draw(parse_jitter({"rank": [0, 0.1]}), PROBLEM, 0, [0], 0)
