"""The cost of refusing a document does not grow with its number of mistakes."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from zbv_solver.documents.fields import BATCH
from zbv_solver.errors import MOST_ISSUES, InvalidInput, Issue
from zbv_solver.measure.rank_trace import parse_rank_trace
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.numeric import MAX_LAYERS, MAX_STAGES
from zbv_solver.problem.reading import parse_any_problem

COSTS = {"forward": 1, "backward_input": 1, "backward_weight": 1}
PROBLEM = {"pp_degree": 2, "microbatches": 4, "costs": COSTS}
LAYER = {"name": "a", **COSTS}
LAYERED = {"pp_degree": 2, "microbatches": 4, "layers": [LAYER] * 4}
TRACE = {"rank": 0, "pp_rank": 0, "plan_id": "0" * 64, "steps": []}
STEP = {"step": 0, "seconds": 1.0, "actions": []}

Reading = tuple[Callable[[Any], object], Any]
"""A function that reads a document, and a document that it refuses."""
REPEATED: dict[str, Callable[[int], Reading]] = {
    "empty layers": lambda n: (parse_any_problem, {**LAYERED, "layers": [{}] * n}),
    "unknown keys": lambda n: (parse_any_problem, {**PROBLEM, **{f"k{i}": 0 for i in range(n)}}),
    "unknown keys of a layer": lambda n: (
        parse_any_problem,
        {**LAYERED, "layers": [{**LAYER, **{f"k{i}": 0 for i in range(n)}}]},
    ),
    "costs": lambda n: (parse_any_problem, {**PROBLEM, "costs": {**COSTS, "forward": [None] * n}}),
    "late costs": lambda n: (
        parse_any_problem,
        {**PROBLEM, "costs": {**COSTS, "forward": [1.0] * (2 * BATCH) + [None] * n}},
    ),
    "groups": lambda n: (parse_any_problem, {**LAYERED, "cut": {"together": [[None]] * n}}),
    "names of a group": lambda n: (parse_any_problem, {**LAYERED, "cut": {"together": [[None] * n]}}),
    "stages": lambda n: (parse_any_problem, {**LAYERED, "partition": [None] * n}),
    "recomputed": lambda n: (parse_any_problem, {**LAYERED, "partition": [["a"]], "recompute": [None] * n}),
    "ranks": lambda n: (parse_plan, {"problem": PROBLEM, "ranks": [None] * n}),
    "actions": lambda n: (parse_plan, {"problem": PROBLEM, "ranks": [[None] * n, []]}),
    "baselines": lambda n: (parse_plan, {"problem": PROBLEM, "ranks": [[], []], "baselines": [{}] * n}),
    "steps": lambda n: (parse_rank_trace, {**TRACE, "steps": [{}] * n}),
    "records": lambda n: (parse_rank_trace, {**TRACE, "steps": [{**STEP, "actions": [[]] * n}]}),
}


def refusal_of(reading: Reading) -> InvalidInput:
    read, document = reading
    with pytest.raises(InvalidInput) as caught:
        read(document)
    return caught.value


def peak_of(reading: Reading) -> int:
    refusal_of(reading)  # whatever is loaded or kept at the first use
    tracemalloc.start()
    try:
        refusal_of(reading)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", REPEATED)
def test_ten_times_as_many_mistakes_need_no_more_memory(name: str) -> None:
    few, many = REPEATED[name](4 * BATCH), REPEATED[name](40 * BATCH)
    # Valid entries before the mistake are copied, 8 bytes each; a mistake takes several hundred bytes.
    assert peak_of(many) <= 1.5 * peak_of(few) + 16 * 36 * BATCH
    error = refusal_of(many)
    assert 1 <= len(error.issues) <= MOST_ISSUES
    assert len(str(error)) <= 200 * len(error.issues)


def test_a_list_that_is_too_long_is_refused_before_its_entries_are_validated() -> None:
    for document, pointer, most in (
        ({**LAYERED, "layers": [{}] * (MAX_LAYERS + 1)}, "/layers", MAX_LAYERS),
        ({**PROBLEM, "costs": {**COSTS, "p2p": ["x"] * (MAX_STAGES + 1)}}, "/costs/p2p", MAX_STAGES),
    ):
        (issue,) = refusal_of((parse_any_problem, document)).issues
        assert issue.pointer == pointer
        assert issue.detail.startswith(f"found {most + 1} entries; must be at most {most}")


def test_an_error_counts_the_mistakes_that_it_does_not_list() -> None:
    exact = refusal_of((parse_any_problem, {**LAYERED, "layers": [{**LAYER, "name": i} for i in range(300)]}))
    assert (len(exact.issues), exact.more, exact.is_partial) == (100, 200, False)
    assert str(exact).endswith(" And 200 more.")
    costs = {**COSTS, "forward": [None] * (3 * BATCH)}
    partial = refusal_of((parse_any_problem, {**PROBLEM, "costs": costs}))
    assert (partial.more, partial.is_partial) == (BATCH - MOST_ISSUES, True)
    assert str(partial).endswith(f" And at least {partial.more} more.")
    assert [issue.pointer for issue in partial.issues[:2]] == ["/costs/forward/0", "/costs/forward/1"]


def test_pointers_count_entries_from_the_beginning_of_the_list() -> None:
    values: list[Any] = [1.0] * 4000
    values[3210] = "x"
    error = refusal_of((parse_any_problem, {**PROBLEM, "costs": {**COSTS, "forward": values}}))
    assert [issue.pointer for issue in error.issues] == ["/costs/forward/3210"]


def test_an_error_keeps_its_count_when_it_is_nested_or_pickled() -> None:
    error = InvalidInput([Issue("/x", "y")] * 150, more=7, is_partial=True)
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error)), error.below("/problem")):
        assert (len(same.issues), same.more, same.is_partial) == (100, 57, True)


@pytest.mark.parametrize(
    "reading",
    [
        (parse_any_problem, {**PROBLEM, "x" * 10**6: 1}),
        (parse_any_problem, {**PROBLEM, "placement": "x" * 10**6}),
        (parse_any_problem, {**PROBLEM, "placement": [[list(range(1000))] * 1000] * 1000}),
        (parse_any_problem, {**PROBLEM, "units": {"time": {"a": ["x" * 10**6] * 100}}}),
        (parse_plan, {"problem": PROBLEM, "ranks": [["0F0" * 10**6], []]}),
        (parse_plan, {"problem": PROBLEM, "ranks": [[], []], "plan_id": "x" * 10**6}),
        (parse_any_problem, {**LAYERED, "partition": [["x" * 10**6]]}),
    ],
    ids=["key", "text", "lists", "object", "action", "plan id", "layer name"],
)
def test_a_message_quotes_only_the_beginning_of_a_large_value(reading: Reading) -> None:
    error = refusal_of(reading)
    assert len(str(error)) + sum(len(issue.pointer) for issue in error.issues) < 2000


def test_a_plan_with_far_too_many_actions_is_refused_before_they_are_parsed() -> None:
    error = refusal_of((parse_plan, {"problem": PROBLEM, "ranks": [["0F0"] * 200, []]}))
    assert [issue.pointer for issue in error.issues] == ["/ranks"]
