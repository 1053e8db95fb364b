"""The plan's page in a browser: it shows the schedule, answers to the mouse and keys, and calls nobody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Route
from zbv_solver.export import export, quantities
from zbv_solver.export.palette import KIND_FILLS, rgb
from zbv_solver.export.timeline import idle_shares, timeline
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.jitter import DEFAULT_JITTER, simulate
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import earliest_times, evaluate, memory_profile

from web.browsing import Look, Service
from web.oracle import Oracle

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def address(service: Service, plan: Plan) -> str:
    return f"{service.url}/plans/{plan.plan_id}"


@pytest.fixture(scope="module")
def page_of_plan(look: Callable[..., Look], service: Service, address: str) -> Look:
    found = look(service.url)
    found.open(address)
    return found


@pytest.fixture
def opened(page_of_plan: Look) -> Look:
    """The plan's page, showing all of it."""
    page_of_plan.page.get_by_role("button", name="Show all").click()
    page_of_plan.settle()
    return page_of_plan


def place(look: Look, plan: Plan, at: int) -> tuple[float, float]:
    """Where the middle of an action is in the window."""
    known = Oracle(plan)
    return look.point_at((known.start[at] + known.end[at]) / 2, known.rank[at], plan.orders.pp_degree)


def point(look: Look, plan: Plan, at: int) -> None:
    """Move the mouse to an action."""
    x, y = place(look, plan, at)
    look.page.mouse.move(x, y - 1)
    look.page.mouse.move(x, y)


def test_it_shows_how_schedules_behave_when_durations_vary(opened: Look, plan: Plan) -> None:
    section = opened.page.get_by_role("region", name="When durations vary").first
    rows = section.locator("tbody tr")
    assert rows.locator("th").all_inner_texts() == ["this plan", *(each.name for each in plan.baselines)]
    expected = simulate(plan, DEFAULT_JITTER).spans.p95_span
    assert rows.first.locator("td").nth(2).inner_text() == quantities.figure(expected)


def test_it_shows_the_schedule_and_what_it_achieves(opened: Look, plan: Plan) -> None:
    page = opened.page
    assert page.locator("h1").inner_text() == "4 ranks × 8 microbatches"
    assert page.locator("#chart canvas").count() == 3
    assert page.get_attribute("#chart", "data-bars") == str(len(plan.orders))
    cards = page.locator(".card").all_inner_texts()
    assert [card.split("\n")[0] for card in cards[:3]] == ["Span", "Makespan", "Bubble"]
    table = page.get_by_role("region", name="Compared with classical schedules").first
    rows = table.locator("tbody th").all_inner_texts()
    assert rows == ["this plan", *(baseline.name for baseline in plan.baselines)]
    opened.keep("plan-light")


def test_bars_are_where_the_plan_says(opened: Look, plan: Plan) -> None:
    assert opened.drawn("bars") == list(range(len(plan.orders)))
    line = timeline(plan)
    opened.draw_area()  # scrolls to the chart
    screen = opened.screen()
    for at in range(len(line)):
        x, y = place(opened, plan, at)
        assert tuple(screen[round(y + 10), round(x)]) == rgb(KIND_FILLS[line.kind[at]]), line.text(at)


def test_a_tooltip_describes_an_action_and_its_wait(opened: Look, plan: Plan) -> None:
    known = Oracle(plan)
    waiting = [
        next(at for at in range(len(known.texts)) if known.waits[at][0] == by and known.idle(at) is not None)
        for by in ("input", "rank")
    ]
    for at in waiting:
        point(opened, plan, at)
        opened.tooltip().get_by_text(known.texts[at], exact=True).wait_for()
        said = dict(pairwise(opened.tooltip().inner_text().split("\n")))
        assert said["start"] == f"{quantities.figure(known.start[at], 9)} µs"
        assert said["end"] == f"{quantities.figure(known.end[at], 9)} µs"
        assert said["rank"] == str(known.rank[at])
        assert said["microbatch"] == known.texts[at].split(known.letter(at))[1]
        idle = known.idle(at)
        assert said["idle before"] == (f"{quantities.figure(idle, 9)} µs" if idle else "none")
        by, awaited = known.waits[at]
        assert known.texts[awaited] in said["waited for"]
        assert (f"from rank {known.rank[awaited]}" in said["waited for"]) == (by == "input")


def test_the_wait_of_every_action_matches_the_plan(opened: Look, plan: Plan) -> None:
    found = opened.page.evaluate(
        """() => {
          const { timeline } = zbv.chart.gantts[0];
          return Array.from({ length: timeline.count }, (_, at) => {
            const { by, action, late } = timeline.wait(at);
            return [by, action, timeline.idle(at), late];
          });
        }"""
    )
    known = Oracle(plan)
    assert found == [[*known.waits[at], known.idle(at), 0] for at in range(len(known.texts))]


def test_every_critical_path_matches_the_plan(opened: Look, plan: Plan) -> None:
    paths, spent = opened.page.evaluate(
        """() => {
          const { timeline } = zbv.chart.gantts[0];
          const all = Array.from({ length: timeline.count }, (_, at) => timeline.criticalPath(at));
          return [all, all.map((path) => timeline.spent(path))];
        }"""
    )
    known = Oracle(plan)
    assert paths == [known.path(at) for at in range(len(known.texts))]
    for at, sums in enumerate(spent):
        assert sum(sums["letters"]) + sums["transfers"] == pytest.approx(known.end[at], rel=1e-12)
        assert sums["late"] == 0


def test_memory_lines_match_the_plan(opened: Look, plan: Plan) -> None:
    lines = opened.page.evaluate(
        "() => zbv.chart.memory.drawn.map(({ steps }) => [steps.at, steps.held])",
    )
    known = Oracle(plan)
    during, after = memory_profile(plan.problem, plan.orders)
    for rank, (at, held) in enumerate(lines):
        part = plan.orders.slice_of(rank)
        for action in range(part.start, part.stop):
            for when, amount in ((known.start[action], during[action]), (known.end[action], after[action])):
                later = [h for t, h in zip(at, held, strict=True) if t <= when]
                assert later[-1] == amount or known.end[action] == when, (rank, action)
        assert max(held) == plan.metrics.peak_memory[rank]


def test_clicking_an_action_shows_its_microbatch_and_its_critical_path(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    at = max(range(len(known.texts)), key=lambda each: len(known.path(each)))
    page.mouse.click(*place(opened, plan, at))
    panel = page.locator("#inspector")
    panel.wait_for()
    words = panel.inner_text()
    assert words.startswith(known.texts[at])
    assert f"{len(known.path(at))} actions from {known.texts[known.path(at)[0]]}" in words
    during, after = memory_profile(plan.problem, plan.orders)
    assert f"{quantities.figure(during[at])}, then {quantities.figure(after[at])}" in words

    highlighted, selected = page.evaluate(
        "() => [[...zbv.chart.gantts[0].highlighted], zbv.chart.gantts[0].selected]"
    )
    microbatch = plan.orders.microbatch.tolist()
    assert highlighted == [int(each == microbatch[at]) for each in microbatch]
    assert selected == at
    line = opened.drawn("path")
    assert (line["x"][0], line["x"][-1]) == (0, known.end[at])
    corners = set(zip(line["x"], [round(y - 0.46) for y in line["y"]], strict=True))
    assert corners <= {
        (x, known.rank[each]) for each in known.path(at) for x in (known.start[each], known.end[each])
    }
    own, other = microbatch.index(microbatch[at]), microbatch.index((microbatch[at] + 1) % 8)
    fills = [rgb(KIND_FILLS[timeline(plan).kind[each]]) for each in (own, other)]
    painted = [opened.colour_at(x, y + 10) for x, y in (place(opened, plan, each) for each in (own, other))]
    assert painted[0] == fills[0]
    assert min(painted[1]) > min(fills[1]), "dimmed"
    opened.keep("plan-chosen")

    page.keyboard.press("Escape")
    panel.wait_for(state="hidden")
    assert page.evaluate("() => zbv.chart.gantts[0].highlighted") is None


def test_an_action_is_found_by_name_and_arrow_keys_step_on(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    field, head = page.get_by_label("Find action", exact=True), page.locator('[data-part="head"] b')
    field.fill("9Q9")
    field.press("Enter")
    assert "9Q9 not found" in page.locator("#find-complaint").inner_text()
    assert field.get_attribute("aria-invalid") == "true"

    field.fill(" 3i5 ")
    field.press("Enter")
    assert head.inner_text() == "3I5"
    assert page.locator("#find-complaint").is_hidden()
    at = known.texts.index("3I5")
    page.locator("#chart").focus()
    page.keyboard.press("ArrowRight")
    assert head.inner_text() == known.texts[at + 1]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert head.inner_text() == known.texts[at - 1]
    page.keyboard.press("ArrowRight")
    own = sorted(
        (each for each in range(len(known.texts)) if known.texts[each].endswith(("F5", "I5", "W5", "B5"))),
        key=lambda each: (known.start[each], plan.orders.stage[each]),
    )
    page.keyboard.press("ArrowDown")
    assert head.inner_text() == known.texts[own[own.index(at) + 1]]
    page.get_by_role("button", name="↑ Microbatch").click()
    assert head.inner_text() == "3I5"
    awaited = known.waits[at][1]
    page.locator('[data-part="waited"]').get_by_role("button", name=known.texts[awaited], exact=True).click()
    assert head.inner_text() == known.texts[awaited]

    page.get_by_role("button", name="Zoom to action").click()
    opened.settle()
    start, end = opened.window()
    assert start < known.start[awaited] < known.end[awaited] < end < start + plan.metrics.makespan
    page.get_by_role("button", name="Close").click()
    assert page.evaluate("() => document.activeElement.id") == "find-action"


def test_the_whole_critical_path_is_drawn_and_its_time_accounted_for(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    button = page.get_by_role("button", name="Critical path")
    button.click()
    last = max(range(len(known.texts)), key=lambda at: (known.end[at], -at))
    path = known.path(last)
    said = page.locator("#critical-path").inner_text()
    assert f"{len(path)} actions from {known.texts[path[0]]} to the last end" in said
    for letter in {known.letter(at) for at in path}:
        time = sum(known.end[at] - known.start[at] for at in path if known.letter(at) == letter)
        assert f"{letter} {quantities.figure(time, 9)} µs" in said
    assert "the iteration shown" in said
    drawn = opened.drawn("path.x")
    assert (min(drawn), max(drawn)) == (0, plan.metrics.makespan)
    opened.keep("plan-critical-path")
    button.click()
    assert page.locator("#critical-path").is_hidden()
    assert opened.drawn("path.x") == []


def test_idle_time_is_hatched_on_request_and_summed_per_rank(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    button = page.get_by_role("button", name="Idle time")
    button.click()
    idle = opened.drawn("idle")
    found = [list(each) for each in zip(idle["rank"], idle["left"], idle["right"], strict=True)]
    gaps = [
        [known.rank[at], known.end[at - 1], known.start[at]]
        for at in range(1, len(known.texts))
        if known.rank[at] == known.rank[at - 1] and known.start[at] > known.end[at - 1]
    ]
    assert found == gaps
    opened.keep("plan-idle")
    button.click()
    assert opened.drawn("idle.left") == []
    notes = page.evaluate("() => zbv.chart.gantts[0].notes")
    assert notes == [quantities.percent(share, 1) for share in idle_shares(plan)]


def test_dragging_zooms_into_the_range(opened: Look) -> None:
    before, numbers = opened.window(), opened.drawn("labels")
    left, top, width, height = opened.draw_area()
    mouse = opened.page.mouse
    mouse.move(left + width * 0.4, top + height / 2)
    mouse.down()
    mouse.move(left + width * 0.45, top + height / 2, steps=3)
    mouse.move(left + width * 0.5, top + height / 2, steps=3)
    mouse.up()
    opened.settle()

    start, end = opened.window()
    length = before[1] - before[0]
    assert start == pytest.approx(before[0] + 0.4 * length, abs=0.01 * length)
    assert end == pytest.approx(before[0] + 0.5 * length, abs=0.01 * length)
    assert opened.drawn("labels") != numbers
    assert 0 < int(opened.page.get_attribute("#chart", "data-bars") or 0) < 100


def test_the_wheel_zooms_with_ctrl_and_scrolls_the_page_without(opened: Look) -> None:
    page, before = opened.page, opened.window()
    left, top, width, height = opened.draw_area()
    page.mouse.move(left + width / 2, top + height / 2)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(200)
    assert opened.window() == before
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_timeout(200)
    start, end = opened.window()
    assert end - start < before[1] - before[0]


def test_buttons_move_through_time_by_keyboard(opened: Look) -> None:
    page, whole = opened.page, opened.window()
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    zoomed = opened.window()
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.get_by_role("button", name="Later").focus()
    page.keyboard.press("Enter")
    assert opened.window()[0] > zoomed[0]
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Zoom out").click()
    page.get_by_role("button", name="Show all").click()
    assert opened.window() == pytest.approx(whole)


def test_keys_and_the_pointer_move_through_time(opened: Look) -> None:
    page, whole = opened.page, opened.window()
    page.locator("#chart").focus()
    page.keyboard.press("+")
    page.keyboard.press("Shift+ArrowRight")
    zoomed = opened.window()
    assert zoomed == pytest.approx((whole[1] / 2, whole[1]))
    left, top, width, height = opened.draw_area()
    page.keyboard.down("Shift")
    page.mouse.move(left + 100, top + height / 2)
    page.mouse.down()
    page.mouse.move(left + 100 + width / 4, top + height / 2, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert opened.window()[0] == pytest.approx(zoomed[0] - whole[1] / 8, rel=0.02)
    before = opened.window()[0]
    page.mouse.wheel(100, 0)
    page.wait_for_function("(start) => zbv.chart.range.start > start", arg=before)
    page.locator("#chart").focus()
    page.keyboard.press("0")
    assert opened.window() == pytest.approx(whole)
    assert page.locator("#inspector").is_hidden(), "a drag is no click"


def test_the_overview_moves_and_zooms(opened: Look) -> None:
    page, whole = opened.page, opened.window()
    page.get_by_role("button", name="Zoom in").click()
    box = page.locator("canvas.overview").bounding_box()
    left, _, width, _ = opened.draw_area()
    assert box is not None
    box = page.locator("canvas.overview").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.click(left + 0.1 * width, y)
    assert opened.window() == pytest.approx((0, whole[1] / 2))
    page.mouse.move(left + 0.25 * width, y)
    page.mouse.down()
    page.mouse.move(left + 0.5 * width, y, steps=4)
    page.mouse.up()
    assert opened.window()[0] == pytest.approx(whole[1] / 4, rel=0.02)
    page.mouse.move(left + 0.25 * width, y)
    page.mouse.down()
    page.mouse.move(left + 0.5 * width, y, steps=4)
    page.mouse.up()
    assert opened.window() == pytest.approx((whole[1] / 2, 0.75 * whole[1]), rel=0.02)


def test_the_legend_hides_memory_lines_and_a_tooltip_names_them(opened: Look, plan: Plan) -> None:
    page = opened.page
    button = page.locator(".memory-legend").get_by_role("button", name="rank 1")
    assert button.get_attribute("aria-pressed") == "true"
    canvas = page.locator("canvas.memory")
    canvas.scroll_into_view_if_needed()
    before = canvas.screenshot()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.mouse.move(0, 0)
    opened.page.wait_for_timeout(100)
    assert canvas.screenshot() != before
    button.click()
    box = canvas.bounding_box()
    assert box is not None
    held, y = page.evaluate(
        """() => {
          const { memory, range } = zbv.chart;
          const { steps } = memory.drawn[2];
          const at = steps.at.findLastIndex((time) => time <= range.end / 2);
          const { top, height } = memory.surface.frame;
          return [steps.held[at], top + height * (1 - steps.held[at] / memory.top)];
        }"""
    )
    left, _, width, _ = opened.draw_area()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(left + width / 2, box["y"] + y)
    said = dict(pairwise(opened.tooltip().inner_text().split("\n")))
    assert said["held"] == quantities.figure(held)


def test_the_view_is_saved_as_a_picture(opened: Look) -> None:
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Save PNG").click()
    assert download.value.suggested_filename == "schedule.png"
    with Image.open(download.value.path()) as picture:
        assert picture.width > 1000


def test_a_finger_moves_and_two_fingers_zoom(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url, **PHONE)
    found.open(address)
    page, whole = found.page, found.window()
    left, top, width, height = found.draw_area()
    touch = page.context.new_cdp_session(page)

    def send(kind: str, *places: float) -> None:
        points = [{"x": x, "y": top + height / 2, "id": at} for at, x in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", left + 0.4 * width, left + 0.6 * width)
    for share in (0.35, 0.3, 0.25):
        send("touchMove", left + share * width, left + (1 - share) * width)
    send("touchEnd")
    page.wait_for_function("(length) => zbv.chart.range.length < 0.6 * length", arg=whole[1])
    zoomed = found.window()
    send("touchStart", left + 0.3 * width)
    for share in (0.4, 0.5, 0.6):
        send("touchMove", left + share * width)
    send("touchEnd")
    page.wait_for_function("(start) => zbv.chart.range.start < start", arg=zoomed[0])
    assert found.window()[1] - found.window()[0] == pytest.approx(zoomed[1] - zoomed[0])


def test_every_action_is_listed(opened: Look, plan: Plan) -> None:
    opened.page.locator("details").nth(1).locator("summary").click()
    listed = opened.page.locator("details").nth(1).locator(".actions code").all_inner_texts()
    assert listed == plan.orders.text(1)


def test_exports_are_linked_and_answer(opened: Look, plan: Plan) -> None:
    links = opened.page.locator(".exports a")
    names = links.all_inner_texts()
    machines = ["torch-csv", "torch-comms-csv", "torchtitan", "chrome-trace"]
    assert names == ["json", *machines, "svg", "html"]
    for url in links.evaluate_all("links => links.map((link) => link.href)"):
        answer = opened.page.request.get(url)
        assert answer.ok, url
        assert len(answer.body()) > 100
        assert "attachment" in answer.headers.get("content-disposition", "") or url.endswith(plan.plan_id)


def test_the_page_links_to_what_a_reader_may_do_next(opened: Look, service: Service, plan: Plan) -> None:
    links = opened.page.locator(".next a")
    found = dict(
        zip(
            links.all_inner_texts(),
            links.evaluate_all("links => links.map((link) => link.href)"),
            strict=True,
        )
    )
    assert found == {
        "Change and search again": f"{service.url}/new?from={plan.plan_id}",
        "Compare": f"{service.url}/plans/{plan.plan_id}/compare",
        "Memory and time": f"{service.url}/plans/{plan.plan_id}/frontier",
        "Trace for Perfetto": f"{service.url}/v1/plans/{plan.plan_id}/export/chrome-trace",
    }


def test_the_console_is_empty_and_no_request_leaves_the_origin(opened: Look) -> None:
    opened.page.get_by_role("button", name="Zoom in").click()
    opened.settle()
    assert opened.complaints == []
    assert opened.strangers() == []
    assert any(url.endswith("/plan.js") for url in opened.requests)


def test_dark_mode_is_dark_and_follows_a_change(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url, color_scheme="dark")
    found.open(address)
    left, top, _, height = found.draw_area()
    corner = (left + 3, top + height - 3)  # the last rank waits for its first activation
    assert found.colour_at(*corner) == (11, 14, 20)
    body = found.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert body == "rgb(11, 14, 20)"
    found.keep("plan-dark")
    found.page.emulate_media(color_scheme="light")
    found.page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    found.page.wait_for_timeout(100)
    assert found.colour_at(*corner) == (255, 255, 255)
    assert found.complaints == []


def test_charts_have_the_same_colours_with_reduced_motion(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    seen = look(service.url, reduced_motion="reduce")
    seen.open(address)
    seen.settle()
    still = seen.screen()
    seen.page.emulate_media(reduced_motion="no-preference")
    seen.page.reload()
    seen.settle()
    assert np.array_equal(seen.screen(), still)


@pytest.fixture(scope="module")
def page_of_large_plan(look: Callable[..., Look], service: Service, large_plan: Plan) -> Look:
    found = look(service.url)
    found.open(service.import_plan(large_plan))
    return found


@pytest.fixture
def large(page_of_large_plan: Look) -> Look:
    """The page of a plan that is drawn as a picture, showing all of it."""
    page_of_large_plan.page.get_by_role("button", name="Show all").click()
    page_of_large_plan.settle()
    return page_of_large_plan


def test_idle_time_shows_in_the_picture_of_a_large_plan(large: Look) -> None:
    opaque = """() => {
      const bytes = zbv.chart.gantts[0].drawn.pixels;
      return bytes.filter((_, at) => at % 4 === 3 && bytes[at] === 255).length / (bytes.length / 4);
    }"""
    before = large.page.evaluate(opaque)
    large.page.get_by_role("button", name="Idle time").click()
    assert before < 0.1
    assert large.page.evaluate(opaque) > 0.9
    large.keep("large-plan-idle", whole=False)
    large.page.get_by_role("button", name="Idle time").click()
    assert large.page.evaluate(opaque) == before


def test_a_chosen_action_shows_in_the_picture_of_a_large_plan(large: Look, large_plan: Plan) -> None:
    page = large.page
    page.get_by_label("Find action", exact=True).fill("3F100")
    page.get_by_label("Find action", exact=True).press("Enter")
    own = int((large_plan.orders.microbatch == 100).sum())
    assert len(page.evaluate("() => zbv.chart.gantts[0].outlined")) == own
    assert len(large.drawn("path.x")) > 2
    large.keep("large-plan-chosen", whole=False)
    page.keyboard.press("Escape")
    assert page.evaluate("() => zbv.chart.gantts[0].outlined") == large.drawn("path.x") == []


@pytest.mark.parametrize("columns", [1, 7, 400])
def test_the_memory_of_a_large_plan_misses_no_peak(large: Look, large_plan: Plan, columns: int) -> None:
    start, end = earliest_times(large_plan.problem, large_plan.orders)
    during, after = memory_profile(large_plan.problem, large_plan.orders)
    length = float(end.max())
    found = large.page.evaluate(
        """async ([length, columns]) => {
          const { columnPeaks } = await import(document.querySelector("link[href$='memory.js']").href);
          return columnPeaks(zbv.chart.gantts[0].timeline, 2, 0, length, columns).held;
        }""",
        [length, columns],
    )
    part = large_plan.orders.slice_of(2)
    times = np.stack([start[part], end[part]], axis=1).ravel()
    held = np.concatenate(([0.0], np.stack([during[part], after[part]], axis=1).ravel()))
    assert max(found) == large_plan.metrics.peak_memory[2]
    for at, peak in enumerate(found):
        # A change at the very edge of a column may count to both.
        left, right = at * length / columns, (at + 1) * length / columns
        inside = held[np.searchsorted(times, left, "right") : np.searchsorted(times, right) + 1]
        touching = held[np.searchsorted(times, left) : np.searchsorted(times, right, "right") + 1]
        assert inside.max() <= peak <= touching.max(), at


def test_a_large_plan_is_a_picture_that_turns_into_bars_when_zoomed_in(large: Look, large_plan: Plan) -> None:
    found = large
    assert found.page.get_attribute("#chart", "data-bars") == "0"
    assert found.drawn("bars") == found.drawn("labels") == []
    found.keep("large-plan", whole=False)

    for _ in range(7):
        found.page.get_by_role("button", name="Zoom in").click()
    found.settle()
    assert found.page.get_attribute("#chart", "data-bars") != "0"
    timing = evaluate(large_plan.problem, large_plan.orders)
    start, end = found.window()
    visible = {
        text
        for text, begins, ends in zip(
            (text for texts in large_plan.orders.all_text() for text in texts),
            timing.start.tolist(),
            timing.end.tolist(),
            strict=True,
        )
        if start < (begins + ends) / 2 < end
    }
    drawn = found.page.evaluate(
        "() => zbv.chart.gantts[0].drawn.bars.map((at) => zbv.chart.gantts[0].timeline.text(at))"
    )
    assert visible <= set(drawn)
    assert len(drawn) <= len(visible) + 2 * large_plan.problem.pp_degree
    assert found.complaints == []
    found.keep("large-plan-zoomed", whole=False)


def test_without_its_actions_the_page_shows_an_error_and_the_rest(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url)
    page = found.page
    page.route("**/actions?*", lambda route: route.fulfill(status=503))
    page.goto(address)
    page.wait_for_selector('#chart[data-state="failed"]')
    assert "answered with status 503" in page.locator("#chart").inner_text()
    assert page.locator("tbody tr").count() > 1


def test_before_it_is_drawn_the_chart_has_its_height(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found, height = look(service.url), "document.getElementById('chart').offsetHeight"
    held: list[Route] = []
    found.page.route("**/actions?*", lambda route: held.append(route))
    found.page.goto(address)
    before = found.page.evaluate(height)
    for route in held:
        route.continue_()
    found.page.wait_for_selector('#chart[data-state="ready"]')
    assert found.page.evaluate(height) == before


def test_the_standalone_file_has_every_function_of_the_page(
    look: Callable[..., Look], plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(export(plan, "html"), encoding="utf-8")
    found = look("file://", offline=True, color_scheme="dark")
    found.open(path.as_uri())
    page, known = found.page, Oracle(plan)
    page.get_by_role("button", name="Idle time").click()
    assert found.drawn("idle.left") != []
    page.get_by_role("button", name="Critical path").click()
    page.get_by_label("Find action", exact=True).fill("3F2")
    page.get_by_label("Find action", exact=True).press("Enter")
    at = known.texts.index("3F2")
    assert f"{len(known.path(at))} actions" in page.locator('[data-part="path"]').inner_text()
    assert page.locator(".next").count() == page.locator(".exports").count() == 0
    assert found.complaints == []
    assert found.requests == [path.as_uri()]
    found.keep("plan-standalone")


def test_long_names_of_schedules_leave_room_for_the_last_column(
    look: Callable[..., Look], tmp_path: Path
) -> None:
    costs = {name: {"tokens": 1} for name in ("forward", "backward_input", "backward_weight")}
    document = {"pp_degree": 2, "microbatches": 3, "features": {"tokens": [1000, 2000, 4000]}, "costs": costs}
    plan = search(parse_problem({**document, "units": {"time": "us"}}), SearchOptions("quick"))
    path = tmp_path / "plan.html"
    path.write_text(export(plan, "html"), encoding="utf-8")
    found = look("file://", offline=True)
    found.open(path.as_uri())
    rows = found.page.locator('.scroll[aria-labelledby="baselines"]')
    assert rows.get_by_role("rowheader", name="interleaved-1f1b-practice").is_visible()
    assert rows.evaluate("(it) => it.scrollWidth <= it.clientWidth")
