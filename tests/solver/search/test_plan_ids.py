"""The same problem gets the same plan in every version: plan ids that were recorded once.

A change of a search may move an id, and then the objective must not be worse; a mere rewrite must move none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

RECORDED = json.loads(Path(__file__).with_name("plan_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _little_effort() -> None:
    """The plans were recorded with the whole effort."""


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_a_problem_keeps_its_plan(case: dict[str, Any]) -> None:
    plan = search(parse_any_problem(case["problem"]), SearchOptions(effort=case["effort"]))

    assert plan.plan_id == case["plan_id"]
