"""Pictures and the page of a plan: SVG, raster, data of the script, colours, numbers and words."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contrast import contrast
from support.drawn_plans import COSTS, MEMORY, one_by_one, plan_of
from zbv_solver.export import FORMATS, export, palette, quantities
from zbv_solver.export import timeline as times
from zbv_solver.export.html import plan_html
from zbv_solver.export.report import MODULES, gantt_canvas, plan_view, script_json
from zbv_solver.export.report.figures import cost_facts, cost_values, idle_bars
from zbv_solver.export.report.sections import FEWEST_SCENARIOS, MOST_MICROBATCHES
from zbv_solver.export.svg import MAX_BARS, WIDTH
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Units

SVG = "{http://www.w3.org/2000/svg}"
PERCENT = "\u202f%"
NO_TIME = {"forward": 0, "backward_input": 0, "backward_weight": 0}
LENGTHS = [4, 1, 3, 2]
DIFFERING: dict[str, Any] = {
    "placement": "single",
    "features": {"tokens": LENGTHS},
    "costs": {"forward": {"fixed": 1, "tokens": 2}, "backward_input": {"tokens": 2}}
    | {"backward_weight": {"tokens": 1}, "p2p": {"tokens": 1}},
    "memory": {"forward": {"tokens": 1}, "backward_input": 0, "backward_weight": {"tokens": -1}},
    "units": {"time": "us"},
}


@pytest.fixture(scope="module", autouse=True)
def _few_scenarios() -> Iterator[None]:
    """Every page simulates its plan and all classical schedules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbv_solver.search.jitter.SCENARIOS", FEWEST_SCENARIOS)
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(3, 5, units={"time": "us"})


@pytest.fixture(scope="module")
def differing() -> Plan:
    return one_by_one(2, 4, **DIFFERING)


def texts(plan: Plan) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(export(plan, "svg")).iter(f"{SVG}text")]


def test_an_svg_draws_every_action_in_its_colour_inside_its_frame_and_names_what_it_shows(plan: Plan) -> None:
    root = ElementTree.fromstring(export(plan, "svg"))
    drawn = [(str(p.get("fill")), str(p.get("d"))) for p in root.iter(f"{SVG}path") if p.get("fill")]
    count = Counter({fill: outline.count("M") for fill, outline in drawn})
    assert count == Counter(palette.KIND_FILLS[kind] for kind in times.timeline(plan).kind.tolist())
    for left, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", "".join(outline for _, outline in drawn)):
        assert 0 <= float(left) <= float(left) + float(width) <= WIDTH
    background = next(root.iter(f"{SVG}rect"))
    assert (background.get("width"), background.get("fill")) == ("100%", palette.BACKGROUND)
    assert f"{SVG}script" not in {element.tag for element in root.iter()}
    found = texts(plan)
    assert [text for text in found if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert found[0].startswith("3 ranks, 5 microbatches: span ")
    assert {"time [µs]", "F forward"} <= {*found}
    assert "time [<b>&]" in texts(one_by_one(1, 1, units={"time": "<b>&"})), "text of users is escaped"
    numbers = Counter(text for text in texts(one_by_one(1, 2)) if text in "01")
    assert numbers == {"0": 6 + 1, "1": 6}  # on bars that have room, and 0 on the axis


def test_svgs_of_large_plans_and_of_plans_that_take_no_time_are_small() -> None:
    for large in (one_by_one(16, 700), one_by_one(2, 1, costs=NO_TIME)):
        assert len(large.orders) > MAX_BARS or large.metrics.span == 0
        assert texts(large).count("0") == 1, "on the axis; no bar has room for its number"
        assert len(export(large, "svg")) < 2_000_000


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50))
def test_the_columns_of_a_raster_add_up_to_the_busy_time_in_its_colours(p: int, m: int, columns: int) -> None:
    line = times.timeline(one_by_one(p, m))
    shares = times.coverage(line, columns)
    busy = shares.sum(axis=2)
    assert (shares.min() >= -1e-5, busy.max() <= 1 + 1e-5) == (True, True)
    for rank in range(p):
        part = line.slice_of(rank)
        length = np.bincount(line.kind[part], (line.end - line.start)[part], len(palette.KIND_FILLS))
        assert shares[rank].sum(axis=0) * line.makespan / columns == pytest.approx(length, rel=1e-4, abs=1e-2)
    pixels = times.image(line, columns).view(np.uint8).reshape(p, columns, 4)
    fills = np.array([palette.rgb(fill) for fill in palette.KIND_FILLS])
    assert (pixels[busy < 1e-6][:, 3] == 0).all(), "idle time is transparent"
    within = shares.max(axis=2) > 1 - 1e-6
    assert np.array_equal(pixels[within][:, :3], fills[shares.argmax(axis=2)[within]])
    assert (pixels[within][:, 3] == 255).all()


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(("name", "beyond"), [("plan", 0), ("differing", 0), ("plan", 2**16)])
def test_the_facts_describe_the_columns(name: str, beyond: int, is_measured: bool, request: Any) -> None:
    """Also of microbatches whose numbers are beyond 16 bits."""
    plan: Plan = request.getfixturevalue(name)
    line = times.timeline(plan)
    line = replace(line, microbatch=line.microbatch + np.int32(max(0, beyond - line.microbatch.max())))
    facts = times.timeline_facts(line, plan.problem, is_measured=is_measured)
    packed, n = times.timeline_bytes(line, is_measured=is_measured), len(plan.orders)
    floats, size = 2 if is_measured else 1, facts["microbatch_bytes"]
    numbers, rest = np.frombuffer(packed, "<f8", count=floats * n), packed[8 * floats * n :]
    microbatches = np.frombuffer(rest, f"<u{size}", count=n)
    letters, chunks = np.frombuffer(rest, "u1", count=2 * n, offset=size * n).reshape(2, n)
    assert (facts["count"], len(rest), size) == (n, n * (size + 2), 4 if beyond else 2)
    assert numbers.tolist() == [*line.start, *(line.end if is_measured else [])]
    columns = (line.rank.tolist(), chunks.tolist(), letters.tolist(), microbatches.tolist())
    assert [
        f"{facts['stages'][rank][chunk]}{facts['letters'][letter]}{j}"
        for rank, chunk, letter, j in zip(*columns, strict=True)
    ] == [line.text(index) for index in range(n)]
    kind = () if facts["kind_of"] is None else (np.array(facts["kind_of"])[microbatches],)
    lengths = np.array(facts["durations"])[letters, line.stage, *kind]
    assert (line.start + lengths).tolist() == line.end.tolist()
    assert b64decode(times.timeline_text(line, is_measured=is_measured)) == packed
    assert json.loads(json.dumps(facts)) == json.loads(str(script_json(facts)))


# Colour vision: Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB; and OKLab.
VISION = {
    "normal": "1 0 0; 0 1 0; 0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868; 0.114503 0.786281 0.099216; -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968; 0.280085 0.672501 0.047413; -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779; -0.078411 0.930809 0.147602; 0.004733 0.691367 0.303900",
}
TO_LMS = "0.412221 0.536333 0.051446; 0.211903 0.680700 0.107397; 0.088302 0.281719 0.629979"
TO_LAB = "0.210454 0.793618 -0.004072; 1.977998 -2.428592 0.450594; 0.025904 0.782772 -0.808676"


@pytest.mark.parametrize("vision", VISION)
def test_any_two_fills_differ(vision: str) -> None:
    """By 0.07 in OKLab, where about 0.02 is just noticeable side by side."""
    channel = np.array([palette.rgb(fill) for fill in palette.KIND_FILLS]) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    seen, to_lms, to_lab = (
        np.array([row.split() for row in text.split(";")], float) for text in (VISION[vision], TO_LMS, TO_LAB)
    )
    lab = to_lab @ np.cbrt(to_lms @ np.clip(seen @ linear.T, 0, 1))
    assert min(np.linalg.norm(one - other) for one, other in combinations(lab.T, 2)) >= 0.07


def test_text_and_fills_are_readable() -> None:
    assert min(contrast(text, palette.BACKGROUND) for text in (palette.TEXT, palette.MUTED)) >= 4.5
    assert min(map(contrast, palette.KIND_FILLS, palette.KIND_INKS)) >= 4.5
    # 3:1 of WCAG 1.4.11, less 8-bit rounding
    assert min(contrast(fill, palette.BACKGROUND) for fill in palette.KIND_FILLS) >= 2.98


def test_the_page_shows_what_matters(plan: Plan) -> None:
    view, metrics, units = plan_view(plan), plan.metrics, plan.problem.units
    assert {each.label: each.value for each in view.cards if each.label != "Gap to the bound"} == {
        "Span": quantities.time(metrics.span, units),
        "Makespan": quantities.time(metrics.makespan, units),
        "Bubble": quantities.percent(metrics.bubble_rate),
        "Peak memory": quantities.figure(max(metrics.peak_memory)),
    }
    assert [row.name for row in view.baselines] == ["this plan", *(each.name for each in plan.baselines)]
    spans = [metrics.span, *(each.span for each in plan.baselines)]
    assert [row.share for row in view.baselines] == [span / max(spans) for span in spans]
    assert [row.fits for row in view.baselines] == [True, *(each.fits for each in plan.baselines)]
    assert [chip.text for chip in view.ranks[1].chips] == plan.orders.text(1)
    assert view.canvas.idle.split(" ") == [quantities.percent(share, 1) for share in times.idle_shares(plan)]
    assert view.canvas.axis == "time [µs]"


def test_only_what_is_proved_is_called_optimal_and_a_tiny_gap_is_not_zero() -> None:
    plan, gaps = one_by_one(1, 1), {0.0: "0", 2e-9: f"< 0.01{PERCENT}", 0.25: f"25.00{PERCENT}"}
    for gap, value in gaps.items():
        metrics = replace(plan.metrics, gap=gap, status="feasible" if gap else "optimal")
        found = plan_view(plan := replace(plan, metrics=metrics)).cards[3]
        assert (found.value, found.tone) == (value, "" if gap else "good")
        assert ["proved optimal" in text for text in (found.note, plan_html(plan))] == [gap == 0] * 2


@pytest.mark.parametrize(("limit", "note", "summary"), [
    (2.0, f"200{PERCENT} of the limit", "on rank 0, of 2. Dashed: the limit."),
    (8.0, f"50{PERCENT} of the limit", "on rank 0, of 8. Dashed: the limit."),
    (0.0, "∞ of the limit", "on rank 0, of 0. Dashed: the limit."),
    (1000.0, f"0{PERCENT} of the limit", "on rank 0, of 1\u202f000."),
    (None, "no limit", "on rank 0. No limit."),
])  # fmt: skip
def test_memory_over_the_limit_is_marked_and_a_near_limit_drawn(limit: Any, note: str, summary: str) -> None:
    """No plan exceeds a limit; a stored one of an older version must not be praised."""
    plan = one_by_one(1, 1, memory={**MEMORY, "static": 0, "limit": None})
    memory = replace(plan.problem.memory, limit=None if limit is None else (limit,))
    plan = replace(plan, problem=replace(plan.problem, memory=memory))
    view, is_over = plan_view(plan), limit in (0, 2)
    found, picture = view.cards[-1], view.per_rank[-1]
    assert (found.value, found.note, found.tone) == ("4", note, "bad" if is_over else "")
    assert [(bar.over, bar.limit is None) for bar in picture.bars] == [(is_over, limit in (1000, None))]
    assert picture.summary == f"Highest: 4 {summary}"


def test_no_memory_is_not_shown_and_static_memory_is() -> None:
    without, static = plan_view(one_by_one(2, 1)), plan_view(one_by_one(2, 1, memory=MEMORY))
    assert [each.name for each in without.per_rank] == ["idle"]
    assert ({rank.peak for rank in without.ranks}, {rank.peak for rank in static.ranks}) == ({""}, {"5"})
    assert static.per_rank[-1].summary.endswith(" Darker: static memory.")


@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 1), (4, 6)])
def test_the_bubble_rate_is_the_mean_of_the_ranks_idle_shares(p: int, m: int) -> None:
    plan = one_by_one(p, m, costs={**COSTS, "forward": [900 + 50 * s for s in range(2 * p)]})
    shares, picture = times.idle_shares(plan), idle_bars(plan)
    assert np.mean(shares) == pytest.approx(plan.metrics.bubble_rate, abs=1e-12)
    assert quantities.percent(plan.metrics.bubble_rate) in picture.summary
    heights = np.array([bar.height for bar in picture.bars])
    assert heights / max(*heights, 1e-9) == pytest.approx(np.array(shares) / max(*shares, 1e-9), abs=1e-3)


def test_neither_rounding_nor_a_plan_that_takes_no_time_is_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = one_by_one(2, 1, costs=NO_TIME)
    assert times.idle_shares(nothing) == [bar.height for bar in idle_bars(nothing).bars] == [0, 0]
    monkeypatch.setattr("zbv_solver.export.report.figures.idle_shares", lambda plan: [2e-16, 0.0])
    assert [bar.height for bar in idle_bars(nothing).bars] == [0, 0]


def test_large_plans_list_the_beginning_of_every_rank_and_their_rows_can_be_pointed_at() -> None:
    view = plan_view(one_by_one(2, 2600))
    assert not view.has_bars
    assert view.ranks[0].omitted == 6 * 2600 - len(view.ranks[0].text.split())
    assert view.ranks[0].text.startswith("0F0 3F0 3I0")
    heights = [gantt_canvas(ranks).rows / ranks for ranks in (1, 8, 64, 300)]
    assert heights[0] == heights[1] > heights[2] > heights[3] >= 7


def test_the_legend_explains_dark_and_light() -> None:
    legends = {"single": "", "v": "dark: chunk 0, light: chunk 1"}
    legends["loop"] = "dark: even chunks, light: odd ones"
    for chunks, (kind, shades) in enumerate(legends.items(), start=1):
        assert plan_view(one_by_one(2, 1, placement=kind, chunks=chunks)).shades == shades


def test_microbatches_that_differ_are_in_every_format_and_of_many_the_first(differing: Plan) -> None:
    assert all(len(export(differing, name)) > 10 for name in FORMATS)
    view: Any = plan_view(differing).microbatches
    facts = dict(cost_facts(differing.problem))
    assert facts["Forward F"] == "3 to 9 µs, by microbatch"
    assert facts["Transfer"] == "1 to 4 µs, by microbatch"
    assert facts["Feature tokens"] == "1 to 4"
    assert cost_values(differing.problem)["memory forward"] == (4, 1, 3, 2, 4, 1, 3, 2)
    assert [row.features for row in view.rows] == [(str(length),) for length in LENGTHS]
    heights = [100 * (2 + 10 * length) / 42 for length in LENGTHS]
    assert [row.height for row in view.rows] == pytest.approx(heights, abs=0.01)
    many = MOST_MICROBATCHES + 10
    equal, view = (
        plan_view(one_by_one(1, len(tokens), **DIFFERING | {"features": {"tokens": tokens}})).microbatches
        for tokens in ([2] * 4, [*range(many)])
    )
    assert (equal, len(view.rows)) == (None, MOST_MICROBATCHES)
    assert f"The first {MOST_MICROBATCHES} of {many} microbatches" in view.summary


def test_the_file_refers_to_nothing_outside_and_contains_everything(plan: Plan) -> None:
    text = export(plan, "html")
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text[: text.index("<script")])
    assert not any(word in text for word in ("<script src", "<nav"))
    assert all(word in text for word in (plan.plan_id, times.timeline_text(times.timeline(plan))))
    script = text.rpartition('<script type="module">')[2].partition("</script>")[0]
    assert not re.findall(r"^(?:import|export) ", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:const|function|class) (\w+)", script, re.MULTILINE)
    assert len(set(names)) == len(names) > len(MODULES), "modules share one scope: every name is defined once"
    assert "<b>evil" not in export(one_by_one(1, 1, units={"time": "<b>evil"}), "html")
    hostile = {"a": "</script><!--&"}
    assert json.loads(str(script_json(hostile))) == hostile
    assert "<" not in str(script_json(hostile))


BYTES, SLOTS = Units(memory="bytes"), Units(memory="slots")
WRITTEN: dict[Any, dict[Any, str]] = {
    quantities.figure: {
        (0,): "0", (7,): "7", (-0.5,): "−0.5", (1234567,): "1_234_567", (0.012345,): "0.01235",
        (99.9999,): "100", (1e15,): "1e+15", (2.3454e-9,): "2.345e−9", (math.inf,): "∞",
    },
    quantities.time: {
        (5_909_168, Units("us")): "5.909 s", (0.25, Units("ms")): "250 µs", (1500, Units()): "1_500",
        (0, Units("us")): "0 µs", (-2500, Units("us")): "−2.5 ms", (1500, Units("cycles")): "1_500 cycles",
    },
    quantities.times: {((900, 1100), Units("us")): "0.9 to 1.1 ms", ((), Units("us")): "none"},
    quantities.gigabytes: {(80e9,): "80 GB", (79_560_000_000,): "79.6 GB"},
    quantities.memory: {(3 * 2**30, BYTES): "3 GiB", (1024, BYTES): "1 KiB", (3000, SLOTS): "3_000 slots"},
    quantities.percent: {(0.1234,): "12.34_%", (-1e-9,): "0.00_%", (-0.5, 0): "−50_%", (math.inf,): "∞"},
    quantities.relative: {(110, 100): "+10.0_%", (90, 100): "−10.0_%", (100.01, 100): "0.0_%", (1, 0): "∞"},
    quantities.counted: {(1, "rank"): "1 rank", (2, "rank"): "2 ranks", (2, "microbatch"): "2 microbatches"},
}  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
def test_quantities_are_readable(write: Any) -> None:
    """An underscore stands for the narrow space."""
    assert {given: write(*given).replace("\u202f", "_") for given in WRITTEN[write]} == WRITTEN[write]


@given(st.floats(1e-6, 1e12), st.integers(4, 20))
def test_ticks_are_even_and_few(length: float, at_most: int) -> None:
    found = quantities.ticks(0.0, length, at_most)
    assert 2 <= len(found) <= at_most + 1
    assert found == pytest.approx([found[1] * at for at in range(len(found))])
    assert found[-1] <= length * (1 + 1e-9)
