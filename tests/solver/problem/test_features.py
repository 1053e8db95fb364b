"""Problems whose microbatches differ: documents, the rules of their numbers, and what a microbatch costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import differing_problems, uniform_document
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json


def document(**changes: Any) -> dict[str, Any]:
    """Four ranks and three microbatches; costs and memory depend on tokens and their squares."""
    return {
        "pp_degree": 4,
        "microbatches": 3,
        "features": {"tokens": [4, 2, 1], "tokens_squared": [16, 4, 1]},
        "costs": {
            "forward": {"fixed": 20, "tokens": 2, "tokens_squared": 0.5},
            "backward_input": {"tokens": [3, 4]},
            "backward_weight": 7,
            "p2p": {"fixed": 5, "tokens": 1},
        },
        "memory": {
            "forward": {"tokens": 2},
            "backward_input": {"tokens": -1},
            "backward_weight": {"tokens": -1},
            "limit": 40,
        },
        **changes,
    }


def test_a_cost_is_its_fixed_part_plus_coefficients_times_features() -> None:
    problem = parse_problem(document())
    arrays = problem.arrays
    last = 7
    for microbatch, tokens in enumerate([4, 2, 1]):
        kind = arrays.kind_of[microbatch]
        assert arrays.duration[F, 0, kind] == 20 + 2 * tokens + 0.5 * tokens**2
        assert arrays.duration[I, 0, kind] == 3 * tokens
        assert arrays.duration[I, last, kind] == 4 * tokens
        assert arrays.duration[W, 0, kind] == 7
        assert arrays.duration[B, 0, kind] == 3 * tokens + 7
        assert arrays.latency[0, kind] == 5 + tokens
        assert arrays.latency[3, kind] == 0  # the turn stays on one rank
        assert arrays.delta[:, 0, kind].tolist() == [2 * tokens, -tokens, -tokens, -2 * tokens]


def test_the_smallest_limit_holds_the_forwards_of_the_largest_microbatch() -> None:
    assert parse_problem(document()).smallest_limit == (16.0,) * 4
    parse_problem(document()).require_feasible()
    memory = document()["memory"] | {"limit": 15.9}
    with pytest.raises(InfeasibleMemory):
        parse_problem(document(memory=memory)).require_feasible()


def test_sequences_are_short_for_tokens_and_their_squares() -> None:
    sequences = [[3, 1], [2], []]
    short = parse_problem(document(features=None, sequences=sequences))
    long = parse_problem(document(features={"tokens": [4, 2, 0], "tokens_squared": [10, 4, 0]}))
    assert short == long


def test_equal_features_make_equal_microbatches() -> None:
    problem = parse_problem(document(features={"tokens": [2, 2, 2], "tokens_squared": [4, 4, 4]}))
    assert problem.is_equal
    plain = problem.averaged()
    assert plain.features == ()
    assert np.array_equal(plain.arrays.duration, problem.arrays.duration)
    assert np.array_equal(plain.arrays.delta, problem.arrays.delta)


def test_microbatches_with_equal_features_are_of_one_kind() -> None:
    problem = parse_problem(document(features={"tokens": [2, 1, 2], "tokens_squared": [4, 1, 4]}))
    assert problem.arrays.kinds == 2
    assert problem.arrays.kind_of[0] == problem.arrays.kind_of[2] != problem.arrays.kind_of[1]
    # A feature that nothing depends on makes no difference.
    noted = document(features=document()["features"] | {"epoch": [1, 2, 3]})
    assert parse_problem(noted).arrays.kinds == 3


@given(differing_problems())
def test_documents_round_trip(problem: Problem) -> None:
    written = json.loads(json.dumps(problem_json(problem)))
    assert parse_problem(written) == problem
    assert problem_json(parse_problem(written)) == written


@given(differing_problems())
def test_every_microbatch_releases_what_it_holds(problem: Problem) -> None:
    delta = problem.arrays.delta
    assert (delta[F] + delta[I] + delta[W] == 0).all()
    assert (delta[F] + delta[B] == 0).all()


@given(differing_problems())
def test_the_average_microbatch_keeps_the_loads(problem: Problem) -> None:
    average = problem.averaged()
    assert average.is_equal
    for letter in (F, I, W):
        total = problem.arrays.duration[letter] @ problem.arrays.count
        assert average.arrays.duration[letter, :, 0] * problem.microbatches == pytest.approx(total)


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"features": {"tokens": [1, 2], "tokens_squared": [1, 2, 3]}}, "/features/tokens", "must be 3"),
        ({"features": {"tokens": [1, 2, -1], "tokens_squared": [1, 2, 3]}}, "/features/tokens/2", "negative"),
        (
            {"features": {"tokens": [1, 1e300, -1], "tokens_squared": [1, 2, 3]}},
            "/features/tokens/1",
            "larger unit",
        ),
        (
            {"features": {"tokens": [0, 1e-300, 3], "tokens_squared": [1, 2, 3]}},
            "/features/tokens/1",
            "smaller unit",
        ),
        ({"features": {"fixed": [1, 2, 3]}}, "/features/fixed", "means the part without features"),
        ({"features": None}, "/costs/forward/tokens", "no features"),
        ({"sequences": [[1], [2], [3]]}, "/features/tokens", "together with sequences"),
        ({"features": None, "sequences": [[1], [2]]}, "/sequences", "must be 3"),
        ({"features": None, "sequences": [[1], [2], [3, -1]]}, "/sequences/2/1", "negative"),
        ({"features": {"tokens": [1, 2, 3]}}, "/costs/forward/tokens_squared", "must be fixed or one of"),
        ({"features": {"tokens": [[1], 2, 3]}}, "/features/tokens/0", "number"),
        ({"memory": {"forward": 0, "static": {"tokens": 1}}}, "/memory/static", "not an object"),
        ({"features": {f"f{k}": [1, 2, 3] for k in range(17)}}, "/features", "16"),
    ],
)
def test_wrong_features_are_refused(changes: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_problem(document(**changes))
    issue = next(issue for issue in caught.value.issues if issue.pointer == pointer)
    assert words in issue.detail


@pytest.mark.parametrize(
    ("section", "name", "amount", "words"),
    [
        ("costs", "forward", {"fixed": -5, "tokens": 2}, "found -3 for microbatch 2 on stage 0"),
        ("costs", "p2p", {"fixed": -3, "tokens": 1}, "for microbatch 2 on boundary 0"),
        ("costs", "forward", {"tokens": 1e15}, "from 0 to 1e+15"),
        ("memory", "backward_input", {"tokens": -0.5}, "sum to"),
        ("memory", "forward", {"fixed": -4, "tokens": 2}, "microbatch 2"),
        ("costs", "forward", {"tokens": [1, 2, 3]}, "one per chunk"),
    ],
)
def test_numbers_that_no_microbatch_may_have_are_refused(
    section: str, name: str, amount: dict[str, Any], words: str
) -> None:
    wrong = document()
    wrong[section][name] = amount
    with pytest.raises(InvalidInput) as caught:
        parse_problem(wrong)
    assert words in str(caught.value)


def test_a_coefficient_may_be_negative() -> None:
    """A fixed overhead that long sequences hide: every microbatch still takes at least no time."""
    forward = {"fixed": 16, "tokens": -1}
    problem = parse_problem(document(costs=document()["costs"] | {"forward": forward}))
    assert problem.arrays.duration[F, 0, problem.arrays.kind_of[0]] == 12


def test_a_sum_that_is_zero_up_to_rounding_is_zero() -> None:
    forward = {"fixed": 0.3, "tokens": -0.1}
    tokens = {"tokens": [3, 2, 1], "tokens_squared": [9, 4, 1]}
    problem = parse_problem(document(features=tokens, costs=document()["costs"] | {"forward": forward}))
    assert problem.arrays.duration[F, 0, problem.arrays.kind_of[0]] == 0


def test_plain_documents_have_no_features() -> None:
    problem = parse_problem(uniform_document(2, 3))
    assert problem.features == ()
    assert problem.is_equal
    assert "features" not in problem_json(problem)


@given(differing_problems(), st.floats(1e-3, 1e3))
def test_the_unit_of_a_feature_does_not_matter(problem: Problem, unit: float) -> None:
    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value / unit for value in values)

    feature = problem.features[0]
    other = replace(
        problem,
        features=(
            replace(
                feature,
                value=tuple(value * unit for value in feature.value),
                costs=feature.costs.mapped(scaled, scaled(feature.costs.p2p)),
                memory=replace(feature.memory, **{k: scaled(v) for k, v in vars(feature.memory).items()}),
            ),
        ),
    )
    assert other.arrays.duration == pytest.approx(problem.arrays.duration)
    assert np.array_equal(other.arrays.kind_of, problem.arrays.kind_of)
