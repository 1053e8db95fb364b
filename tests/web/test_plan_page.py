"""A plan's page in a browser: its chart shows the schedule and answers to the mouse, fingers and keys."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from support.processes import wait_until
from zbv_solver.export import export, quantities
from zbv_solver.export.palette import KIND_FILLS, rgb
from zbv_solver.export.timeline import idle_shares, timeline
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.timing.start_times import evaluate, memory_profile

from web.browsing import PHONE, PROBLEM, Look, Open, Service
from web.oracle import Oracle

GANTT = "zbv.chart.gantts[0]"


@pytest.fixture(scope="module")
def address(service: Service, plan: Plan) -> str:
    return f"{service.url}/plans/{plan.plan_id}"


@pytest.fixture(scope="module")
def page_of_plan(look: Open, service: Service, address: str) -> Look:
    found = look(service.url)
    found.open(address)
    return found


@pytest.fixture
def opened(page_of_plan: Look) -> Look:
    """The plan's page, showing all of it."""
    page_of_plan.page.get_by_role("button", name="Show all").click()
    page_of_plan.settle()
    return page_of_plan


@pytest.fixture(scope="module")
def known(plan: Plan) -> Oracle:
    return Oracle(plan)


def place(look: Look, known: Oracle, at: int) -> tuple[float, float]:
    """Where the middle of an action is in the window."""
    return look.point_at((known.start[at] + known.end[at]) / 2, known.rank[at], max(known.rank) + 1)


def drag(look: Look, y: float, start: float, end: float) -> None:
    mouse = look.page.mouse
    mouse.move(start, y)
    mouse.down()
    mouse.move(end, y, steps=4)
    mouse.up()


def find(look: Look, name: str) -> None:
    field = look.page.get_by_label("Find action", exact=True)
    field.fill(name)
    field.press("Enter")


def test_bars_are_where_the_plan_says(opened: Look, plan: Plan, known: Oracle) -> None:
    assert opened.page.get_attribute("#chart", "data-bars") == str(len(plan.orders))
    assert opened.drawn("bars") == list(range(len(plan.orders)))
    line = timeline(plan)
    opened.draw_area()  # scrolls to the chart
    screen = opened.screen()
    for at in range(len(line)):
        x, y = place(opened, known, at)
        assert tuple(screen[round(y + 10), round(x)]) == rgb(KIND_FILLS[line.kind[at]]), line.text(at)


def test_a_tooltip_describes_an_action_and_its_wait(opened: Look, known: Oracle) -> None:
    by_input = (at for at, wait in enumerate(known.waits) if wait[0] == "input")
    at = next(at for at in by_input if known.idle(at))
    x, y = place(opened, known, at)
    opened.page.mouse.move(x, y - 1)
    opened.page.mouse.move(x, y)
    opened.tooltip().get_by_text(known.texts[at], exact=True).wait_for()
    said = dict(pairwise(opened.tooltip().inner_text().split("\n")))
    times = {"start": known.start[at], "end": known.end[at], "idle before": known.idle(at) or 0}
    assert {name: said[name] for name in times} == {
        name: f"{quantities.figure(value, 9)} µs" for name, value in times.items()
    }
    assert said["rank"] == str(known.rank[at])
    awaited = known.waits[at][1]
    assert f"{known.texts[awaited]} from rank {known.rank[awaited]}" in said["waited for"]


def test_clicking_an_action_shows_its_microbatch_and_path(opened: Look, plan: Plan, known: Oracle) -> None:
    page = opened.page
    at = max(range(len(known.texts)), key=lambda each: len(known.path(each)))
    page.mouse.click(*place(opened, known, at))
    panel = page.locator("#inspector")
    panel.wait_for()
    words = panel.inner_text()
    assert words.startswith(known.texts[at])
    assert f"{len(known.path(at))} actions from {known.texts[known.path(at)[0]]}" in words
    during, after = memory_profile(plan.problem, plan.orders)
    assert f"{quantities.figure(during[at])}, then {quantities.figure(after[at])}" in words

    microbatch = plan.orders.microbatch.tolist()
    highlighted, selected = page.evaluate(f"() => [[...{GANTT}.highlighted], {GANTT}.selected]")
    assert highlighted == [int(each == microbatch[at]) for each in microbatch]
    assert selected == at
    line = opened.drawn("path")
    assert (line["x"][0], line["x"][-1]) == (0, known.end[at])
    corners = set(zip(line["x"], [round(y - 0.46) for y in line["y"]], strict=True))
    path = known.path(at)
    assert corners <= {(x, known.rank[each]) for each in path for x in (known.start[each], known.end[each])}
    own, other = microbatch.index(microbatch[at]), microbatch.index((microbatch[at] + 1) % 8)
    fills = [rgb(KIND_FILLS[timeline(plan).kind[each]]) for each in (own, other)]
    painted = [opened.colour_at(x, y + 10) for x, y in (place(opened, known, each) for each in (own, other))]
    assert painted[0] == fills[0]
    assert min(painted[1]) > min(fills[1]), "dimmed"

    page.keyboard.press("Escape")
    panel.wait_for(state="hidden")
    assert page.evaluate(f"() => {GANTT}.highlighted") is None


def test_an_action_is_found_by_name_and_arrow_keys_step_on(opened: Look, plan: Plan, known: Oracle) -> None:
    page = opened.page
    head = page.locator('[data-part="head"] b')
    find(opened, "9Q9")
    assert "9Q9 not found" in page.locator("#find-complaint").inner_text()
    assert page.get_by_label("Find action", exact=True).get_attribute("aria-invalid") == "true"
    find(opened, " 3i5 ")
    assert head.inner_text() == "3I5"
    assert page.locator("#find-complaint").is_hidden()
    at = known.texts.index("3I5")
    own = sorted(
        (each for each, text in enumerate(known.texts) if text.endswith(("F5", "I5", "W5", "B5"))),
        key=lambda each: (known.start[each], plan.orders.stage[each]),
    )
    page.locator("#chart").focus()
    for key, expected in (("ArrowRight", at + 1), ("ArrowLeft", at), ("ArrowDown", own[own.index(at) + 1])):
        page.keyboard.press(key)
        assert head.inner_text() == known.texts[expected]
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


def test_details_cover_no_rank_and_narrow_bars_have_all_numbers_or_none(look: Open, service: Service) -> None:
    plan = service.search({**PROBLEM, "microbatches": 12})
    seen = look(service.url, viewport={"width": 1280, "height": 800})
    seen.open(f"{service.url}/plans/{plan.plan_id}")
    assert {len(number) for number in seen.drawn("labels")} in (set(), {1, 2})
    page = seen.page
    page.set_viewport_size({"width": 860, "height": 800})
    find(seen, "1F2")
    page.locator("#inspector").wait_for()
    seen.settle()
    rows, details = (page.locator(each).bounding_box() for each in ("canvas.gantt", "#inspector"))
    assert rows is not None
    assert details is not None
    assert rows["y"] >= 0
    assert rows["y"] + rows["height"] <= details["y"]


def test_the_critical_path_and_idle_time_are_drawn_if_asked(opened: Look, plan: Plan, known: Oracle) -> None:
    page = opened.page
    button = page.get_by_role("button", name="Critical path")
    button.click()
    path = known.path(max(range(len(known.texts)), key=lambda at: (known.end[at], -at)))
    said = page.locator("#critical-path").inner_text()
    assert f"{len(path)} actions from {known.texts[path[0]]} to the last end" in said
    spent = sum(known.end[at] - known.start[at] for at in path if known.letter(at) == "F")
    assert f"F {quantities.figure(spent, 9)} µs" in said
    drawn = opened.drawn("path.x")
    assert (min(drawn), max(drawn)) == (0, plan.metrics.makespan)
    find(opened, known.texts[0])
    assert page.locator("#critical-path").is_hidden(), "the path that is drawn is that of the action"
    page.keyboard.press("Escape")
    assert page.locator("#critical-path").is_visible()
    button.click()
    assert page.locator("#critical-path").is_hidden()
    assert opened.drawn("path.x") == []

    button = page.get_by_role("button", name="Idle time")
    button.click()
    idle = opened.drawn("idle")
    assert [*zip(idle["rank"], idle["left"], idle["right"], strict=True)] == [
        (known.rank[at], known.end[at - 1], known.start[at])
        for at in range(1, len(known.texts))
        if known.rank[at] == known.rank[at - 1] and known.start[at] > known.end[at - 1]
    ]
    button.click()
    assert opened.drawn("idle.left") == []
    notes = page.evaluate(f"() => {GANTT}.notes")
    assert notes == [quantities.percent(share, 1) for share in idle_shares(plan)]


def test_the_mouse_moves_and_zooms_the_chart(opened: Look) -> None:
    page, (_, length) = opened.page, opened.window()
    left, top, width, height = opened.draw_area()
    y = top + height / 2
    page.mouse.move(left + width / 2, y)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(200)
    assert opened.window() == (0, length), "without Ctrl the wheel scrolls the page"
    opened.draw_area()
    numbers = opened.drawn("labels")
    drag(opened, y, left + 0.4 * width, left + 0.5 * width)
    opened.settle()
    assert opened.window() == pytest.approx((0.4 * length, 0.5 * length), abs=0.01 * length)
    assert opened.drawn("labels") != numbers
    assert 0 < int(page.get_attribute("#chart", "data-bars") or 0) < 100
    page.keyboard.down("Control")
    page.mouse.wheel(0, 300)
    page.keyboard.up("Control")
    page.wait_for_function("(length) => zbv.chart.range.length > length", arg=0.11 * length)
    before = opened.window()[0]
    page.keyboard.down("Shift")
    drag(opened, y, left + 100, left + 100 + width / 4)
    page.keyboard.up("Shift")
    page.wait_for_function("(start) => zbv.chart.range.start < start", arg=before)
    before = opened.window()[0]
    page.mouse.wheel(100, 0)
    page.wait_for_function("(start) => zbv.chart.range.start > start", arg=before)
    assert page.locator("#inspector").is_hidden(), "a drag is no click"


def test_the_overview_buttons_and_keys_move_and_zoom(opened: Look) -> None:
    page, whole = opened.page, opened.window()
    length = whole[1]
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    zoomed = opened.window()
    assert zoomed[1] - zoomed[0] == pytest.approx(length / 2)
    left, _, width, _ = opened.draw_area()
    box = page.locator("canvas.overview").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.click(left + 0.1 * width, y)
    assert opened.window() == pytest.approx((0, length / 2))
    drag(opened, y, left + 0.25 * width, left + 0.5 * width)
    assert opened.window()[0] == pytest.approx(length / 4, rel=0.02), "what is shown moves"
    drag(opened, y, left + 0.25 * width, left + 0.5 * width)
    assert opened.window() == pytest.approx((length / 2, 0.75 * length), rel=0.02), "and next to it zooms"
    page.get_by_role("button", name="Earlier").click()
    assert opened.window()[0] < length / 2
    page.get_by_role("button", name="Show all").click()
    page.locator("#chart").focus()
    page.keyboard.press("+")
    page.keyboard.press("Shift+ArrowRight")
    assert opened.window() == pytest.approx((length / 2, length))
    page.keyboard.press("0")
    assert opened.window() == pytest.approx(whole)


def test_the_legend_hides_memory_lines_and_a_tooltip_names_them(opened: Look) -> None:
    page = opened.page
    button = page.locator(".memory-legend").get_by_role("button", name="rank 1")
    assert button.get_attribute("aria-pressed") == "true"
    canvas = page.locator("canvas.memory")
    canvas.scroll_into_view_if_needed()
    before = canvas.screenshot()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.mouse.move(0, 0)
    wait_until(lambda: canvas.screenshot() != before, "the rank's line is gone")
    button.click()
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


def test_the_view_is_saved_and_nothing_leaves_the_origin(opened: Look) -> None:
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Save PNG").click()
    assert download.value.suggested_filename == "schedule.png"
    with Image.open(download.value.path()) as picture:
        assert picture.width > 1000
    assert opened.complaints == []
    assert opened.strangers() == []


def test_a_finger_moves_and_two_fingers_zoom(look: Open, service: Service, address: str) -> None:
    found = look(service.url, **PHONE)
    found.open(address)
    page, whole = found.page, found.window()
    left, top, width, height = found.draw_area()
    touch = page.context.new_cdp_session(page)

    def send(kind: str, *shares: float) -> None:
        y = top + height / 2
        points = [{"x": left + share * width, "y": y, "id": at} for at, share in enumerate(shares)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", 0.4, 0.6)
    for share in (0.35, 0.3, 0.25):
        send("touchMove", share, 1 - share)
    send("touchEnd")
    page.wait_for_function("(length) => zbv.chart.range.length < 0.6 * length", arg=whole[1])
    zoomed = found.window()
    send("touchStart", 0.3)
    for share in (0.4, 0.5, 0.6):
        send("touchMove", share)
    send("touchEnd")
    page.wait_for_function("(start) => zbv.chart.range.start < start", arg=zoomed[0])
    assert found.window()[1] - found.window()[0] == pytest.approx(zoomed[1] - zoomed[0])


def test_dark_mode_follows_changes_also_without_motion(look: Open, service: Service, address: str) -> None:
    found = look(service.url, color_scheme="dark", reduced_motion="reduce")
    found.open(address)
    left, top, _, height = found.draw_area()
    corner = (left + 3, top + height - 3)  # the last rank waits for its first activation
    assert found.colour_at(*corner) == (11, 14, 20)
    found.page.emulate_media(color_scheme="light")
    found.page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    wait_until(lambda: found.colour_at(*corner) == (255, 255, 255), "the light chart")
    assert found.complaints == []


def test_a_large_plan_is_a_picture_that_turns_into_bars_when_zoomed_in(
    look: Open, service: Service, large_plan: Plan
) -> None:
    large = look(service.url)
    large.open(f"{service.url}/plans/{service.client.import_plan(plan_json(large_plan))}")
    page = large.page
    assert page.get_attribute("#chart", "data-bars") == "0"
    assert large.drawn("bars") == large.drawn("labels") == []
    opaque = f"""() => {{
      const bytes = {GANTT}.drawn.pixels;
      return bytes.filter((_, at) => at % 4 === 3 && bytes[at] === 255).length / (bytes.length / 4);
    }}"""
    before = page.evaluate(opaque)
    page.get_by_role("button", name="Idle time").click()
    assert before < 0.1
    assert page.evaluate(opaque) > 0.9, "idle time is in the picture"
    page.get_by_role("button", name="Idle time").click()
    find(large, "3F50")
    own = int((large_plan.orders.microbatch == 50).sum())
    assert len(page.evaluate(f"() => {GANTT}.outlined")) == own
    assert len(large.drawn("path.x")) > 2
    page.keyboard.press("Escape")
    assert page.evaluate(f"() => {GANTT}.outlined") == large.drawn("path.x") == []

    for _ in range(7):
        page.get_by_role("button", name="Zoom in").click()
    large.settle()
    timing, (start, end) = evaluate(large_plan.problem, large_plan.orders), large.window()
    texts = [text for texts in large_plan.orders.all_text() for text in texts]
    middles = ((timing.start + timing.end) / 2).tolist()
    visible = {text for text, middle in zip(texts, middles, strict=True) if start < middle < end}
    drawn = page.evaluate(f"() => {GANTT}.drawn.bars.map((at) => {GANTT}.timeline.text(at))")
    assert visible <= set(drawn)
    assert 0 < len(drawn) <= len(visible) + 2 * large_plan.problem.pp_degree
    assert large.complaints == []


def test_a_chart_without_its_actions_has_a_message(look: Open, service: Service, address: str) -> None:
    page = look(service.url).page
    page.route("**/actions?*", lambda route: route.fulfill(status=503))
    page.goto(address)
    page.wait_for_selector('#chart[data-state="failed"]')
    assert "answered with status 503" in page.locator("#chart").inner_text()


def test_the_standalone_file_has_every_function_of_the_page(
    look: Open, plan: Plan, known: Oracle, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(export(plan, "html"), encoding="utf-8")
    found = look("file://", offline=True, color_scheme="dark")
    found.open(path.as_uri())
    page = found.page
    assert page.get_attribute("#chart", "data-bars") == str(len(plan.orders))
    page.get_by_role("button", name="Idle time").click()
    assert found.drawn("idle.left") != []
    page.get_by_role("button", name="Critical path").click()
    find(found, "3F2")
    at = known.texts.index("3F2")
    assert f"{len(known.path(at))} actions" in page.locator('[data-part="path"]').inner_text()
    assert found.complaints == []
    assert found.requests == [path.as_uri()], "no network"
