"""A plan's page: its numbers and words, and the file that opens from disk."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_plans import COSTS, MEMORY, one_by_one, plan_of
from zbv_solver.export import export, quantities
from zbv_solver.export.report import MODULES, gantt_canvas, plan_view, script_json
from zbv_solver.export.report.figures import Card, RankBars, idle_bars, memory_bars
from zbv_solver.export.timeline import idle_shares, timeline, timeline_text
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Units
from zbv_solver.search.assemble import make_plan

PERCENT = "\u202f%"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(3, 5, units={"time": "us"})


def card(plan: Plan, label: str) -> Card:
    return next(each for each in plan_view(plan).cards if each.label.startswith(label))


def bars(plan: Plan) -> dict[str, RankBars]:
    return {each.name: each for each in plan_view(plan).per_rank}


def test_the_page_shows_what_matters(plan: Plan) -> None:
    view, metrics, units = plan_view(plan), plan.metrics, plan.problem.units
    assert {each.label: each.value for each in view.cards} | {"Gap to the bound": ""} == {
        "Span": quantities.time(metrics.span, units),
        "Makespan": quantities.time(metrics.makespan, units),
        "Bubble": quantities.percent(metrics.bubble_rate),
        "Gap to the bound": "",
        "Peak memory": quantities.figure(max(metrics.peak_memory)),
    }
    assert [row.name for row in view.baselines] == ["this plan", *(each.name for each in plan.baselines)]
    assert [chip.text for chip in view.ranks[1].chips] == plan.orders.text(1)
    assert view.canvas.idle.split(" ") == [quantities.percent(share, 1) for share in idle_shares(plan)]
    assert view.canvas.axis == "time [µs]"


def test_optimality_is_claimed_only_if_it_is_proved_and_a_tiny_gap_is_not_zero() -> None:
    plan = one_by_one(1, 1)
    proved = card(make_plan(plan.problem, plan.orders, method="x"), "Gap")
    assert ("proved optimal" in proved.note, proved.value, proved.tone) == (True, "0", "good")
    for gap, shown in ((2e-9, f"< 0.01{PERCENT}"), (1e-4, f"0.01{PERCENT}"), (0.25, f"25.00{PERCENT}")):
        found = card(replace(plan, metrics=replace(plan.metrics, gap=gap, status="feasible")), "Gap")
        assert (found.value, found.tone, "optimal" in found.note) == (shown, "", False)


def test_memory_over_the_limit_is_marked() -> None:
    """No such plan is made; a stored one of an older version must not be praised."""
    plan = one_by_one(1, 1, memory={**MEMORY, "static": 0, "limit": None})
    for limit, note, tone in ((2.0, f"200{PERCENT}", "bad"), (8.0, f"50{PERCENT}", ""), (0.0, "∞", "bad")):
        problem = replace(plan.problem, memory=replace(plan.problem.memory, limit=(limit,)))
        found = card(replace(plan, problem=problem), "Peak memory")
        assert (found.note, found.tone) == (f"{note} of the limit", tone)
        assert [bar.over for bar in memory_bars(replace(plan, problem=problem)).bars] == [tone == "bad"]


def test_a_limit_is_drawn_unless_it_is_far_above_the_bars() -> None:
    near, far = (bars(plan_of(2, 4, memory={**MEMORY, "limit": limit}))["memory"] for limit in (14, 1000))
    assert [bar.limit is None for bar in near.bars] == [False, False]
    assert near.summary.endswith("Dashed: the limit. Darker: static memory.")
    assert [bar.limit for bar in far.bars] == [None, None]
    assert "of 1\u202f000." in far.summary
    assert "Dashed" not in far.summary


def test_a_problem_without_memory_shows_none() -> None:
    without, with_memory = one_by_one(2, 1), one_by_one(2, 1, memory=MEMORY)
    assert {*bars(without)} == {"idle"}
    assert {rank.peak for rank in plan_view(without).ranks} == {""}
    assert {rank.peak for rank in plan_view(with_memory).ranks} == {"5"}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 1), (4, 6)])
def test_the_bubble_rate_is_the_mean_of_the_ranks_idle_shares(p: int, m: int) -> None:
    plan = one_by_one(p, m, costs={**COSTS, "forward": [900 + 50 * s for s in range(2 * p)]})
    shares, picture = idle_shares(plan), idle_bars(plan)
    assert np.mean(shares) == pytest.approx(plan.metrics.bubble_rate, abs=1e-12)
    assert quantities.percent(plan.metrics.bubble_rate) in picture.summary
    heights = np.array([bar.height for bar in picture.bars])
    assert heights / max(*heights, 1e-9) == pytest.approx(np.array(shares) / max(*shares, 1e-9), abs=1e-3)


def test_neither_rounding_nor_a_plan_that_takes_no_time_is_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = one_by_one(2, 1, costs={"forward": 0, "backward_input": 0, "backward_weight": 0})
    assert idle_shares(nothing) == [0, 0]
    assert [bar.height for bar in bars(nothing)["idle"].bars] == [0, 0]
    monkeypatch.setattr("zbv_solver.export.report.figures.idle_shares", lambda plan: [2e-16, 0.0])
    assert [bar.height for bar in idle_bars(nothing).bars] == [0, 0]


def test_a_large_plan_lists_the_beginning_of_every_rank_and_draws_a_picture() -> None:
    view = plan_view(one_by_one(2, 3000))
    assert not view.has_bars
    assert view.ranks[0].omitted == 6 * 3000 - len(view.ranks[0].text.split())
    assert view.ranks[0].text.startswith("0F0 3F0 3I0")


def test_the_table_shows_fit_and_relative_time() -> None:
    plan = plan_of(2, 6, memory={**MEMORY, "limit": 7})
    spans = {"this plan": plan.metrics.span, **{each.name: each.span for each in plan.baselines}}
    rows = {row.name: row for row in plan_view(plan).baselines}
    fits = {name for name, row in rows.items() if row.fits}
    assert fits == {"this plan"} | {each.name for each in plan.baselines if each.fits} != {*rows}
    slowest = max(spans.values())
    assert {name: row.share for name, row in rows.items()} == {n: s / slowest for n, s in spans.items()}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"placement": "single"}, ""),
        ({"placement": "v"}, "dark: chunk 0, light: chunk 1"),
        ({"placement": "loop", "chunks": 3}, "dark: even chunks, light: odd ones"),
    ],
)
def test_the_legend_explains_dark_and_light(more: dict[str, Any], shown: str) -> None:
    assert plan_view(one_by_one(2, 1, **more)).shades == shown


def test_few_ranks_take_little_room_and_many_stay_high_enough_to_point_at() -> None:
    heights = [gantt_canvas(ranks).rows / ranks for ranks in (1, 8, 64, 300)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == heights[1] > heights[2] > heights[3] >= 7


def test_json_cannot_end_the_script_that_carries_it() -> None:
    assert json.loads(str(script_json({"a": "</script><!--&"}))) == {"a": "</script><!--&"}
    assert "<" not in str(script_json("</script>"))


def test_the_file_refers_to_nothing_outside_and_contains_everything(plan: Plan) -> None:
    text = export(plan, "html")
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text[: text.index("<script")])
    assert not any(word in text for word in ("<script src", "<nav"))
    assert plan.plan_id in text
    assert timeline_text(timeline(plan)) in text
    script = text.rpartition('<script type="module">')[2].partition("</script>")[0]
    assert not re.findall(r"^(?:import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|function|class) (\w+)", script, re.MULTILINE)
    assert len(names) > len(MODULES)
    assert len(set(names)) == len(names), "modules share one scope: no name may be defined twice"
    assert "<b>evil" not in export(one_by_one(1, 1, units={"time": "<b>evil"}), "html")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (quantities.figure(0), "0"),
        (quantities.figure(7), "7"),
        (quantities.figure(-0.5), "−0.5"),
        (quantities.figure(1234567), "1\u202f234\u202f567"),
        (quantities.figure(0.012345), "0.01235"),
        (quantities.figure(99.9999), "100"),
        (quantities.figure(1e15), "1e+15"),
        (quantities.figure(2.3454e-9), "2.345e−9"),
        (quantities.figure(math.inf), "∞"),
        (quantities.time(1500, Units("us")), "1\u202f500 µs"),
        (quantities.time(3, Units()), "3"),
        (quantities.memory(3 * 2**30, Units(memory="bytes")), "3 GiB"),
        (quantities.memory(12, Units(memory="slots")), "12 slots"),
        (quantities.memory(3e9, Units(memory="slots")), "3\u202f000\u202f000\u202f000 slots"),
        (quantities.percent(0.1234), f"12.34{PERCENT}"),
        (quantities.percent(-1e-9), f"0.00{PERCENT}"),
        (quantities.relative(110, 100), f"+10.0{PERCENT}"),
        (quantities.relative(90, 100), f"−10.0{PERCENT}"),
        (quantities.relative(100, 100), f"0.0{PERCENT}"),
        (quantities.relative(1, 0), "∞"),
    ],
)
def test_numbers_are_readable(written: str, text: str) -> None:
    assert written == text


@given(st.floats(1e-6, 1e12), st.integers(4, 20))
def test_ticks_are_even_and_few(length: float, at_most: int) -> None:
    found = quantities.ticks(0.0, length, at_most)
    assert found[0] == 0
    assert found[-1] <= length * (1 + 1e-9)
    assert 2 <= len(found) <= at_most + 1
    assert np.allclose([b - a for a, b in pairwise(found)], found[1])
