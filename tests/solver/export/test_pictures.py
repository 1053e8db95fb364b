"""Exports for people: SVG, raster, the standalone page and its numbers."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_solver.export import export, palette, quantities
from zbv_solver.export.per_rank import RankBars, idle_bars, idle_shares, memory_bars
from zbv_solver.export.report import MODULES, PlanView, gantt_canvas, plan_view, script_json
from zbv_solver.export.svg import MAX_BARS, WIDTH
from zbv_solver.export.timeline import (
    coverage,
    image,
    timeline,
    timeline_bytes,
    timeline_facts,
    timeline_text,
)
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

MEMORY = {"forward": 2, "backward_input": -1, "backward_weight": -1, "static": 1, "limit": 14}
COSTS = {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50}


def plan_of(p: int, m: int, **more: Any) -> Plan:
    document = {"pp_degree": p, "microbatches": m, "costs": COSTS, "memory": MEMORY, **more}
    return search(parse_problem(document), SearchOptions(effort="quick"))


def sequential_plan(p: int, m: int, **more: Any) -> Plan:
    """One microbatch after the other: poor, but made in no time at any size."""
    problem = parse_problem({"pp_degree": p, "microbatches": m, "costs": COSTS, **more})
    rank_of, stages = problem.placement.rank_of, range(problem.n_stages)
    ranks: list[list[Action]] = [[] for _ in range(p)]
    for j in range(m):
        for s in stages:
            ranks[rank_of[s]].append(Action(s, "F", j))
        for s in reversed(stages):
            ranks[rank_of[s]] += [Action(s, "I", j), Action(s, "W", j)]
    return make_plan(problem, Orders.from_actions(ranks), method="sequential", lower_bound=0.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(3, 5, units={"time": "us"})


# --- SVG


def svg_of(plan: Plan) -> ElementTree.Element:
    return ElementTree.fromstring(export(plan, "svg"))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def bars_by_fill(root: ElementTree.Element) -> Counter[str]:
    paths = root.iter("{http://www.w3.org/2000/svg}path")
    return Counter({str(p.get("fill")): str(p.get("d")).count("M") for p in paths if p.get("fill")})


def test_svg_draws_every_action_in_its_colour(plan: Plan) -> None:
    line = timeline(plan)
    expected = Counter(palette.KIND_FILLS[kind] for kind in line.kind.tolist())
    assert bars_by_fill(svg_of(plan)) == expected


def test_svg_names_ranks_and_the_plans_metrics(plan: Plan) -> None:
    found = texts(svg_of(plan))
    assert [text for text in found if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert found[0].startswith("3 ranks, 5 microbatches: span ")
    assert "time [µs]" in found
    assert "F forward" in found
    assert "B full backward" not in found or "B" in {a.letter for a in plan.orders.actions(0)}


def test_svg_numbers_bars_that_have_room() -> None:
    found = texts(svg_of(sequential_plan(1, 2)))
    assert Counter(text for text in found if text in "01") == {"0": 6 + 1, "1": 6}  # and 0 on the axis


def test_svg_stays_inside_its_frame(plan: Plan) -> None:
    text = export(plan, "svg")
    for left, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", text):
        assert 0 <= float(left) <= float(left) + float(width) <= WIDTH


def test_svg_has_no_script_and_brings_its_own_background(plan: Plan) -> None:
    root = svg_of(plan)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert "script" not in names
    background = next(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert (background.get("width"), background.get("fill")) == ("100%", "#ffffff")


def test_svg_of_a_large_plan_is_of_bounded_size() -> None:
    plan = sequential_plan(16, 700)
    assert len(plan.orders) > MAX_BARS
    text = export(plan, "svg")
    ElementTree.fromstring(text)
    assert len(text) < 2_000_000


def test_svg_escapes_text_from_users() -> None:
    root = svg_of(sequential_plan(1, 1, units={"time": "<b>&"}))
    assert "time [<b>&]" in texts(root)


def test_svg_of_a_plan_that_takes_no_time() -> None:
    costs = {"forward": 0, "backward_input": 0, "backward_weight": 0}
    ElementTree.fromstring(export(sequential_plan(2, 1, costs=costs), "svg"))


# --- raster


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50))
def test_the_columns_of_a_raster_add_up_to_the_busy_time(p: int, m: int, columns: int) -> None:
    line = timeline(sequential_plan(p, m))
    shares = coverage(line, columns)

    assert shares.shape == (p, columns, len(palette.KIND_FILLS))
    assert np.all(shares >= -1e-5)
    assert np.all(shares.sum(axis=2) <= 1 + 1e-5)
    width = line.makespan / columns
    for rank in range(p):
        part = line.slice_of(rank)
        for kind in range(len(palette.KIND_FILLS)):
            busy = (line.end - line.start)[part][line.kind[part] == kind].sum()
            assert shares[rank, :, kind].sum() * width == pytest.approx(busy, rel=1e-4, abs=1e-2)


def test_a_raster_column_inside_an_action_has_its_colour_and_idle_time_is_transparent() -> None:
    line = timeline(sequential_plan(2, 1))
    pixels = image(line, 200).view(np.uint8).reshape(2, 200, 4)
    assert tuple(pixels[0, 1]) == (*palette.rgb(palette.FILLS["F"][0]), 255)
    assert pixels[1, 1, 3] == 0  # rank 1 waits for the first activation


# --- actions for the script


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_facts_describe_the_packed_columns(plan: Plan, is_measured: bool) -> None:
    line = timeline(plan)
    facts = timeline_facts(line, plan.problem, is_measured=is_measured)
    packed, n = timeline_bytes(line, is_measured=is_measured), len(line)
    floats = 2 if is_measured else 1
    numbers = np.frombuffer(packed, "<f8", count=floats * n)
    rest = packed[8 * floats * n :]
    microbatches = np.frombuffer(rest, f"<u{facts['microbatch_bytes']}", count=n)
    letters, chunks = np.frombuffer(rest, "u1", count=2 * n, offset=facts["microbatch_bytes"] * n).reshape(
        2, n
    )

    assert facts["count"] == n == len(plan.orders)
    assert numbers[:n].tolist() == line.start.tolist()
    assert numbers[n:].tolist() == (line.end.tolist() if is_measured else [])
    assert len(rest) == n * (facts["microbatch_bytes"] + 2)
    texts = [
        f"{facts['stages'][rank][chunk]}{facts['letters'][letter]}{j}"
        for rank, chunk, letter, j in zip(
            line.rank.tolist(), chunks.tolist(), letters.tolist(), microbatches.tolist(), strict=True
        )
    ]
    assert texts == [text for texts in plan.orders.all_text() for text in texts]
    ends = [
        start + facts["durations"][letter][stage]
        for start, letter, stage in zip(line.start, letters, line.stage, strict=True)
    ]
    assert ends == line.end.tolist()
    assert json.loads(json.dumps(facts)) == facts
    assert b64decode(timeline_text(line, is_measured=is_measured)) == packed


def test_microbatches_beyond_16_bits_keep_their_number() -> None:
    plan = sequential_plan(1, 2)
    line = timeline(plan)
    for more, size in ((65_534, 2), (65_535, 4)):
        moved = replace(line, microbatch=line.microbatch + np.int32(more))
        assert timeline_facts(moved, plan.problem)["microbatch_bytes"] == size
        found = np.frombuffer(timeline_bytes(moved)[8 * len(line) :], f"<u{size}", count=len(line))
        assert found.tolist() == moved.microbatch.tolist()


# --- page


def test_the_page_shows_what_matters(plan: Plan) -> None:
    view = plan_view(plan)
    cards = {card.label: card for card in view.cards}
    assert cards["Span"].value == quantities.time(plan.metrics.span, plan.problem.units)
    assert cards["Makespan"].value == quantities.time(plan.metrics.makespan, plan.problem.units)
    assert cards["Bubble"].value == quantities.percent(plan.metrics.bubble_rate)
    assert cards["Peak memory"].value == quantities.figure(max(plan.metrics.peak_memory))
    assert [row.name for row in view.baselines] == ["this plan", *(b.name for b in plan.baselines)]
    assert [chip.text for chip in view.ranks[1].chips] == plan.orders.text(1)


def test_the_page_claims_optimality_only_when_it_is_proved() -> None:
    proved = plan_view(make_plan(*_problem_and_orders(sequential_plan(1, 1)), method="x"))
    not_proved = plan_view(sequential_plan(1, 1))
    notes = [next(c.note for c in view.cards if c.label.startswith("Gap")) for view in (proved, not_proved)]
    assert "proved optimal" in notes[0]
    assert "optimal" not in notes[1]


def test_a_tiny_gap_is_not_shown_as_zero() -> None:
    plan = sequential_plan(1, 1)
    for gap, told in ((2e-9, "< 0.01\u202f%"), (1e-4, "0.01\u202f%"), (0.25, "25.00\u202f%")):
        metrics = replace(plan.metrics, gap=gap, status="feasible")
        [card] = [c for c in plan_view(replace(plan, metrics=metrics)).cards if c.label.startswith("Gap")]
        assert (card.value, card.tone) == (told, "")


def test_memory_with_a_limit_of_zero_is_marked_as_bad() -> None:
    plan = sequential_plan(1, 1, memory={**MEMORY, "static": 0, "limit": None})
    for limit, note, tone in ((2.0, "200\u202f%", "bad"), (8.0, "50\u202f%", ""), (0.0, "∞", "bad")):
        problem = replace(plan.problem, memory=replace(plan.problem.memory, limit=(limit,)))
        [card] = [c for c in plan_view(replace(plan, problem=problem)).cards if c.label == "Peak memory"]
        assert (card.note, card.tone) == (f"{note} of the limit", tone)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"placement": "single"}, ""),
        ({"placement": "v"}, "dark: chunk 0, light: chunk 1"),
        ({"placement": "loop", "chunks": 3}, "dark: even chunks, light: odd ones"),
    ],
)
def test_the_legend_explains_dark_and_light(more: dict[str, Any], told: str) -> None:
    assert plan_view(sequential_plan(2, 1, **more)).shades == told


def test_without_memory_costs_ranks_show_no_peak() -> None:
    assert {rank.peak for rank in plan_view(sequential_plan(2, 1)).ranks} == {""}
    assert {rank.peak for rank in plan_view(sequential_plan(2, 1, memory=MEMORY)).ranks} == {"5"}


def _problem_and_orders(plan: Plan) -> tuple[Any, Orders]:
    return plan.problem, plan.orders


def pictures_of(view: PlanView) -> dict[str, RankBars]:
    return {picture.name: picture for picture in view.per_rank}


def test_memory_over_the_limit_is_marked() -> None:
    memory = pictures_of(plan_view(plan_of(2, 4)))["memory"]
    assert not any(bar.over for bar in memory.bars)
    assert [bar.limit is None for bar in memory.bars] == [False, False]
    assert memory.summary.endswith("Dashed: the limit. Darker: static memory.")
    # No such plan is made; a stored one of an older version must not be praised.
    unlimited = sequential_plan(2, 4, memory={**MEMORY, "static": 0, "limit": None})
    limited = replace(unlimited.problem, memory=replace(unlimited.problem.memory, limit=(3.0, 4.0)))
    assert [bar.over for bar in memory_bars(replace(unlimited, problem=limited)).bars] == [True, False]


def test_a_limit_far_above_the_bars_is_only_mentioned() -> None:
    memory = pictures_of(plan_view(plan_of(2, 4, memory={**MEMORY, "limit": 1000})))["memory"]
    assert [bar.limit for bar in memory.bars] == [None, None]
    assert "of 1\u202f000." in memory.summary
    assert "Dashed" not in memory.summary


def test_a_problem_without_memory_shows_none() -> None:
    assert set(pictures_of(plan_view(sequential_plan(2, 2)))) == {"idle"}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (3, 1), (4, 6)])
def test_the_bubble_rate_is_the_mean_of_the_ranks_idle_shares(p: int, m: int) -> None:
    plan = sequential_plan(p, m, costs={**COSTS, "forward": [900 + 50 * s for s in range(2 * p)]})
    shares, picture = idle_shares(plan), idle_bars(plan)
    assert np.mean(shares) == pytest.approx(plan.metrics.bubble_rate, abs=1e-12)
    assert quantities.percent(plan.metrics.bubble_rate) in picture.summary
    idlest = max(*shares, 0.01)
    assert [bar.height for bar in picture.bars] == pytest.approx([96 * x / idlest for x in shares], abs=0.01)


def test_rounding_errors_are_no_idle_time(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.export.per_rank.idle_shares", lambda plan: [2e-16, 0.0])
    assert [bar.height for bar in idle_bars(plan).bars] == [0, 0]


def test_a_plan_that_takes_no_time_has_no_idle_time() -> None:
    plan = sequential_plan(2, 1, costs={"forward": 0, "backward_input": 0, "backward_weight": 0})
    assert idle_shares(plan) == [0, 0]
    assert [bar.height for bar in pictures_of(plan_view(plan))["idle"].bars] == [0, 0]


def test_a_large_plan_lists_the_beginning_of_every_rank_and_draws_a_picture() -> None:
    view = plan_view(sequential_plan(2, 3000))
    assert not view.has_bars
    assert view.ranks[0].omitted == 6 * 3000 - len(view.ranks[0].text.split())
    assert view.ranks[0].text.startswith("0F0 3F0 3I0")


def test_the_table_shows_fit_and_relative_time() -> None:
    plan = plan_of(2, 6, memory={**MEMORY, "limit": 7})
    slowest = max(plan.metrics.span, *(b.span for b in plan.baselines))
    rows = {row.name: row for row in plan_view(plan).baselines}
    assert {name for name, row in rows.items() if not row.fits} == {
        b.name for b in plan.baselines if not b.fits
    }
    assert not all(row.fits for row in rows.values())
    spans = {"this plan": plan.metrics.span, **{b.name: b.span for b in plan.baselines}}
    assert {name: row.share for name, row in rows.items()} == {n: s / slowest for n, s in spans.items()}


def test_rows_are_high_enough_to_point_at_and_few_ranks_take_little_room() -> None:
    assert [gantt_canvas(ranks).rows for ranks in (1, 8, 64, 300)] == [34, 272, 640, 2100]


def test_a_canvas_has_the_idle_share_of_each_rank(plan: Plan) -> None:
    canvas = plan_view(plan).canvas
    assert canvas.idle.split(" ") == [quantities.percent(share, 1) for share in idle_shares(plan)]
    assert (canvas.axis, canvas.height) == ("time [µs]", canvas.top + canvas.rows + canvas.bottom)


def test_json_cannot_end_the_script_that_carries_it() -> None:
    assert json.loads(str(script_json({"a": "</script><!--&"}))) == {"a": "</script><!--&"}
    assert "<" not in str(script_json("</script>"))


def test_the_standalone_page_refers_to_nothing_outside(plan: Plan) -> None:
    text = export(plan, "html")
    head = text[: text.index("<script")]
    assert not re.findall(r'(?:src|href)="(?!#|data:)', head)
    assert "<script src" not in text
    assert plan.plan_id in text
    assert timeline_text(timeline(plan)) in text
    assert "<nav" not in text


def test_the_standalone_page_contains_every_module_without_imports(plan: Plan) -> None:
    script = export(plan, "html").rpartition('<script type="module">')[2].partition("</script>")[0]
    assert not re.findall(r"^(?:import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|function|class) (\w+)", script, re.MULTILINE)
    assert len(names) > len(MODULES)
    assert len(set(names)) == len(names), "modules share one scope: no name may be defined twice"


def test_the_standalone_page_escapes_text_from_users() -> None:
    assert "<b>evil" not in export(sequential_plan(1, 1, units={"time": "<b>evil"}), "html")


# --- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (-0.5, "−0.5"),
        (1234567, "1\u202f234\u202f567"),
        (0.012345, "0.01235"),
        (99.9999, "100"),
        (1e15, "1e+15"),
        (2.3454e-9, "2.345e−9"),
        (math.inf, "∞"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert quantities.figure(value) == text


def test_units() -> None:
    assert quantities.time(1500, Units("us")) == "1\u202f500 µs"
    assert quantities.time(3, Units()) == "3"
    assert quantities.memory(3 * 2**30, Units(memory="bytes")) == "3 GiB"
    assert quantities.memory(12, Units(memory="slots")) == "12 slots"
    assert quantities.memory_scale(3 * 2**30, Units(memory="bytes")) == (2**30, "GiB")
    assert quantities.memory_scale(3e9, Units(memory="slots")) == (1, "slots")
    assert quantities.percent(0.1234) == "12.34\u202f%"
    assert quantities.percent(-1e-9) == "0.00\u202f%"


def test_relative_figures_carry_their_sign() -> None:
    assert quantities.relative(110, 100) == "+10.0\u202f%"
    assert quantities.relative(90, 100) == "−10.0\u202f%"
    assert quantities.relative(100, 100) == "0.0\u202f%"
    assert quantities.relative(1, 0) == "∞"


@given(st.floats(1e-6, 1e12), st.integers(4, 20))
def test_ticks_are_even_and_few(length: float, at_most: int) -> None:
    found = quantities.ticks(0.0, length, at_most)
    assert found[0] == 0
    assert found[-1] <= length * (1 + 1e-9)
    assert 2 <= len(found) <= at_most + 1
    assert np.allclose([b - a for a, b in pairwise(found)], found[1])
