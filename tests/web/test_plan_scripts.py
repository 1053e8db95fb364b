"""The scripts of a plan's chart without their page: numbers, and plans of every kind against an oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from zbv_solver.export import quantities
from zbv_solver.export.html import one_module
from zbv_solver.export.palette import rgb
from zbv_solver.export.report import CHART_MODULES
from zbv_solver.export.timeline import image, timeline, timeline_facts, timeline_text
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import memory_profile

from web.oracle import Oracle

NAMES = (
    *("number", "percent", "storage", "amount", "axisNumbers", "loadTimeline", "raster", "idleBounds"),
    *("waitedFor", "idleBefore", "spentInWords", "stepsIn", "columnPeaks", "extremes", "TimeRange"),
)
COSTS = {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50}
MEMORY = {"forward": 2, "backward_input": -1, "backward_weight": -1, "static": 1}

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(browser: Browser) -> Call:
    """Call a function in a page that has only the modules; ``zbv`` has their exports."""
    page = browser.new_page()
    script = f"{one_module(CHART_MODULES)}\nglobalThis.zbv = {{ {', '.join(NAMES)} }};"
    page.add_script_tag(content=script, type="module")
    page.wait_for_function("() => globalThis.zbv !== undefined")
    return page.evaluate


def found(p: int, m: int, **more: Any) -> Plan:
    return search(parse_problem({"pp_degree": p, "microbatches": m, "costs": COSTS, **more}))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    uneven = {**COSTS, "forward": [900, 1300, 700, 1000, 1100, 950], "p2p": [0, 10, 400, 30, 75]}
    merged = parse_problem({"pp_degree": 3, "microbatches": 4, "costs": {**COSTS, "backward": 1500}})
    memory = {**MEMORY, "backward_input": 1, "backward_weight": -3}
    by_tokens = {**COSTS, "forward": {"fixed": 100, "tokens": 300}, "p2p": {"tokens": 20}}
    lengths = {"tokens": [3, 1, 4, 2]}
    held = {"forward": {"tokens": 2}, "backward_input": {"tokens": -1}, "backward_weight": {"tokens": -1}}
    return {
        "one rank": found(1, 3),
        "one microbatch": found(3, 1, placement="single"),
        "uneven, memory grows with I": found(3, 5, costs=uneven, memory=memory, objective="makespan"),
        "looped": found(2, 4, placement="loop", chunks=3),
        "fused backwards": baseline_plan("interleaved-1f1b", merged),
        "microbatches that differ": found(2, 4, costs=by_tokens, memory=held, features=lengths),
        "no time at all": found(2, 2, costs={"forward": 0, "backward_input": 0, "backward_weight": 0}),
    }


KINDS = (
    "one rank",
    "one microbatch",
    "uneven, memory grows with I",
    "looped",
    "fused backwards",
    "microbatches that differ",
    "no time at all",
)


def sent(plan: Plan) -> list[Any]:
    """What a page carries of a plan: facts and actions."""
    line = timeline(plan)
    return [timeline_facts(line, plan.problem), timeline_text(line)]


NUMBERS = (
    *(0.0, 7.0, -0.5, 1234567.0, 0.012345, 99.9999, 0.1 + 0.2, 1e-7, 1.5e-9, -3e-8),
    *(1e12, 2.24e15, 1.23456789e300, 999999999999.0, 1e-6, 9.999e-7, 12345.678),
    *(0.125, 0.375, 2.5, 3.5, 1002.5, 1003.5, float("inf"), float("-inf")),
)


def test_scripts_format_numbers_like_the_server(call: Call) -> None:
    values = [value for value in NUMBERS if np.isfinite(value)]
    for digits in (4, 9):
        said = call("([all, digits]) => all.map((each) => zbv.number(each, digits))", [values, digits])
        assert said == [quantities.figure(value, digits) for value in values]
    shares = [value for value in values if value < 1e12]
    said = call("(all) => all.map((each) => zbv.percent(each))", shares)
    assert said == [quantities.percent(value) for value in shares]
    endless = call("() => [zbv.number(Infinity), zbv.number(-Infinity), zbv.percent(Infinity)]")
    assert endless == ["∞", "−∞", "∞"]
    sizes = (*(value for value in values if abs(value) < 1e24), 1024.0**2, 27 * 1024.0**3, -1536.0)
    for unit in ("bytes", "MB", ""):
        said = call("([all, unit]) => all.map((each) => zbv.storage(each, unit))", [sizes, unit])
        assert said == [quantities.memory(value, Units(memory=unit or None)) for value in sizes]
    assert call("() => [zbv.amount(1500, ''), zbv.amount(1500, 'ms')]") == ["1\u202f500", "1\u202f500 ms"]


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0, 50_000, 100_000], ["0", "50\u202f000", "100\u202f000"]),
        ([1_000_000, 1_000_000.5], ["1\u202f000\u202f000", "1\u202f000\u202f000.5"]),
        ([5.6e-17, 0.1, 0.2, 0.1 + 0.2], ["0", "0.1", "0.2", "0.3"]),
        ([0, 2e14, 4e14], ["0", "2e+14", "4e+14"]),
        ([0, 2.5e-9, 5e-9], ["0", "2.5e−9", "5e−9"]),
        ([-20, 0, 20], ["−20", "0", "20"]),
        ([7], ["7"]),
        ([0], ["0"]),
        ([], []),
    ],
)
def test_neighbouring_ticks_have_different_numbers(call: Call, ticks: list[float], texts: list[str]) -> None:
    assert call("(ticks) => zbv.axisNumbers(ticks)", ticks) == texts


READ = "const timeline = await zbv.loadTimeline(facts, { data });"


@pytest.mark.parametrize("kind", KINDS)
def test_waits_and_critical_paths_match_the_plan(call: Call, plans: dict[str, Plan], kind: str) -> None:
    plan = plans[kind]
    known = Oracle(plan)
    waits, paths, spent, texts, last, names = call(
        f"""async ([facts, data]) => {{
          {READ}
          const all = Array.from({{ length: timeline.count }}, (_, at) => at);
          const paths = all.map((at) => timeline.criticalPath(at));
          const waitOf = (at) => {{
            const {{ by, action, late }} = timeline.wait(at);
            return [by, action, timeline.idle(at), late];
          }};
          const texts = all.map((at) => timeline.text(at));
          const spent = paths.map((path) => timeline.spent(path));
          const found = texts.map((text) => timeline.find(text));
          return [all.map(waitOf), paths, spent, texts, timeline.last, found];
        }}""",
        sent(plan),
    )
    count = range(len(known.texts))
    assert texts == known.texts
    assert waits == [[*known.waits[at], known.idle(at), 0] for at in count]
    assert paths == [known.path(at) for at in count]
    for at, sums in zip(count, spent, strict=True):
        assert sum(sums["letters"]) + sums["transfers"] == pytest.approx(known.end[at], rel=1e-12)
    assert last == max(count, key=lambda at: (known.end[at], -at))
    assert names == list(count)


@pytest.mark.parametrize("kind", KINDS)
def test_every_action_is_found_at_its_position(call: Call, plans: dict[str, Plan], kind: str) -> None:
    plan = plans[kind]
    line = timeline(plan)
    at = call(
        f"""async ([facts, data]) => {{
          {READ}
          const middle = (at) => (timeline.start[at] + timeline.end[at]) / 2;
          const found = (_, at) => timeline.at(timeline.rankOf(at), middle(at));
          return Array.from({{ length: timeline.count }}, found);
        }}""",
        sent(plan),
    )
    if plan.metrics.makespan > 0:
        assert at == list(range(len(line)))
    nowhere = call(
        f"""async ([facts, data]) => {{
          {READ}
          const tooFar = `${{facts.transfers.length + 1}}F0`;
          const texts = ["", "F", "0F", "0F99999", tooFar, "0Q0", "0F0 x", "-1F0", "0F1.5"];
          const after = timeline.makespan + 2;
          const outside = [timeline.at(-1, 0), timeline.at(timeline.ranks, 0), timeline.at(0, after, 1)];
          return [...outside, ...texts.map((text) => timeline.find(text))];
        }}""",
        sent(plan),
    )
    assert nowhere == [-1] * len(nowhere)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_every_action_matches_the_plan(call: Call, plans: dict[str, Plan], kind: str) -> None:
    plan = plans[kind]
    held = call(
        f"async ([facts, data]) => {{ {READ} const {{ during, after }} = timeline.profile(); "
        "return [Array.from(during), Array.from(after)]; }",
        sent(plan),
    )
    assert held == [amounts.tolist() for amounts in memory_profile(plan.problem, plan.orders)]


def test_the_picture_is_the_one_that_the_server_draws(call: Call, plans: dict[str, Plan]) -> None:
    plan = plans["uneven, memory grows with I"]
    line = timeline(plan)
    drawn = call(
        f"async ([facts, data]) => {{ {READ} "
        "return Array.from(zbv.raster(timeline, 0, timeline.makespan, 90)); }",
        sent(plan),
    )
    ours = np.array(drawn).reshape(3, 90, 4)
    theirs = image(line, 90).view(np.uint8).reshape(3, 90, 4).astype(int)
    assert np.abs(ours[..., 3] - theirs[..., 3]).max() <= 1
    seen = theirs[..., 3] > 8
    assert np.abs(ours - theirs)[seen].max() <= 4


def test_idle_time_is_hatched_where_the_objective_counts_it(call: Call, plans: dict[str, Plan]) -> None:
    bounds = f"""async ([facts, data]) => {{
      {READ}
      const boundsOf = (_, rank) => zbv.idleBounds(timeline, rank);
      return [timeline.makespan, ...Array.from({{ length: timeline.ranks }}, boundsOf)];
    }}"""
    makespan, *whole = call(bounds, sent(plans["uneven, memory grows with I"]))
    assert whole == [[0, makespan]] * 3
    line = timeline(plans["looped"])
    _, *own = call(bounds, sent(plans["looped"]))
    assert own == [[line.start[line.slice_of(r)][0], line.end[line.slice_of(r)][-1]] for r in range(2)]
    pixels = call(
        f"""async ([facts, data]) => {{
          {READ}
          const idle = {{ fill: [255, 224, 138], hatch: [1, 2, 3] }};
          const pixels = zbv.raster(timeline, 0, timeline.makespan, 40, {{ idle }});
          return Array.from(pixels);
        }}""",
        sent(plans["one microbatch"]),
    )
    first = np.array(pixels).reshape(3, 40, 4)[0]
    # Rank 0 runs F, waits for the gradient, and ends with I and W; in between every fourth column is dark.
    middle = first[12:28]
    assert {tuple(pixel) for pixel in middle} == {(255, 224, 138, 255), (1, 2, 3, 255)}
    assert (middle[:, 0] == 1).sum() == len(middle) / 4


def test_actions_that_are_not_highlighted_are_faint(call: Call, plans: dict[str, Plan]) -> None:
    drawn = call(
        f"""async ([facts, data]) => {{
          {READ}
          const highlighted = new Uint8Array(timeline.count);
          highlighted[0] = 1;
          const pixels = zbv.raster(timeline, 0, timeline.makespan, 300, {{ highlighted }});
          return Array.from(pixels);
        }}""",
        sent(plans["one rank"]),
    )
    row = np.array(drawn).reshape(1, 300, 4)[0]
    line = timeline(plans["one rank"])
    edge = int(line.end[0] / line.makespan * 300)
    assert set(row[: edge - 1, 3]) == {255}
    assert row[edge + 1 :, 3].max() < 64
    assert tuple(row[1, :3]) == rgb(timeline_facts(line, plans["one rank"].problem)["fills"][line.kind[0]])


WORDS = f"""async ([facts, data, at]) => {{
  {READ}
  const spent = zbv.spentInWords(timeline, timeline.criticalPath(at));
  return [zbv.waitedFor(timeline, at), zbv.idleBefore(timeline, at), spent];
}}"""


def test_waiting_is_put_into_words(call: Call, plans: dict[str, Plan]) -> None:
    plan = plans["one microbatch"]
    known, data = Oracle(plan), sent(plan)
    say = {text: call(WORDS, [*data, known.texts.index(text)]) for text in ("0F0", "1F0", "0I0", "0W0")}
    assert say["0F0"] == ["nothing", "first of its rank", "F 1\u202f000"]
    assert say["1F0"] == ["input 0F0 from rank 0", "first of its rank", "F 2\u202f000, transfers 50"]
    waited, idled, _ = say["0I0"]
    assert waited == "input 1I0 from rank 1"
    assert idled == quantities.figure(known.idle(known.texts.index("0I0")) or 0, 9)
    assert say["0W0"][:2] == ["the end of 0I0 on its rank", "none"]
    assert call(WORDS, [*sent(plans["no time at all"]), 0])[2] == ""


def test_measured_times_say_what_was_late(call: Call, plans: dict[str, Plan]) -> None:
    plan = plans["one microbatch"]
    texts = Oracle(plan).texts
    # As planned, but one began 7 after its input had arrived, and the last one 5 after its rank was free.
    by_input, last = texts.index("1F0"), texts.index("1W0")
    waits, spent, words = call(
        f"""async ([facts, data, one, other]) => {{
          {READ}
          timeline.start[one] += 7;
          timeline.end[one] += 7;
          timeline.start[other] = timeline.end[other - 1] + 5;
          const path = [one, other];
          const words = zbv.spentInWords(timeline, path);
          return [path.map((at) => timeline.wait(at)), timeline.spent(path), words];
        }}""",
        [*sent(plan), by_input, last],
    )
    assert [(wait["by"], wait["late"]) for wait in waits] == [("input", 7), ("rank", 5)]
    assert spent["late"] == 12
    assert words.endswith(", transfers 50, other 12")


@pytest.mark.parametrize("kind", KINDS)
def test_all_actions_that_overlap_the_view_are_in_view(call: Call, plans: dict[str, Plan], kind: str) -> None:
    plan = plans[kind]
    line = timeline(plan)
    windows = [
        (share * line.makespan, (share + 0.2) * line.makespan) for share in (-0.1, 0.0, 0.31, 0.55, 0.9)
    ]
    seen, kinds = call(
        f"async ([facts, data, windows]) => {{ {READ} "
        "return [windows.map(([from, to]) => timeline.visible(from, to)), Array.from(timeline.kind)]; }",
        [*sent(plan), windows],
    )
    assert kinds == line.kind.tolist()
    for (begin, end), ranks in zip(windows, seen, strict=True):
        for rank, (first, stop) in enumerate(ranks):
            part = range(*line.slice_of(rank).indices(len(line)))
            overlapping = {at for at in part if line.start[at] < end and line.end[at] > begin}
            assert overlapping <= set(range(first, stop)) <= set(part)
            assert stop - first <= len(overlapping) + 1


def holdings(plan: Plan, rank: int, times: list[float]) -> list[float]:
    """What a rank holds at some times."""
    line = timeline(plan)
    part = line.slice_of(rank)
    columns = (line.start, line.end, line.during, line.after)
    changes = [(0.0, plan.problem.memory.static[rank])]
    for start, stop, during, after in zip(*(column[part].tolist() for column in columns), strict=True):
        changes += [(start, during), (stop, after)]
    return [[amount for changed, amount in changes if changed <= time][-1] for time in times]


@pytest.mark.parametrize("shares", [(0.0, 0.4), (0.3, 0.6)])
def test_a_memory_line_has_every_step_in_the_window(
    call: Call, plans: dict[str, Plan], shares: tuple[float, float]
) -> None:
    plan = plans["uneven, memory grows with I"]
    begin, end = (share * timeline(plan).makespan for share in shares)
    lines = call(
        f"async ([facts, data, begin, end]) => {{ {READ} "
        "return [0, 1, 2].map((rank) => zbv.stepsIn(timeline, rank, begin, end)); }",
        [*sent(plan), begin, end],
    )
    times = np.linspace(begin, end, 97)[1:-1].tolist()
    for rank, drawn in enumerate(lines):
        points = list(zip(drawn["at"], drawn["held"], strict=True))
        seen = [[amount for changed, amount in points if changed <= time][-1] for time in times]
        assert seen == holdings(plan, rank, times)
        assert (points[0][0], points[-1][0]) == (begin, end)


def test_the_band_is_between_the_least_and_the_most_loaded_rank(call: Call, plans: dict[str, Plan]) -> None:
    plan = plans["uneven, memory grows with I"]
    makespan = timeline(plan).makespan
    band, each, empty = call(
        f"""async ([facts, data, end]) => {{ {READ}
          const each = [0, 1, 2].map((rank) => zbv.columnPeaks(timeline, rank, 0, end, 50));
          const beyond = zbv.extremes(timeline, 2 * end, 3 * end, 50);
          return [zbv.extremes(timeline, 0, end, 50), each, beyond];
        }}""",
        [*sent(plan), makespan],
    )
    held = np.array([one["held"] for one in each])
    assert band["low"] == held.min(axis=0).tolist()
    assert band["high"] == held.max(axis=0).tolist()
    times = (np.arange(1000) + 0.5) / 1000 * makespan
    for rank in range(3):
        holds = np.array(holdings(plan, rank, times.tolist())).reshape(50, 20)
        assert np.all(held[rank][:50] >= holds.max(axis=1))
    assert held.max(axis=1).tolist() == list(plan.metrics.peak_memory)
    assert empty["at"] == []


def test_a_range_keeps_within_the_time_and_above_the_shortest_length(
    call: Call, plans: dict[str, Plan]
) -> None:
    plan = plans["uneven, memory grows with I"]
    makespan = plan.metrics.makespan
    windows = call(
        f"""async ([facts, data]) => {{ {READ}
          const range = new zbv.TimeRange([timeline]);
          const seen = [];
          range.changed = () => seen.push([range.start, range.end]);
          range.zoom(0.5, range.last / 4);
          range.pan(-range.last);
          range.pan(range.last);
          range.zoom(1e-9, range.last);
          range.move("out");
          range.move("all");
          return [...seen, [range.shortest, range.last]];
        }}""",
        sent(plan),
    )
    *seen, (shortest, last) = windows
    assert last == makespan
    assert seen[0] == pytest.approx([makespan / 8, makespan * 5 / 8]), (
        "the time at the pointer stays in place"
    )
    assert seen[1] == [0, makespan / 2]
    assert seen[2] == [makespan / 2, makespan]
    assert seen[3] == pytest.approx([makespan - shortest, makespan])
    assert seen[4] == pytest.approx([makespan - 2 * shortest, makespan])
    assert seen[5] == [0, makespan]
