"""Layers on pages, as text: the problem, the cut of a plan, and the form for a new search."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from support.fake_searches import plan_of
from support.layered import LAYERED, NAMES, RECOMPUTED
from support.problems import uniform
from zbv_service.documents.problems import question_json
from zbv_service.pages.compare import compare_values
from zbv_service.pages.new_search import start_from, start_from_layers
from zbv_service.pages.search import Shortage, search_values
from zbv_service.pages.shell import Shell, render
from zbv_service.pages.words import facts_of_layers, recomputed
from zbv_service.records.searches import SearchDocument
from zbv_service.records.shared import OptionsDocument, ProblemSummary
from zbv_solver.export import export
from zbv_solver.export.report import plan_view
from zbv_solver.export.report.sections import layers_view
from zbv_solver.plans.plan import Baseline, CutCertificate, Plan
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem

AT = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
PARTITION = [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]]


def layered(**changes: Any) -> LayeredProblem:
    question = parse_any_problem({**RECOMPUTED, **changes})
    assert isinstance(question, LayeredProblem)
    return question


def cut(**changes: Any) -> Problem:
    flags = [False, True, True, False]
    question = parse_any_problem({**RECOMPUTED, "partition": PARTITION, "recompute": flags, **changes})
    assert isinstance(question, Problem)
    return question


def planned(problem: Problem | None = None) -> Plan:
    plan = plan_of(problem or cut())
    return replace(
        plan,
        cut=CutCertificate("moved", 6.0, 8 / 6 - 1),
        baselines=(
            Baseline("1f1b", 9.0, 9.0, 0.1, (1.0, 1.0), True),
            Baseline("even-cut", 12.0, 12.0, 0.2, (30.0, 2.0), False),
            Baseline("loop-3", 10.0, 10.0, 0.2, (3.0, 2.0), True),
        ),
    )


def record(**changes: Any) -> SearchDocument:
    known = SearchDocument(
        id="a" * 32,
        state="done",
        summary=ProblemSummary(
            pp_degree=2, microbatches=4, placement="v", objective="span", time_unit="us", layers=8
        ),
        options=OptionsDocument(effort="quick"),
        objective=8.0,
        lower_bound=8.0,
        gap=0.0,
        method="moved",
        plan_id="b" * 64,
        error=None,
        cancel_requested=False,
        attempts=1,
        crashes=0,
        created_at=AT,
        started_at=AT,
        updated_at=AT,
        finished_at=AT,
    )
    return known.model_copy(update=changes)


def page_of(found: SearchDocument, question: Problem | LayeredProblem) -> str:
    values = search_values(found, question, AT)
    return render("search.html.j2", Shell(), row=found, **values).decode()


def test_a_plan_lists_the_layers_of_every_stage_and_the_bound_of_other_cuts() -> None:
    view = layers_view(planned())
    assert view is not None
    assert view.summary == "8 layers in 4 stages, of which 2 are recomputed."
    assert "more than 25.00\u202f% better: none has a plan below 6 µs" in view.certificate
    first, second = view.ranks
    assert [(each.stage, each.layers) for each in first.stages] == [
        (0, "embedding, block.0"),
        (3, "block.5, head"),
    ]
    assert [each.layers for each in second.stages] == ["block.1, block.2", "block.3, block.4"]
    assert [each.is_recomputed for each in (*first.stages, *second.stages)] == [False, False, True, True]
    # 31 and 95 on rank 0; four recomputed blocks of 39 each on rank 1.
    assert (first.work, second.work) == ("126", "156")
    assert (first.relative, second.relative) == ("−10.6\u202f%", "+10.6\u202f%")
    assert (first.share, second.share, view.mean) == pytest.approx((126 / 156, 1, 141 / 156))
    assert (first.parameters, second.static) == ("800 B", "21.8 MiB")


def test_consecutive_copies_are_a_range_even_as_separate_layers() -> None:
    wide = [NAMES[:5], NAMES[5:6], NAMES[6:7], NAMES[7:]]
    apart = [
        {**LAYERED["layers"][1], "name": name, "repeat": None} if name.startswith("block") else layer
        for name, layer in zip(NAMES, [LAYERED["layers"][0], *[None] * 6, LAYERED["layers"][2]], strict=True)
    ]
    for layers in (LAYERED["layers"], apart):
        question = parse_any_problem({**LAYERED, "layers": layers, "partition": wide})
        assert isinstance(question, Problem)
        view = layers_view(plan_of(question))
        assert view is not None
        assert view.ranks[0].stages[0].layers == "embedding, block.0 to block.3"
        assert view.certificate == "", "a cut that was given proves nothing"


def test_layers_with_gaps_in_their_numbers_are_no_range() -> None:
    names = ["embedding", *(f"block.{2 * copy}" for copy in range(6)), "head"]
    each = [LAYERED["layers"][0], *[{**LAYERED["layers"][1], "repeat": None}] * 6, LAYERED["layers"][2]]
    layers = [{**layer, "name": name} for name, layer in zip(names, each, strict=True)]
    question = parse_any_problem(
        {**LAYERED, "layers": layers, "cut": {}, "partition": [names[:5], names[5:6], names[6:7], names[7:]]}
    )
    assert isinstance(question, Problem)
    view = layers_view(plan_of(question))
    assert view is not None
    assert view.ranks[0].stages[0].layers == "embedding, block.0, block.2, block.4, block.6"


def test_a_plan_that_meets_the_bound_of_every_cut_is_called_best() -> None:
    view = layers_view(replace(planned(), cut=CutCertificate("moved", 8.0, 0.0)))
    assert view is not None
    assert view.certificate.startswith("Proved: no plan of any other cut is better")


def test_the_page_of_a_plan_has_layers_only_where_there_are_any() -> None:
    assert plan_view(plan_of(uniform(2, 4))).layers is None
    text = export(planned(), "html")
    assert "Layers of every rank" in text
    assert "embedding, block.0" in text
    assert "No other cut can be more than" in text
    assert "no plan of this cut is below" in text
    assert "no plan of this cut" not in export(plan_of(uniform(2, 4)), "html")
    odd = export(planned(cut_named("<script>x</script>")), "html")
    assert "<script>x" not in odd.split("Layers of every")[1]


def cut_named(name: str) -> Problem:
    layers = [{**LAYERED["layers"][0], "name": name}, *LAYERED["layers"][1:]]
    changes: dict[str, Any] = {"layers": layers, "cut": {}, "recompute": None, "memory": {}}
    return cut(**changes, partition=[[name, "block.0"], *PARTITION[1:]])


def test_other_cuts_and_placements_are_rows_of_a_comparison_and_not_schedules() -> None:
    values = compare_values(planned(), [], ((), ()), "")
    assert [row.name for row in values["schedules"]] == ["this plan", "even-cut", "loop-3"]
    assert [row.fits for row in values["schedules"]] == [True, False, True]
    assert [row.relative for row in values["schedules"]] == ["", "+50.0\u202f%", "+25.0\u202f%"]
    assert [row.share for row in values["schedules"]] == pytest.approx([8 / 12, 1, 10 / 12])
    assert values["has_cuts"]
    assert not compare_values(plan_of(uniform(2, 4)), [], ((), ()), "")["has_cuts"]


def test_the_page_of_a_search_has_its_layers_and_its_constraints() -> None:
    rules = {"together": [["embedding", "block.0"]], "first": 3, "last": 1, "allow_empty": True}
    asked = layered(placement="auto", cut=rules, memory={"limit": [24, 30]})
    facts = dict(facts_of_layers(asked))
    assert facts["Layers"] == "8"
    # One stage per rank would be two stages, which three and one layers do not fill.
    assert facts["Placement"] == "the best of V, interleaved × 2, interleaved × 3, interleaved × 4"
    assert facts["Transfer"] == "latency 1 µs, bandwidth 100 B per µs"
    assert facts["Memory limit"] == "24 MiB to 30 MiB"
    assert (facts["First stage"], facts["Last stage"]) == ("3 transformer layers", "1 transformer layer")
    assert (facts["In one stage"], facts["Empty stages"]) == ("embedding to block.0", "allowed")
    assert recomputed(asked.model.layers[1], asked.units) == "holds 0.2 MiB, 10 µs longer"
    slower = {**RECOMPUTED["layers"][1]["recompute"], "forward": 12}
    layers = [RECOMPUTED["layers"][0], {**RECOMPUTED["layers"][1], "recompute": slower}]
    assert recomputed(layered(layers=layers).model.layers[1], asked.units).endswith("12 µs longer")
    text = page_of(record(), asked)
    head, body = text.split('<table class="layers">')[1].split("</thead>")
    assert ">B" not in head
    assert "Recomputed" in head
    names = re.findall(r'<th scope="row">(.*?)</th>', body)
    assert names == ["embedding", 'block <span class="muted">× 6</span>', "head"]
    assert "<details>" not in text
    assert "divide 8 layers into stages" in text
    assert "no plan of this problem is shorter, with any division into stages" in text
    # Of a cut that is given the layers are there, and nothing is said of others.
    assert "block" in page_of(record(), cut())
    assert "wherever it is cut" not in page_of(record(), cut())


def test_an_infeasible_limit_shows_the_need_of_the_closest_cut() -> None:
    error = {"title": "x", "detail": "y", "type": "/errors/infeasible-memory", "smallest_limit": [25, 24]}
    found = record(state="infeasible", plan_id=None, objective=None, error=error)
    values = search_values(found, layered(), AT)
    assert values["shortages"] == [Shortage(0, 0, "24 MiB", "25 MiB")]
    assert "what the closest cut would need" in page_of(found, layered())


def test_the_form_begins_with_the_layers_of_a_search_or_plan() -> None:
    asked = layered(memory={"limit": 24, "static": [1, 2]})
    start = start_from_layers(asked, {"effort": "quick"}, "note")
    assert parse_any_problem(start.problem) == asked
    assert (start.problem["memory"], start.limit_fraction) == ({"static": [1, 2], "limit": 24}, None)
    smallest = start_from_layers(asked, {}, "", limit=[25, 26])
    assert smallest.problem["memory"]["limit"] == [25, 26]
    # The problem of a plan has a cut; the search asked for its layers.
    again = start_from(cut(), {}, "From a plan.")
    assert again.problem == {**start_from_layers(layered(), {}, "").problem}
    assert again.note == "From a plan. The planner chooses its stages again."
    with pytest.raises(ValueError, match="without layers"):
        uncut(uniform(2, 4))


def test_transfers_measured_for_a_cut_are_their_mean_in_the_form() -> None:
    measured = cut(costs={"p2p": [1, 2, 6]})
    assert measured.model is not None
    assert measured.model.link is None
    assert uncut(measured).p2p == 3.0
    assert question_json(uncut(measured))["costs"] == {"p2p": 3}
