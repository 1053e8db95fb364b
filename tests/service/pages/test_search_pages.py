"""The form for a new search and the page of a search in every state, as text; also of layers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from support.fake_searches import plan_of
from support.layered import LAYERED, NAMES, RECOMPUTED, layered_problem
from support.problems import uniform
from support.serving import PROBLEM, Serving
from zbv_service.documents.problems import question_json
from zbv_service.pages.compare import compare_values
from zbv_service.pages.new_search import presets, start_from, start_from_layers
from zbv_service.pages.search import Shortage, course_chart, moments_of, search_values
from zbv_service.pages.shell import Shell, render
from zbv_service.pages.words import facts_of_layers, recomputed
from zbv_service.problems.check import check
from zbv_service.records.searches import OptionsDocument, SearchDocument, SearchEventDocument
from zbv_service.records.shared import ProblemSummary
from zbv_service.settings import Settings
from zbv_solver.export import export
from zbv_solver.export.report.sections import layers_view
from zbv_solver.frontiers.memory_fraction import at_fraction
from zbv_solver.plans.plan import Baseline, CutCertificate, Plan
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem, uncut
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.reading import parse_any_problem, parse_problem
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


def event(number: int, kind: str, **values: Any) -> SearchEventDocument:
    common = {"id": number, "at": AT, "event": kind, "search_id": "a" * 32}
    return SearchEventDocument.model_validate({**common, **values})


def known(
    number: int, seconds: float, best: float, bound: float, kind: str = "improvement"
) -> SearchEventDocument:
    gap = best / bound - 1
    values = {"objective": best, "lower_bound": bound, "gap": gap, "method": "greedy(1)", "seconds": seconds}
    return event(number, kind, **values)


EVENTS = (event(1, "state", state="running", attempts=1), known(2, 0.5, 1300, 1200), known(3, 2, 1234, 1200))
NOTHING: dict[str, Any] = {"objective": None, "lower_bound": None, "gap": None, "method": None}
DONE: dict[str, Any] = {"state": "done", "plan_id": "b" * 64, "finished_at": AT}


def values_of(problem: AnyProblem, **changes: Any) -> dict[str, Any]:
    record = RECORD.model_copy(update=changes)
    events = EVENTS if record.objective is not None else ()
    return search_values(record, problem, events, AT + timedelta(seconds=12.5)) | {"row": record}


def page_of(problem: AnyProblem | None = None, shell: Shell | None = None, **changes: Any) -> str:
    """The page of the running search above, with changes."""
    values = values_of(problem or uniform(2, 4, limit=3), **changes)
    return render("search.html.j2", shell or Shell(), **values).decode()


def test_a_running_search_has_numbers_and_can_be_stopped() -> None:
    text = page_of()
    for words in (
        *("2 ranks × 4 microbatches", "1\u202f234", "2.88", "12.5 s", "started 2 times", "parameters"),
        *("quick, at most 90 s, seed 7", "3, 0.75 × 1F1B", "All improvements"),
        "after 0.5 s: best 1\u202f300, lower bound 1\u202f200, gap 8.33\u202f%, greedy(1)",
    ):
        assert words in text, words
    assert "14\u202f% of the time limit" in page_of(attempts=1)
    assert "of the time limit" not in page_of(attempts=1, options=OptionsDocument())
    assert "of the time limit" not in page_of(**DONE)
    assert 'http-equiv="refresh"' in text
    for scope, may_stop in (("read", False), ("admin", True)):
        text = page_of(shell=Shell(may=frozenset({scope})))
        assert ("Stop and keep best plan" in text, "Delete this search" in text) == (may_stop, may_stop)


def test_the_chart_of_a_search_has_a_moment_per_better_plan_or_bound() -> None:
    units = Units(time="us")
    early = known(2, -1.0, 1300, 1200)  # found by an earlier search
    moments = moments_of(
        [event(1, "state", state="running"), early, known(3, 2.0, 1234, 1200), known(4, 3, 1234, 1200, "end")]
    )
    assert [(moment.seconds, moment.best) for moment in moments] == [(0.0, 1300), (2.0, 1234)]
    chart = course_chart(moments, 8.0, units)
    assert [(gap["x"], gap["width"]) for gap in chart["gaps"]] == [(0.0, 25.0), (25.0, 75.0)]
    (_, high, end, level), (_, _, _, low), (start, *_, last, _) = chart["best"]
    assert (high == level < low, end, start, last) == (True, 25.0, 25.0, 100.0)
    assert chart["above"] == ""
    far = course_chart(moments_of([known(1, 0, 9000, 1000), known(2, 1, 1010, 1000)]), 2.0, units)
    assert far["above"] == "↑ first plan: 9 ms"
    assert min(y for line in far["best"] for y in (line[1], line[3])) == 0.0, "it does not leave the chart"
    assert course_chart(moments_of([known(1, 0, 5, 5)]), 0.0, units)["gaps"][0]["height"] == 0.0


def test_a_long_search_shows_its_first_and_last_moment_and_some_between() -> None:
    events = [known(number, number / 10, 10_000 - number, 100) for number in range(1000)]
    moments = moments_of(events)
    assert 200 <= len(moments) <= 401
    assert (moments[0].best, moments[-1].best) == (10_000, 9001)
    assert all(one.seconds < other.seconds for one, other in pairwise(moments))


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        (DONE, ["above the optimum: the lower bound is"], ["Proved optimal"]),
        (DONE | {"gap": 0.0}, ["Proved optimal"], []),
        ({"gap": 0.0}, [], ["Proved optimal"]),  # not before its plan is stored
        (NOTHING | {"state": "cancelled"}, ["Stopped before a plan was found"], []),
        (
            NOTHING | {"state": "failed", "error": {"title": "It <died>", "detail": "memory ran out",
                                                    "type": "/errors/search-crashed", "status": 500}},
            ["It &lt;died&gt;", "memory ran out", 'href="/zbv/errors/search-crashed"', "/zbv/new?from="],
            ["All improvements"],
        ),
    ],
)  # fmt: skip
def test_the_page_says_how_it_ended(changes: dict[str, Any], present: list[str], absent: list[str]) -> None:
    text = page_of(shell=Shell(root="/zbv"), **changes)
    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_neighbouring_ranks_with_the_same_shortage_share_a_row() -> None:
    problem = parse_problem({**problem_json(uniform(4, 4, limit=1)), "pp_degree": 4})

    def at(*limit: float) -> dict[str, Any]:
        return values_of(replace(problem, memory=replace(problem.memory, limit=limit)), state="infeasible")

    assert at(1, 1, 5, 1.5)["shortages"] == [Shortage(0, 1, "1", "2"), Shortage(3, 3, "1.5", "2")]
    assert at(1, 1, 5, 1.5)["fraction"] == "0.25 ×"
    rounded = at(1, 2 - 1e-12, 5, 5)
    assert rounded["shortages"] == [Shortage(0, 0, "1", "2")], "rounding alone is no shortage"
    assert "limit=smallest" in render("search.html.j2", Shell(), **rounded).decode()
    zero = dict.fromkeys(("forward", "backward_input", "backward_weight"), (0.0,) * 8)
    weightless = replace(problem, memory=replace(problem.memory, **zero, static=(2.0,) * 4))
    assert values_of(weightless, state="infeasible")["fraction"] == ""


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_every_preset_can_be_searched(preset: Any) -> None:
    found = check(Settings(), {"problem": preset.problem, "limit_fraction": preset.limit_fraction})
    assert found.issues == []
    assert found.layers is not None if "layers" in preset.problem else found.facts and found.facts.fits


def test_an_earlier_limit_becomes_a_fraction_if_it_is_round() -> None:
    static = parse_problem({**PROBLEM, "memory": {**PROBLEM["memory"], "static": [1, 3], "limit": None}})
    uneven = replace(static, memory=replace(static.memory, limit=(5.0, 6.0)))
    for problem, at_smallest, expected in (
        (at_fraction(static, 0.7), False, (0.7, None)),
        (uneven, False, (None, [5, 6])),
        (uneven, True, (0.5, None)),
        (static, False, (None, None)),
    ):
        start = start_from(problem, {}, "", at_smallest_limit=at_smallest)
        assert (start.limit_fraction, start.problem["memory"].get("limit")) == expected


async def test_the_form_begins_with_the_search_plan_or_preset_in_its_address(serving: Serving) -> None:
    async with serving("honest") as service:

        async def start(**query: str) -> dict[str, Any]:
            text = (await service.http.get("/new", params=query)).text
            data: Any = re.search(r'id="new-search">(.*?)</script>', text)
            assert "<script>&" not in text
            found: dict[str, Any] = json.loads(data[1])["start"]
            return found

        found = await service.done(seed=3)
        free = parse_problem({**PROBLEM, "memory": {**PROBLEM["memory"], "limit": None}})
        for source, words in ((found["id"], "search"), (found["plan_id"], "plan")):
            begun = await start(**{"from": source})
            assert begun["note"] == f"This is the problem of {words} {source[:12]}."
            assert parse_problem(begun["problem"]) == free
            assert begun["limit_fraction"] == 2
        asked = await start(**{"from": (await service.done(LAYERED))["id"]})
        assert parse_any_problem(asked["problem"]) == parse_any_problem(LAYERED)
        again = await start(**{"from": found["id"], "limit": "smallest"})
        assert (again["limit_fraction"], again["options"]["seed"]) == (0.5, 3)
        assert (await start(preset="gpt-6.2b"))["problem"]["pp_degree"] == 16
        for source in ("0" * 32, "0" * 64, "<script>", "\x00"):
            assert "found no " in (await start(**{"from": source}))["note"]
    async with serving("honest", max_effort="quick") as service:
        assert 'value="thorough"' not in (await service.http.get("/new")).text


# --- layers

PARTITION = [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]]


def layered(**changes: Any) -> LayeredProblem:
    return layered_problem(RECOMPUTED, **changes)


def cut(**changes: Any) -> Problem:
    flags = [False, True, True, False]
    return parse_problem({**RECOMPUTED, "partition": PARTITION, "recompute": flags, **changes})


def planned(bound: float = 6.0) -> Plan:
    plan = plan_of(cut())
    return replace(
        plan,
        cut=CutCertificate("moved", bound, 8 / bound - 1),
        baselines=(
            Baseline("1f1b", 9.0, 9.0, 0.1, (1.0, 1.0), True),
            Baseline("even-cut", 12.0, 12.0, 0.2, (30.0, 2.0), False),
            Baseline("loop-3", 10.0, 10.0, 0.2, (3.0, 2.0), True),
        ),
    )


def test_a_plan_lists_the_layers_of_every_stage_and_the_bound_of_other_cuts() -> None:
    view: Any = layers_view(planned())
    assert view.summary == "8 layers in 4 stages, of which 2 are recomputed."
    assert "more than 25.00\u202f% better: none has a plan below 6 µs" in view.certificate
    first, second = view.ranks
    stages = [(each.stage, each.layers, each.is_recomputed) for each in (*first.stages, *second.stages)]
    names = ["embedding, block.0", "block.5, head", "block.1, block.2", "block.3, block.4"]
    assert [layers for _, layers, _ in stages] == names
    assert [recomputed for *_, recomputed in stages] == [False, False, True, True]
    # 31 and 95 on rank 0; four recomputed blocks of 39 each on rank 1.
    assert (first.work, second.work) == ("126", "156")
    assert (first.relative, second.relative) == ("−10.6\u202f%", "+10.6\u202f%")
    assert (first.share, second.share, view.mean) == pytest.approx((126 / 156, 1, 141 / 156))
    assert (first.parameters, second.static) == ("800 B", "21.8 MiB")
    best: Any = layers_view(planned(8.0))
    assert best.certificate.startswith("Proved: no plan of any other cut is better")
    text = export(planned(), "html")
    for words in ("Layers of every rank", "No other cut can be more than", "no plan of this cut is below"):
        assert words in text
        assert words not in export(plan_of(uniform(2, 4)), "html")
    values = compare_values(planned(), [], ((), ()), "")
    rows = [(row.name, row.fits, row.relative) for row in values["schedules"]]
    others = [("even-cut", False, "+50.0\u202f%"), ("loop-3", True, "+25.0\u202f%")]
    assert rows == [("this plan", True, ""), *others]


@pytest.mark.parametrize(
    ("step", "text"), [(1, "block.0 to block.3"), (2, "block.0, block.2, block.4, block.6")]
)
def test_consecutive_copies_are_a_range_even_as_separate_layers(step: int, text: str) -> None:
    names = ["embedding", *(f"block.{step * copy}" for copy in range(6)), "head"]
    each = [LAYERED["layers"][0], *[{**LAYERED["layers"][1], "repeat": None}] * 6, LAYERED["layers"][2]]
    layers = [{**layer, "name": name} for name, layer in zip(names, each, strict=True)]
    partition = [names[:5], names[5:6], names[6:7], names[7:]]
    question = parse_problem({**LAYERED, "layers": layers, "cut": {}, "partition": partition})
    view: Any = layers_view(plan_of(question))
    assert view.ranks[0].stages[0].layers == f"embedding, {text}"
    assert view.certificate == "", "a cut that was given proves nothing"


def test_the_page_of_a_search_has_its_layers_and_its_constraints() -> None:
    rules = {"together": [["embedding", "block.0"]], "first": 3, "last": 1, "allow_empty": True}
    asked = layered(placement="auto", cut=rules, memory={"limit": [24, 30]})
    facts = dict(facts_of_layers(asked))
    # One stage per rank would be two stages, which three and one layers do not fill.
    for name, value in (
        ("Layers", "8"),
        ("Placement", "the best of V, interleaved × 2, interleaved × 3, interleaved × 4"),
        ("Transfer", "latency 1 µs, bandwidth 100 B per µs"),
        ("Memory limit", "24 MiB to 30 MiB"),
        ("First stage", "3 transformer layers"),
        ("Last stage", "1 transformer layer"),
        ("In one stage", "embedding to block.0"),
        ("Empty stages", "allowed"),
    ):
        assert facts[name] == value
    assert recomputed(asked.model.layers[1], asked.units) == "holds 0.2 MiB, 10 µs longer"
    text = page_of(asked, **DONE | {"gap": 0.0, "summary": RECORD.summary.model_copy(update={"layers": 8})})
    head, body = text.split('<table class="layers">')[1].split("</thead>")
    assert (">B" in head, "Recomputed" in head) == (False, True)
    names = re.findall(r'<th scope="row">(.*?)</th>', body)
    assert names == ["embedding", 'block <span class="muted">× 6</span>', "head"]
    assert "divide 8 layers into stages" in text
    assert "no plan of this problem is shorter, with any division into stages" in text
    given = page_of(cut(), **DONE | {"gap": 0.0})
    assert ("block" in given, "any division into stages" in given) == (True, False)
    error = {"title": "x", "detail": "y", "type": "/errors/infeasible-memory", "smallest_limit": [25, 24]}
    none = NOTHING | {"state": "infeasible", "error": error}
    limited = layered()
    assert values_of(limited, **none)["shortages"] == [Shortage(0, 0, "24 MiB", "25 MiB")]
    assert "what the closest cut would need" in page_of(limited, **none)


def test_the_form_begins_with_the_layers_of_a_search_or_plan() -> None:
    asked = layered(memory={"limit": 24, "static": [1, 2]})
    start = start_from_layers(asked, {"effort": "quick"}, "note")
    assert parse_any_problem(start.problem) == asked
    assert (start.problem["memory"], start.limit_fraction) == ({"static": [1, 2], "limit": 24}, None)
    assert start_from_layers(asked, {}, "", limit=[25, 26]).problem["memory"]["limit"] == [25, 26]
    # The problem of a plan has a cut; the search asked for its layers.
    again = start_from(cut(), {}, "From a plan.")
    assert again.problem == start_from_layers(layered(), {}, "").problem
    assert again.note == "From a plan. The planner chooses its stages again."
    with pytest.raises(ValueError, match="without layers"):
        uncut(uniform(2, 4))
    measured = cut(costs={"p2p": [1, 2, 6]})
    assert question_json(uncut(measured))["costs"] == {"p2p": 3}, "the mean of those measured for a cut"
