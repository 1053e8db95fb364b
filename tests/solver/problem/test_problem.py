"""Problems: validation, normalisation, and error messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.problems import problems, uniform, uniform_document
from support.reference import all_orders_of_one_microbatch, peak_memory
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.problem.problem import Problem, require_same_problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json


def test_scalars_values_per_chunk_and_values_per_stage_are_equivalent() -> None:
    document = uniform_document(3, 4, limit=6)
    expected = parse_problem(document)
    for values in ([1, 1], [1] * 6):
        document["costs"] = {**document["costs"], "forward": values}
        assert parse_problem(document) == expected


def test_chunk_0_is_the_first_half_of_the_stages() -> None:
    document = uniform_document(3, 4)
    document["costs"]["forward"] = [5, 7]
    assert parse_problem(document).costs.forward == (5, 5, 5, 7, 7, 7)


def test_a_problem_keeps_the_program_that_was_measured_whatever_the_order_of_its_keys() -> None:
    document = uniform_document(2, 2)
    one, other = (
        parse_problem({**document, "measured": dict(pairs)})
        for pairs in ([("torch", "2.13.0"), ("device", "H200")], [("device", "H200"), ("torch", "2.13.0")])
    )
    assert one == other
    assert problem_json(one)["measured"] == {"device": "H200", "torch": "2.13.0"}
    assert parse_problem(problem_json(one)) == one
    assert "measured" not in problem_json(parse_problem(document))


def test_a_plan_may_resume_from_costs_that_another_program_had() -> None:
    problem = parse_problem(uniform_document(2, 2))
    require_same_problem(problem, replace(problem, measured=(("device", "H200"),)))


def test_a_measured_program_is_a_short_list_of_texts() -> None:
    for wrong in ({"a": 1}, {"a" * 33: "b"}, {str(at): "" for at in range(33)}):
        with pytest.raises(InvalidInput, match="/measured"):
            parse_problem({**uniform_document(2, 2), "measured": wrong})


def test_absent_memory_means_unlimited() -> None:
    document = uniform_document(2, 2)
    del document["memory"]
    problem = parse_problem(document)
    assert problem.memory.limit is None
    assert math.isinf(problem.arrays.limit[0])


def test_absent_backward_means_i_plus_w() -> None:
    problem = uniform(2, 2)
    assert problem.costs.backward is None
    assert problem.costs.fused(0) == 2


def test_transfers_inside_a_rank_cost_nothing() -> None:
    problem = uniform(3, 2, p2p=9)
    assert problem.arrays.latency[:, 0].tolist() == [9, 9, 0, 9, 9]


@given(problems(kinds=("v", "loop", "single")))
def test_normalised_documents_read_back_as_the_same_problem(problem: Problem) -> None:
    document = json.loads(canonical_json(problem_json(problem)))
    assert parse_problem(document) == problem
    assert problem_json(parse_problem(document)) == document


@pytest.mark.parametrize(
    "given_as",
    [
        list,
        np.array,
        lambda values: tuple(map(int, values)),
        lambda values: tuple(np.array(values, dtype=np.int64)),
        lambda values: tuple(np.array(values, dtype=np.float32)),
    ],
)
def test_sequences_and_numbers_of_any_type_have_the_same_document(given_as: Callable[[Any], Any]) -> None:
    """The document's text is part of a plan's identity."""
    problem = uniform(2, 3, limit=4)
    costs = {name: given_as(values) for name, values in vars(problem.costs).items() if values is not None}
    limit = given_as(problem.memory.limit)
    other = replace(
        problem, costs=replace(problem.costs, **costs), memory=replace(problem.memory, limit=limit)
    )
    assert canonical_json(problem_json(other)) == canonical_json(problem_json(problem))


WRONG: list[tuple[str, Any, str, str]] = [
    ("costs.forward", -1, "/costs/forward", "must not be negative"),
    ("costs.forward", [1, 1, 1, -2], "/costs/forward/3", "must not be negative"),
    ("costs.forward", float("nan"), "/costs/forward", "finite"),
    ("costs.forward", float("inf"), "/costs/forward", "finite"),
    ("costs.forward", 1e16, "/costs/forward", "larger unit"),
    ("costs.forward", 10**400, "/costs/forward", "valid number"),
    ("costs.forward", "1", "/costs/forward", "valid number"),
    ("costs.forward", True, "/costs/forward", "valid number"),
    ("costs.forward", [1, True, 1, 1], "/costs/forward/1", "valid number"),
    ("costs.forward", [1, 2, 3], "/costs/forward", "found 3 values; must be a number, 2 values"),
    ("costs.p2p", [1, 2], "/costs/p2p", "found 2 values; must be a number or 3 values"),
    ("costs.forwards", 1, "/costs/forwards", "unknown key"),
    ("costs.backward", [1], "/costs/backward", "found 1 values"),
    ("memory.backward_input", -1, "/memory", "sum to"),
    ("memory.forward", -1, "/memory/forward", "must not be negative"),
    ("memory.limit", [1, 2, 3], "/memory/limit", "2 values (one per rank)"),
    ("memory.static", -1, "/memory/static", "must not be negative"),
    ("pp_degree", 0, "/pp_degree", "greater than or equal to 1"),
    ("pp_degree", 2.0, "/pp_degree", "valid integer"),
    ("pp_degree", 10**9, "/pp_degree", "less than or equal to"),
    ("microbatches", 0, "/microbatches", "greater than or equal to 1"),
    ("microbatches", 999_999, "/microbatches", "product must be at most"),
    ("objective", "time", "/objective", "'span' or 'makespan'"),
    ("placement", "w", "/placement", "'v', 'loop' or 'single'"),
    ("chunks", 3, "/chunks", "placement v has 2 per rank"),
    ("extra", 1, "/extra", "unknown key"),
]


@pytest.mark.parametrize(("key", "value", "pointer", "says"), WRONG, ids=[f"{k}={v}" for k, v, *_ in WRONG])
def test_a_wrong_value_is_reported_at_its_key(key: str, value: Any, pointer: str, says: str) -> None:
    document = uniform_document(2, 2)
    if key == "microbatches" and value > 1:
        document["pp_degree"] = 1024
    target = document
    *path, last = key.split(".")
    for part in path:
        target = target[part]
    target[last] = value
    with pytest.raises(InvalidInput) as caught:
        parse_problem(document)
    assert caught.value.issues[0].pointer == pointer
    assert says in caught.value.issues[0].detail


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_problem({"microbatches": 0, "costs": {"forward": "x"}})
    assert {issue.pointer for issue in caught.value.issues} == {
        "/pp_degree",
        "/microbatches",
        "/costs/forward",
        "/costs/backward_input",
        "/costs/backward_weight",
    }


def test_w_must_not_allocate_memory() -> None:
    document = uniform_document(2, 2)
    document["memory"] |= {"backward_input": -2, "backward_weight": 1}
    with pytest.raises(InvalidInput, match="W releases what F and I hold"):
        parse_problem(document)


@pytest.mark.parametrize("document", [None, 3, [], "x", True])
def test_anything_but_an_object_is_refused(document: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a JSON object"):
        parse_problem(document)


@given(problems(max_p=3, max_m=1))
def test_the_smallest_limit_is_the_lowest_peak_of_any_order(problem: Problem) -> None:
    """Exhaustively, for one microbatch: more of them can only add memory."""
    peaks = [peak_memory(problem, orders) for orders in all_orders_of_one_microbatch(problem)]
    leanest = tuple(min(column) for column in zip(*peaks, strict=True))
    assert leanest == pytest.approx(problem.smallest_limit)


def test_an_infeasible_limit_names_ranks_and_smallest_limits() -> None:
    document = uniform_document(2, 2, limit=None)
    document["memory"] |= {"static": [1, 5], "limit": [3, 6.5]}
    problem = parse_problem(document)
    with pytest.raises(InfeasibleMemory) as caught:
        problem.require_feasible()
    assert list(caught.value.ranks) == [1]
    assert list(caught.value.smallest) == [3, 7]
    assert "rank 1: 6.5 < 7" in str(caught.value)
