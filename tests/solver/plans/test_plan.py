"""Plans: identity, documents, and refused documents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from support.problems import uniform
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(2, 4, limit=4), SearchOptions(effort="quick"))


def test_identity_is_the_hash_of_problem_and_ranks(plan: Plan) -> None:
    document = plan_json(plan)
    text = json.dumps(
        {"problem": document["problem"], "ranks": document["ranks"]}, sort_keys=True, separators=(",", ":")
    )
    assert plan.plan_id == document["plan_id"] == hashlib.sha256(text.encode()).hexdigest()


def test_identity_does_not_depend_on_how_the_plan_was_found(plan: Plan) -> None:
    other = replace(plan, provenance=replace(plan.provenance, seconds=9.0, method="other"), baselines=())
    assert other.plan_id == plan.plan_id


def test_documents_round_trip(plan: Plan) -> None:
    document = json.loads(json.dumps(plan_json(plan)))
    assert plan_json(parse_plan(document)) == document


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"ranks": [["0F0"]]}, "/ranks"),
        ({"ranks": "0F0"}, "/ranks"),
        ({"ranks": [["0F0"], [7]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["zz"]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["1F0"]]}, "/plan_id"),
        ({"plan_id": "0" * 64}, "/plan_id"),
        ({"objective": "makespan"}, "/objective"),
        ({"metrics": None}, "/metrics"),
        ({"problem": {}}, "/problem/pp_degree"),
    ],
)
def test_altered_documents_are_refused(plan: Plan, change: dict[str, Any], pointer: str) -> None:
    document = json.loads(json.dumps(plan_json(plan))) | change
    with pytest.raises(InvalidInput) as caught:
        parse_plan(document)
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize(
    ("value", "bound", "gap"),
    [(11, 10, 0.1), (10, 10, 0), (10 * (1 + 1e-12), 10, 0), (0, 0, 0), (1, 0, float("inf"))],
)
def test_gap(value: float, bound: float, gap: float) -> None:
    assert gap_of(value, bound) == pytest.approx(gap)
