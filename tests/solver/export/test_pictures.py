"""Pictures of plans: SVG, raster, and what a page's script draws."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_plans import one_by_one, plan_of
from zbv_solver.export import export, palette
from zbv_solver.export.svg import MAX_BARS, WIDTH
from zbv_solver.export.timeline import (
    coverage,
    image,
    timeline,
    timeline_bytes,
    timeline_facts,
    timeline_text,
)
from zbv_solver.plans.plan import Plan

SVG = "{http://www.w3.org/2000/svg}"
NO_TIME = {"forward": 0, "backward_input": 0, "backward_weight": 0}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(3, 5, units={"time": "us"})


def texts(plan: Plan) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(export(plan, "svg")).iter(f"{SVG}text")]


def test_an_svg_draws_every_action_in_its_colour_and_inside_its_frame(plan: Plan) -> None:
    text = export(plan, "svg")
    paths = ElementTree.fromstring(text).iter(f"{SVG}path")
    drawn = Counter({str(p.get("fill")): str(p.get("d")).count("M") for p in paths if p.get("fill")})
    assert drawn == Counter(palette.KIND_FILLS[kind] for kind in timeline(plan).kind.tolist())
    for left, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", text):
        assert 0 <= float(left) <= float(left) + float(width) <= WIDTH


def test_an_svg_names_ranks_units_letters_and_the_plans_metrics(plan: Plan) -> None:
    found = texts(plan)
    assert [text for text in found if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert found[0].startswith("3 ranks, 5 microbatches: span ")
    assert {"time [µs]", "F forward"} <= {*found}
    assert "time [<b>&]" in texts(one_by_one(1, 1, units={"time": "<b>&"})), "text of users is escaped"
    numbers = Counter(text for text in texts(one_by_one(1, 2)) if text in "01")
    assert numbers == {"0": 6 + 1, "1": 6}  # on bars that have room, and 0 on the axis


def test_an_svg_has_no_script_and_brings_its_own_background(plan: Plan) -> None:
    root = ElementTree.fromstring(export(plan, "svg"))
    assert f"{SVG}script" not in {element.tag for element in root.iter()}
    background = next(root.iter(f"{SVG}rect"))
    assert (background.get("width"), background.get("fill")) == ("100%", palette.BACKGROUND)


def test_svgs_of_large_plans_and_of_plans_that_take_no_time() -> None:
    large = one_by_one(16, 700)
    assert len(large.orders) > MAX_BARS
    for plan in (large, one_by_one(2, 1, costs=NO_TIME)):
        text = export(plan, "svg")
        ElementTree.fromstring(text)
        assert len(text) < 2_000_000


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50))
def test_the_columns_of_a_raster_add_up_to_the_busy_time(p: int, m: int, columns: int) -> None:
    line = timeline(one_by_one(p, m))
    shares = coverage(line, columns)

    assert np.all(shares >= -1e-5)
    assert np.all(shares.sum(axis=2) <= 1 + 1e-5)
    for rank in range(p):
        part = line.slice_of(rank)
        length = np.bincount(line.kind[part], (line.end - line.start)[part], len(palette.KIND_FILLS))
        drawn = shares[rank].sum(axis=0) * line.makespan / columns
        assert drawn == pytest.approx(length, rel=1e-4, abs=1e-2)


def test_a_raster_column_inside_an_action_has_its_colour_and_idle_time_is_transparent() -> None:
    line = timeline(one_by_one(2, 1))
    pixels = image(line, 200).view(np.uint8).reshape(2, 200, 4)
    assert tuple(pixels[0, 1]) == (*palette.rgb(palette.FILLS["F"][0]), 255)
    assert pixels[1, 1, 3] == 0  # rank 1 waits for the first activation


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_facts_describe_the_packed_columns(plan: Plan, is_measured: bool) -> None:
    line = timeline(plan)
    facts = timeline_facts(line, plan.problem, is_measured=is_measured)
    packed, n = timeline_bytes(line, is_measured=is_measured), len(line)
    floats, size = 2 if is_measured else 1, facts["microbatch_bytes"]
    numbers, rest = np.frombuffer(packed, "<f8", count=floats * n), packed[8 * floats * n :]
    microbatches = np.frombuffer(rest, f"<u{size}", count=n)
    letters, chunks = np.frombuffer(rest, "u1", count=2 * n, offset=size * n).reshape(2, n)

    assert (facts["count"], len(rest)) == (n, n * (size + 2))
    assert n == len(plan.orders)
    assert numbers[:n].tolist() == line.start.tolist()
    assert numbers[n:].tolist() == (line.end.tolist() if is_measured else [])
    columns = (line.rank.tolist(), chunks.tolist(), letters.tolist(), microbatches.tolist())
    assert [
        f"{facts['stages'][rank][chunk]}{facts['letters'][letter]}{j}"
        for rank, chunk, letter, j in zip(*columns, strict=True)
    ] == [text for row in plan.orders.all_text() for text in row]
    lengths = np.array(facts["durations"])[letters, line.stage]
    assert (line.start + lengths).tolist() == line.end.tolist()
    assert json.loads(json.dumps(facts)) == facts
    assert b64decode(timeline_text(line, is_measured=is_measured)) == packed


def test_microbatches_beyond_16_bits_keep_their_number() -> None:
    plan = one_by_one(1, 2)
    line = timeline(plan)
    for more, size in ((65_534, 2), (65_535, 4)):
        moved = replace(line, microbatch=line.microbatch + np.int32(more))
        assert timeline_facts(moved, plan.problem)["microbatch_bytes"] == size
        found = np.frombuffer(timeline_bytes(moved)[8 * len(line) :], f"<u{size}", count=len(line))
        assert found.tolist() == moved.microbatch.tolist()
