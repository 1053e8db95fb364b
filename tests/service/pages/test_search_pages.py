"""The form for a new search and the page of a search in every state, as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.problems import uniform
from support.serving import PROBLEM, Serving
from zbv_service.pages.new_search import presets, start_from
from zbv_service.pages.search import Shortage, search_values
from zbv_service.pages.shell import Shell, render
from zbv_service.problems.check import check
from zbv_service.records.searches import SearchDocument
from zbv_service.records.shared import OptionsDocument, ProblemSummary
from zbv_service.settings import Settings
from zbv_solver.frontiers.memory_fraction import at_fraction
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json

AT = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
RECORD = SearchDocument(
    id="a" * 32,
    state="running",
    summary=ProblemSummary(pp_degree=2, microbatches=4, placement="v", objective="span", time_unit="us"),
    options=OptionsDocument(effort="quick", time_limit=90, seed=7),
    objective=1234.0,
    lower_bound=1200.0,
    gap=0.02875,
    method="parameters(rule,evaluation=3)",
    plan_id=None,
    error=None,
    cancel_requested=False,
    attempts=2,
    crashes=0,
    created_at=AT,
    started_at=AT,
    updated_at=AT,
    finished_at=None,
)


def changed(record: SearchDocument, **changes: Any) -> SearchDocument:
    return record.model_copy(update=changes)


def page_of(record: SearchDocument, problem: Problem | None = None, **shell: Any) -> str:
    values = search_values(record, problem or uniform(2, 4, limit=3), AT + timedelta(seconds=12.5))
    return render("search.html.j2", Shell(**shell), **values, row=record).decode()


def test_a_running_search_has_numbers_and_can_be_stopped() -> None:
    text = page_of(RECORD)
    for words in (
        "2 ranks × 4 microbatches",
        "1\u202f234",
        "2.88",
        "12.5 s",
        "started 2 times",
        "parameters",
    ):
        assert words in text, words
    assert "quick, at most 90 s, seed 7" in text
    assert "3, 0.75 × 1F1B" in text
    assert 'id="stop"' in text
    assert 'id="delete"' in text
    assert 'id="to-plan"' not in text
    data = re.search(r'id="search">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1])["seconds"] == 12.5


def test_actions_on_searches_need_the_scope_search() -> None:
    text = page_of(RECORD, may=frozenset({"read"}))
    assert 'id="stop"' not in text
    assert 'id="delete"' not in text
    assert 'id="stop"' in page_of(RECORD, may=frozenset({"admin"}))


def test_only_a_stored_plan_without_a_gap_is_called_optimal() -> None:
    done = changed(RECORD, state="done", plan_id="b" * 64, finished_at=AT)
    assert "Proved optimal" not in page_of(done)
    assert "above the optimum: the lower bound is" in page_of(done)
    assert "Proved optimal" in page_of(changed(done, gap=0.0))
    early = changed(RECORD, gap=0.0)
    assert "Proved optimal" not in page_of(early), "not before its plan is stored"


def test_nested_parameters_of_a_method_are_shown_whole() -> None:
    values = search_values(changed(RECORD, method="windows(greedy-v(a=1))"), uniform(2, 4))
    assert (values["method"], values["details"]) == ("windows", "greedy-v(a=1)")


def test_a_search_without_a_plan_shows_the_reason_and_the_next_step() -> None:
    nothing = changed(RECORD, objective=None, lower_bound=None, gap=None, method=None)
    assert "Stopped before a plan was found" in page_of(changed(nothing, state="cancelled"))
    error = {
        "title": "It <died>",
        "detail": "memory ran out",
        "type": "/errors/search-crashed",
        "status": 500,
    }
    failed = page_of(changed(nothing, state="failed", error=error), root="/zbv")
    for words in (
        "It &lt;died&gt;",
        "memory ran out",
        'href="/zbv/errors/search-crashed"',
        "/zbv/new?from=",
    ):
        assert words in failed, words
    assert 'id="course-panel"' not in failed


def test_neighbouring_ranks_with_the_same_shortage_share_a_row() -> None:
    problem = parse_problem({**problem_json(uniform(4, 4, limit=1)), "pp_degree": 4})
    limited = replace(problem, memory=replace(problem.memory, limit=(1.0, 1.0, 5.0, 1.5)))
    values = search_values(changed(RECORD, state="infeasible"), limited)
    assert values["shortages"] == [Shortage(0, 1, "1", "2"), Shortage(3, 3, "1.5", "2")]
    assert values["fraction"] == "0.25 ×"
    rounded = replace(problem, memory=replace(problem.memory, limit=(1.0, 2 - 1e-12, 5.0, 5.0)))
    values = search_values(changed(RECORD, state="infeasible"), rounded)
    assert values["shortages"] == [Shortage(0, 0, "1", "2")], "rounding alone is no shortage"
    assert "limit=smallest" in page_of(changed(RECORD, state="infeasible"), rounded)
    weightless = replace(
        problem,
        memory=replace(
            problem.memory,
            forward=(0.0,) * 8,
            backward_input=(0.0,) * 8,
            backward_weight=(0.0,) * 8,
            static=(2.0,) * 4,
        ),
    )
    assert search_values(changed(RECORD, state="infeasible"), weightless)["fraction"] == ""


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_every_preset_can_be_searched(preset: Any) -> None:
    found = check(Settings(), {"problem": preset.problem, "limit_fraction": preset.limit_fraction})
    assert found.issues == []
    if "layers" in preset.problem:
        assert found.layers is not None
    else:
        assert found.facts is not None
        assert found.facts.fits


def test_an_earlier_limit_becomes_a_fraction_if_it_is_round() -> None:
    static = parse_problem({**PROBLEM, "memory": {**PROBLEM["memory"], "static": [1, 3], "limit": None}})
    start = start_from(at_fraction(static, 0.7), {}, "")
    assert (start.limit_fraction, start.problem["memory"]["limit"]) == (0.7, None)
    uneven = replace(static, memory=replace(static.memory, limit=(5.0, 6.0)))
    start = start_from(uneven, {"effort": "quick"}, "")
    assert (start.limit_fraction, start.problem["memory"]["limit"]) == (None, [5, 6])
    start = start_from(uneven, {}, "", at_smallest_limit=True)
    assert (start.limit_fraction, start.problem["memory"]["limit"]) == (0.5, None)
    assert start_from(static, {}, "").limit_fraction is None


@pytest.mark.anyio
async def test_the_form_begins_with_the_search_plan_or_preset_in_its_address(serving: Serving) -> None:
    def start(text: str) -> dict[str, Any]:
        data = re.search(r'id="new-search">(.*?)</script>', text)
        assert data is not None
        found: dict[str, Any] = json.loads(data[1])["start"]
        return found

    async with serving("honest") as service:
        found = await service.ended((await service.submit()).json()["id"])
        for source, words in ((found["id"], "search"), (found["plan_id"], "plan")):
            answer = await service.http.get("/new", params={"from": source})
            assert start(answer.text)["note"] == f"This is the problem of {words} {source[:12]}."
            assert parse_problem(
                {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}}
            ) == parse_problem(start(answer.text)["problem"])
            assert start(answer.text)["limit_fraction"] == 2
        tight = await service.http.get("/new", params={"from": found["id"], "limit": "smallest"})
        assert start(tight.text)["limit_fraction"] == 0.5
        named = await service.http.get("/new", params={"preset": "gpt-6.2b"})
        assert start(named.text)["problem"]["pp_degree"] == 16
        for source in ("0" * 32, "0" * 64, "<script>", "\x00"):
            lost = await service.http.get("/new", params={"from": source})
            assert lost.status_code == 200
            assert "found no " in start(lost.text)["note"]
            assert "<script>&" not in lost.text
    async with serving("honest", max_effort="quick") as service:
        assert 'value="thorough"' not in (await service.http.get("/new")).text
