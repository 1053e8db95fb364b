"""The scripts of a plan's chart without their page: numbers, and plans of every kind against an oracle."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from support.orders import copied_at_random
from zbv_solver.export import quantities
from zbv_solver.export.html import one_module
from zbv_solver.export.palette import rgb
from zbv_solver.export.report import CHART_MODULES
from zbv_solver.export.timeline import image, timeline, timeline_facts, timeline_text
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import O, R, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, make_plan
from zbv_solver.timing.start_times import memory_profile

from web.oracle import Oracle

NAMES = (
    *("number", "percent", "storage", "amount", "axisNumbers", "loadTimeline", "raster", "idleBounds"),
    *("spentInWords", "stepsIn", "columnPeaks", "extremes", "TimeRange"),
)
COSTS = {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50}
MEMORY = {"forward": 2, "backward_input": 1, "backward_weight": -3, "static": 1}
UNEVEN = {**COSTS, "forward": [900, 1300, 700, 1000, 1100, 950], "p2p": [0, 10, 400, 30, 75]}
BY_TOKENS = {**COSTS, "forward": {"fixed": 100, "tokens": 300}, "p2p": {"tokens": 20}}
HELD = {"forward": {"tokens": 2}, "backward_input": {"tokens": -1}, "backward_weight": {"tokens": -1}}
HOLDS = {"forward": 3, "backward_input": -1, "backward_weight": -2, "offloadable": 2}
NOTHING = {"forward": 0, "backward_input": 0, "backward_weight": 0}

Call = Callable[[str, Any], Any]
InPlan = Callable[..., Any]


def of(schedule: str, p: int, m: int, **more: Any) -> Plan:
    return baseline_plan(schedule, parse_problem({"pp_degree": p, "microbatches": m, "costs": COSTS, **more}))


def with_copies(plan: Plan) -> Plan:
    orders = copied_at_random(plan.orders, Random(4))
    return make_plan(plan.problem, orders, method="random")


PLANS = {
    "one rank": of("zb-v", 1, 3),
    "one microbatch": of("1f1b", 3, 1),
    "uneven, memory grows with I": of("zb-v", 3, 5, costs=UNEVEN, memory=MEMORY, objective="makespan"),
    "looped": of("interleaved-1f1b", 2, 4, placement="loop", chunks=3),
    "fused backwards": of("interleaved-1f1b", 3, 4, costs={**COSTS, "backward": 1500}),
    "microbatches that differ": of(
        "zb-v", 2, 4, costs=BY_TOKENS, memory=HELD, features={"tokens": [3, 1, 4, 2]}
    ),
    "no time at all": of("zb-v", 2, 2, costs=NOTHING),
    "copies": with_copies(of("zb-v", 2, 4, costs={**COSTS, "offload": 1300, "reload": 900}, memory=HOLDS)),
}
COPIED = PLANS["copies"]
SPLIT = PLANS["uneven, memory grows with I"]
SHORT = of("zb-h1", 3, 1, placement="single")


@pytest.fixture(scope="module")
def call(browser: Browser) -> Call:
    """Call a function in a page that has only the modules; ``zbv`` has their exports."""
    page = browser.new_page()
    script = f"{one_module(CHART_MODULES)}\nglobalThis.zbv = {{ {', '.join(NAMES)} }};"
    page.add_script_tag(content=script, type="module")
    page.wait_for_function("() => globalThis.zbv !== undefined")
    return page.evaluate


@pytest.fixture(scope="module")
def in_plan(call: Call) -> InPlan:
    """Run a body with the ``timeline`` of a plan and further values: ``in_plan(plan, "return x", x=1)``."""

    def run(plan: Plan, body: str, **values: Any) -> Any:
        line = timeline(plan)
        names = ", ".join(["facts", "data", *values])
        head = f"async ({{ {names} }}) => {{ const timeline = await zbv.loadTimeline(facts, {{ data }});"
        sent = {"facts": timeline_facts(line, plan.problem), "data": timeline_text(line)}
        return call(f"{head} {body} }}", {**sent, **values})

    return run


NUMBERS = (
    *(0.0, 7.0, -0.5, 1234567.0, 0.012345, 99.9999, 0.1 + 0.2, 1e-7, 1.5e-9, -3e-8),
    *(1e12, 2.24e15, 1.23456789e300, 999999999999.0, 1e-6, 9.999e-7, 12345.678),
    *(0.125, 0.375, 2.5, 3.5, 1002.5, 1003.5),
)


def test_scripts_format_numbers_like_the_server(call: Call) -> None:
    def said(function: str, values: Any, *more: Any) -> Any:
        return call(
            "([name, all, more]) => all.map((it) => zbv[name](it, ...more))", [function, values, more]
        )

    for digits in (4, 9):
        assert said("number", NUMBERS, digits) == [quantities.figure(value, digits) for value in NUMBERS]
    shares = [value for value in NUMBERS if value < 1e12]
    assert said("percent", shares) == [quantities.percent(value) for value in shares]
    assert call("() => [Infinity, -Infinity].map((it) => zbv.number(it))", None) == ["∞", "−∞"]
    sizes = (*(value for value in NUMBERS if abs(value) < 1e24), 1024.0**2, 27 * 1024.0**3, -1536.0)
    for unit in ("bytes", "MB", ""):
        expected = [quantities.memory(value, Units(memory=unit or None)) for value in sizes]
        assert said("storage", sizes, unit) == expected
    for unit in ("µs", "s", "cycles", ""):
        assert said("amount", NUMBERS, unit) == [
            quantities.time(value, Units(unit or None)) for value in NUMBERS
        ]


def test_neighbouring_ticks_have_different_numbers(call: Call) -> None:
    for ticks, texts in (
        ([0, 50_000, 100_000], ["0", "50\u202f000", "100\u202f000"]),
        ([1_000_000, 1_000_000.5], ["1\u202f000\u202f000", "1\u202f000\u202f000.5"]),
        ([5.6e-17, 0.1, 0.2, 0.1 + 0.2], ["0", "0.1", "0.2", "0.3"]),
        ([0, 2e14, 4e14], ["0", "2e+14", "4e+14"]),
        ([0, 2.5e-9, 5e-9], ["0", "2.5e−9", "5e−9"]),
        ([-20, 0, 20], ["−20", "0", "20"]),
        ([7], ["7"]),
        ([], []),
    ):
        assert call("(ticks) => zbv.axisNumbers(ticks)", ticks) == texts


@pytest.mark.parametrize("kind", PLANS)
def test_a_timeline_has_the_waits_paths_memory_and_names_of_the_plan(in_plan: InPlan, kind: str) -> None:
    plan = PLANS[kind]
    known, line = Oracle(plan), timeline(plan)
    windows = [(share * line.makespan, (share + 0.2) * line.makespan) for share in (-0.1, 0, 0.31, 0.55, 0.9)]
    found = in_plan(
        plan,
        """const all = Array.from({ length: timeline.count }, (_, at) => at);
        const waitOf = ({ by, action, late }, at) => [by, action, timeline.idle(at), late];
        const paths = all.map((at) => timeline.criticalPath(at));
        const texts = all.map((at) => timeline.text(at));
        const middle = (at) => (timeline.start[at] + timeline.end[at]) / 2;
        const { during, after } = timeline.profile();
        const names = ["", "F", "0F", "0F99999", "99F0", "0Q0", "0F0 x", "-1F0", "0F1.5"];
        const beyond = timeline.makespan + 2;
        return {
          waits: all.map((at) => waitOf(timeline.wait(at), at)), paths, texts, last: timeline.last,
          spent: paths.map((path) => timeline.spent(path)), named: texts.map((text) => timeline.find(text)),
          placed: all.map((at) => timeline.at(timeline.rankOf(at), middle(at))),
          held: [Array.from(during), Array.from(after)], kinds: Array.from(timeline.kind),
          views: windows.map(([from, to]) => timeline.visible(from, to)),
          nowhere: [timeline.at(-1, 0), timeline.at(timeline.ranks, 0), timeline.at(0, beyond, 1)],
          unnamed: names.map((name) => timeline.find(name)),
        };""",
        windows=windows,
    )
    count = range(len(known.texts))
    assert found["texts"] == known.texts
    assert found["waits"] == [[*known.waits[at], known.idle(at), 0] for at in count]
    assert found["paths"] == [known.path(at) for at in count]
    for at, sums in zip(count, found["spent"], strict=True):
        total = sum(sums["letters"]) + sums["transfers"] + sums["copies"]
        assert total == pytest.approx(known.end[at], rel=1e-12)
    assert found["last"] == max(count, key=lambda at: (known.end[at], -at))
    assert found["named"] == list(count)
    assert found["placed"] == list(count) or line.makespan == 0
    assert set(found["nowhere"] + found["unnamed"]) == {-1}
    assert found["kinds"] == line.kind.tolist()
    assert found["held"] == [amounts.tolist() for amounts in memory_profile(plan.problem, plan.orders)]
    for (begin, end), ranks in zip(windows, found["views"], strict=True):
        for rank, (first, stop) in enumerate(ranks):
            part = range(*line.slice_of(rank).indices(len(line)))
            overlapping = {at for at in part if line.start[at] < end and line.end[at] > begin}
            assert overlapping <= set(range(first, stop)) <= set(part)
            assert stop - first <= len(overlapping) + 1


def test_an_entry_of_a_copy_finds_its_forward(in_plan: InPlan) -> None:
    texts = [text for rank in COPIED.orders.all_text() for text in rank]
    copies = [text for text in texts if text[1] in "ODR"]
    body = "return names.map((name) => [name, timeline.find(name)].map((it) => it < 0 ? '' : it));"
    for name, found in in_plan(COPIED, body, names=copies):
        assert Oracle(COPIED).texts[found] == f"{name[0]}F{name[2:]}"
    absent = [
        f"{text[0]}O{text[2:]}" for text in texts if text[1] == "F" and f"{text[0]}O{text[2:]}" not in texts
    ]
    assert absent
    assert {found for _, found in in_plan(COPIED, body, names=absent)} == {""}


def pixels(in_plan: InPlan, plan: Plan, columns: int, options: str = "{}") -> Any:
    """A picture of a plan: (ranks, columns, 4)."""
    body = f"""const highlighted = new Uint8Array(timeline.count);
      highlighted[0] = 1;
      return Array.from(zbv.raster(timeline, 0, timeline.makespan, {columns}, {options}));"""
    return np.array(in_plan(plan, body)).reshape(plan.problem.pp_degree, columns, 4)


def test_the_picture_is_the_one_that_the_server_draws(in_plan: InPlan) -> None:
    ours = pixels(in_plan, SPLIT, 90)
    theirs = image(timeline(SPLIT), 90).view(np.uint8).reshape(3, 90, 4).astype(int)
    assert np.abs(ours[..., 3] - theirs[..., 3]).max() <= 1
    assert np.abs(ours - theirs)[theirs[..., 3] > 8].max() <= 4


def test_idle_time_is_hatched_where_the_objective_counts_it(in_plan: InPlan) -> None:
    bounds = """const boundsOf = (_, rank) => zbv.idleBounds(timeline, rank);
      return [timeline.makespan, ...Array.from({ length: timeline.ranks }, boundsOf)];"""
    makespan, *whole = in_plan(SPLIT, bounds)
    assert whole == [[0, makespan]] * 3
    line = timeline(PLANS["looped"])
    _, *own = in_plan(PLANS["looped"], bounds)
    assert own == [[line.start[line.slice_of(r)][0], line.end[line.slice_of(r)][-1]] for r in range(2)]
    first = pixels(in_plan, SHORT, 40, "{ idle: { fill: [255, 224, 138], hatch: [1, 2, 3] } }")[0]
    # Rank 0 runs F, waits for the gradient, and ends with I and W; in between every fourth column is dark.
    middle = first[12:28]
    assert {tuple(pixel) for pixel in middle} == {(255, 224, 138, 255), (1, 2, 3, 255)}
    assert (middle[:, 0] == 1).sum() == len(middle) / 4


def test_actions_that_are_not_highlighted_are_faint(in_plan: InPlan) -> None:
    plan = PLANS["one rank"]
    row, line = pixels(in_plan, plan, 300, "{ highlighted }")[0], timeline(plan)
    edge = int(line.end[0] / line.makespan * 300)
    assert set(row[: edge - 1, 3]) == {255}
    assert row[edge + 1 :, 3].max() < 64
    assert tuple(row[1, :3]) == rgb(timeline_facts(line, plan.problem)["fills"][line.kind[0]])


def test_measured_times_say_what_was_late(in_plan: InPlan) -> None:
    texts = Oracle(SHORT).texts
    # As planned, but one began 7 after its input had arrived, and the last one 5 after its rank was free.
    waits, spent, words = in_plan(
        SHORT,
        """timeline.start[one] += 7;
        timeline.end[one] += 7;
        timeline.start[other] = timeline.end[other - 1] + 5;
        const path = [one, other];
        const words = zbv.spentInWords(timeline, path);
        return [path.map((at) => timeline.wait(at)), timeline.spent(path), words];""",
        one=texts.index("1F0"),
        other=texts.index("1W0"),
    )
    assert [(wait["by"], wait["late"]) for wait in waits] == [("input", 7), ("rank", 5)]
    assert spent["late"] == 12
    assert words.endswith(", transfers 50, other 12")


def holdings(plan: Plan, rank: int, times: list[float]) -> list[float]:
    """What a rank holds at some times."""
    line = timeline(plan)
    part = line.slice_of(rank)
    columns = (line.start, line.end, line.during, line.after)
    changes = [(0.0, plan.problem.memory.static[rank])]
    entries = [] if line.copies is None else line.copies.entries.tolist()
    actions = zip(*(column[part].tolist() for column in columns), strict=True)
    for at, (start, stop, during, after) in enumerate(actions, part.start):
        now, held = changes[-1]
        for entry, (following, letter, stage, _) in enumerate(entries):
            if line.copies is not None and following == at and letter > O:
                now = max(now, float(line.copies.times[entry, 0])) if letter < R else now
                held += line.copies.moved[stage] * (1 if letter == R else -1)
                changes.append((now, held))
        changes += [(start, during), (stop, after)]
    return [[amount for changed, amount in changes if changed <= time][-1] for time in times]


@pytest.mark.parametrize("plan", [SPLIT, COPIED], ids=["uneven", "copies"])
@pytest.mark.parametrize("shares", [(0.0, 0.4), (0.3, 0.6)])
def test_a_memory_line_has_every_step_in_the_window(
    in_plan: InPlan, shares: tuple[float, float], plan: Plan
) -> None:
    begin, end = (share * timeline(plan).makespan for share in shares)
    body = """const ranks = Array.from({ length: timeline.ranks }, (_, rank) => rank);
      return ranks.map((rank) => zbv.stepsIn(timeline, rank, begin, end));"""
    times = np.linspace(begin, end, 97)[1:-1].tolist()
    for rank, drawn in enumerate(in_plan(plan, body, begin=begin, end=end)):
        points = list(zip(drawn["at"], drawn["held"], strict=True))
        seen = [[amount for changed, amount in points if changed <= time][-1] for time in times]
        assert seen == holdings(plan, rank, times)
        assert (points[0][0], points[-1][0]) == (begin, end)


@pytest.mark.parametrize("plan", [SPLIT, COPIED], ids=["uneven", "copies"])
@pytest.mark.parametrize("columns", [1, 7, 50])
def test_the_band_is_between_the_least_and_the_most_loaded_rank(
    in_plan: InPlan, columns: int, plan: Plan
) -> None:
    """The memory of a picture with few columns misses no peak."""
    makespan, ranks = timeline(plan).makespan, range(plan.problem.pp_degree)
    band, each, empty = in_plan(
        plan,
        """const end = timeline.makespan;
        const each = ranks.map((rank) => zbv.columnPeaks(timeline, rank, 0, end, columns));
        const beyond = zbv.extremes(timeline, 2 * end, 3 * end, columns);
        return [zbv.extremes(timeline, 0, end, columns), each, beyond];""",
        columns=columns,
        ranks=list(ranks),
    )
    held = np.array([one["held"] for one in each])
    assert band["low"] == held.min(axis=0).tolist()
    assert band["high"] == held.max(axis=0).tolist()
    times = (np.arange(20 * columns) + 0.5) / (20 * columns) * makespan
    for rank in ranks:
        holds = np.array(holdings(plan, rank, times.tolist())).reshape(columns, 20)
        assert np.all(held[rank][:columns] >= holds.max(axis=1))
    assert held.max(axis=1).tolist() == list(plan.metrics.peak_memory)
    assert empty["at"] == []


def test_a_range_keeps_within_the_time_and_above_the_shortest_length(in_plan: InPlan) -> None:
    *seen, (shortest, last) = in_plan(
        SPLIT,
        """const range = new zbv.TimeRange([timeline]);
        const seen = [];
        range.changed = () => seen.push([range.start, range.end]);
        range.zoom(0.5, range.last / 4);
        range.pan(-range.last);
        range.pan(range.last);
        range.zoom(1e-9, range.last);
        range.move("out");
        range.move("all");
        return [...seen, [range.shortest, range.last]];""",
    )
    assert last == SPLIT.metrics.makespan
    assert seen[0] == pytest.approx([last / 8, last * 5 / 8]), "the time at the pointer stays in place"
    assert seen[1:3] == [[0, last / 2], [last / 2, last]]
    assert seen[3] == pytest.approx([last - shortest, last])
    assert seen[4] == pytest.approx([last - 2 * shortest, last])
    assert seen[5] == [0, last]


def test_without_copies_the_same_actions_hold_what_the_order_without_copies_does(in_plan: InPlan) -> None:
    held = in_plan(COPIED, "return Object.values(timeline.withoutCopies().profile()).map((it) => [...it]);")
    known = memory_profile(COPIED.problem, COPIED.orders.without_copies())
    assert held == [pytest.approx(each.tolist()) for each in known]
    assert sum(held[0]) > sum(memory_profile(COPIED.problem, COPIED.orders)[0])
