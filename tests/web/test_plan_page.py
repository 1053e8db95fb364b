"""The plan's page in a browser: it shows the schedule, answers to the mouse and keys, and calls nobody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, Route
from web.browsing import Look, Service
from web.oracle import Oracle
from zbv_solver.export import export, quantities
from zbv_solver.export.per_rank import idle_shares
from zbv_solver.plans.plan import Plan
from zbv_solver.timing.start_times import earliest_times, evaluate, memory_profile

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


def column(page: Page, layer: str, name: str) -> list[float]:
    """A column of what a layer of the chart draws."""
    data = f'Bokeh.documents[0].get_model_by_name("gantt:{layer}").data["{name}"]'
    found: list[float] = page.evaluate(f"() => Array.from({data})")
    return found


def test_it_shows_the_schedule_and_what_it_achieves(opened: Look, plan: Plan) -> None:
    page = opened.page
    assert page.locator("h1").inner_text() == "4 ranks × 8 microbatches"
    assert page.locator("#chart canvas").count() >= 3
    assert page.get_attribute("#chart", "data-bars") == str(len(plan.orders))
    cards = page.locator(".card").all_inner_texts()
    assert [card.split("\n")[0] for card in cards[:3]] == ["Span", "Makespan", "Bubble"]
    rows = page.locator("tbody th").all_inner_texts()
    assert rows == ["this plan", *(baseline.name for baseline in plan.baselines)]
    opened.keep("plan-light")


def test_bars_are_where_the_plan_says(opened: Look, plan: Plan) -> None:
    timing = evaluate(plan.problem, plan.orders)
    drawn = opened.page.evaluate(
        """() => {
          const data = Bokeh.documents[0].get_model_by_name("gantt:drawn").data;
          return ["left", "right", "rank"].map((name) => Array.from(data[name]));
        }"""
    )
    assert drawn == [timing.start.tolist(), timing.end.tolist(), plan.orders.rank_index().tolist()]


def test_hovering_an_action_tells_what_it_is_and_what_it_waited_for(opened: Look, plan: Plan) -> None:
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


def test_what_every_action_waited_for_is_what_the_plan_says(opened: Look, plan: Plan) -> None:
    found = opened.page.evaluate(
        """() => {
          const { timeline } = zbv.page.gantt;
          return Array.from({ length: timeline.count }, (_, at) => {
            const { by, action, late } = timeline.wait(at);
            return [by, action, timeline.idle(at), late];
          });
        }"""
    )
    known = Oracle(plan)
    assert found == [[*known.waits[at], known.idle(at), 0] for at in range(len(known.texts))]


def test_every_critical_path_is_the_plans(opened: Look, plan: Plan) -> None:
    paths, spent = opened.page.evaluate(
        """() => {
          const { timeline } = zbv.page.gantt;
          const all = Array.from({ length: timeline.count }, (_, at) => timeline.criticalPath(at));
          return [all, all.map((path) => timeline.spent(path))];
        }"""
    )
    known = Oracle(plan)
    assert paths == [known.path(at) for at in range(len(known.texts))]
    for at, sums in enumerate(spent):
        assert sum(sums["letters"]) + sums["transfers"] == pytest.approx(known.end[at], rel=1e-12)
        assert sums["late"] == 0


def test_the_memory_lines_are_what_the_plan_holds(opened: Look, plan: Plan) -> None:
    lines = opened.page.evaluate(
        """() => Array.from({ length: zbv.page.gantt.timeline.ranks }, (_, rank) => {
          const { at, held } = Bokeh.documents[0].get_model_by_name(`memory:${rank}`).data;
          return [Array.from(at), Array.from(held)];
        })"""
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

    alpha, line, frame = page.evaluate(
        """() => {
          const data = (name) => Bokeh.documents[0].get_model_by_name(`gantt:${name}`).data;
          return [Array.from(data("drawn").alpha), data("path"), data("chosen")];
        }"""
    )
    microbatch = plan.orders.microbatch.tolist()
    assert [each == 1 for each in alpha] == [each == microbatch[at] for each in microbatch]
    assert (frame["left"], frame["right"]) == ([known.start[at]], [known.end[at]])
    assert (line["x"][0], line["x"][-1]) == (0, known.end[at])
    corners = set(zip(line["x"], [round(y - 0.46) for y in line["y"]], strict=True))
    assert corners <= {
        (x, known.rank[each]) for each in known.path(at) for x in (known.start[each], known.end[each])
    }
    opened.keep("plan-chosen")

    page.keyboard.press("Escape")
    panel.wait_for(state="hidden")
    assert set(column(page, "drawn", "alpha")) == {1}


def test_an_action_is_found_by_its_name_and_arrow_keys_lead_on(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    field, head = page.get_by_label("Find action", exact=True), page.locator('[data-part="head"] b')
    field.fill("9Q9")
    field.press("Enter")
    assert "There is no 9Q9" in page.locator("#find-complaint").inner_text()
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

    page.get_by_role("button", name="Zoom to it").click()
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
    assert "the iteration drawn" in said
    drawn = column(page, "path", "x")
    assert (min(drawn), max(drawn)) == (0, plan.metrics.makespan)
    opened.keep("plan-critical-path")
    button.click()
    assert page.locator("#critical-path").is_hidden()
    assert column(page, "path", "x") == []


def test_idle_time_is_hatched_where_asked_for_and_summed_per_rank(opened: Look, plan: Plan) -> None:
    page, known = opened.page, Oracle(plan)
    button = page.get_by_role("button", name="Idle time")
    button.click()
    found = page.evaluate(
        """() => {
          const { left, right, rank } = Bokeh.documents[0].get_model_by_name("gantt:idle").data;
          return left.map((from, at) => [rank[at], from, right[at]]);
        }"""
    )
    gaps = [
        [known.rank[at], known.end[at - 1], known.start[at]]
        for at in range(1, len(known.texts))
        if known.rank[at] == known.rank[at - 1] and known.start[at] > known.end[at - 1]
    ]
    assert found == gaps
    opened.keep("plan-idle")
    button.click()
    assert column(page, "idle", "left") == []
    labels = page.evaluate(
        """() => {
          const { major_label_overrides: notes } = Bokeh.documents[0].get_model_by_name("gantt:notes");
          return Array.from(notes.values());
        }"""
    )
    assert labels == [quantities.percent(share, 1) for share in idle_shares(plan)]


def test_dragging_zooms_into_what_was_dragged_over(opened: Look) -> None:
    before, numbers = opened.window(), opened.drawn()
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
    assert opened.drawn() != numbers
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


def test_the_memory_lines_move_with_the_chart(opened: Look) -> None:
    same = opened.page.evaluate(
        """() => {
          const doc = Bokeh.documents[0];
          return doc.get_model_by_name("gantt").x_range === doc.get_model_by_name("memory").x_range;
        }"""
    )
    assert same


def test_every_action_is_listed(opened: Look, plan: Plan) -> None:
    opened.page.locator("details").nth(1).locator("summary").click()
    listed = opened.page.locator("details").nth(1).locator(".actions code").all_inner_texts()
    assert listed == plan.orders.text(1)


def test_exports_are_linked_and_answer(opened: Look, plan: Plan) -> None:
    links = opened.page.locator(".exports a")
    names = links.all_inner_texts()
    machines = ["torch-csv", "torch-comms-csv", "torchtitan", "megatron-json", "chrome-trace"]
    assert names == ["json", *machines, "svg", "html"]
    for url in links.evaluate_all("links => links.map((link) => link.href)"):
        answer = opened.page.request.get(url)
        assert answer.ok, url
        assert len(answer.body()) > 100
        assert "attachment" in answer.headers.get("content-disposition", "") or url.endswith(plan.plan_id)


def test_it_leads_on_from_the_plan(opened: Look, service: Service, plan: Plan) -> None:
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


def test_nothing_is_complained_about_and_nothing_leaves_the_origin(opened: Look) -> None:
    opened.page.get_by_role("button", name="Zoom in").click()
    opened.settle()
    assert opened.complaints == []
    assert opened.strangers() == []
    assert any(url.endswith("/static/plan.js") or "/static/plan.js?" in url for url in opened.requests)


def test_dark_mode_is_dark_and_follows_a_change(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url, color_scheme="dark")
    found.open(address)
    colour = '() => Bokeh.documents[0].get_model_by_name("gantt").background_fill_color'
    assert found.page.evaluate(colour) == "#0b0e14"
    body = found.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert body == "rgb(11, 14, 20)"
    found.keep("plan-dark")
    found.page.emulate_media(color_scheme="light")
    found.page.wait_for_function(f'{colour} === "#ffffff"')
    assert found.complaints == []


def test_on_a_phone_nothing_is_wider_than_the_screen(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url, **PHONE)
    found.open(address)
    assert found.page.evaluate("() => document.documentElement.scrollWidth") == 390
    found.keep("plan-phone")
    assert found.complaints == []


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
      const [pixels] = Bokeh.documents[0].get_model_by_name("gantt:pixels").data.image;
      const bytes = new Uint8Array(pixels.buffer);
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
    assert len(column(page, "marks", "left")) == own
    assert len(column(page, "path", "x")) > 2
    large.keep("large-plan-chosen", whole=False)
    page.keyboard.press("Escape")
    assert column(page, "marks", "left") == column(page, "path", "x") == []


@pytest.mark.parametrize("columns", [1, 7, 400])
def test_the_memory_of_a_large_plan_misses_no_peak(large: Look, large_plan: Plan, columns: int) -> None:
    start, end = earliest_times(large_plan.problem, large_plan.orders)
    during, after = memory_profile(large_plan.problem, large_plan.orders)
    length = float(end.max())
    found = large.page.evaluate(
        "([length, columns]) => zbv.page.memory.peaks(2, 0, length, columns).held", [length, columns]
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
    assert found.drawn() == []
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
        """() => {
          const { timeline } = zbv.page.gantt;
          const { left, rank } = Bokeh.documents[0].get_model_by_name("gantt:drawn").data;
          return Array.from(left, (start, at) => timeline.text(timeline.at(rank[at], start)));
        }"""
    )
    assert visible <= set(drawn)
    assert len(drawn) <= len(visible) + 2 * large_plan.problem.pp_degree
    assert found.complaints == []
    found.keep("large-plan-zoomed", whole=False)


def test_the_first_picture_answers_and_the_chart_takes_over_what_was_pointed_out(
    look: Callable[..., Look], service: Service, address: str, plan: Plan
) -> None:
    found, held = look(service.url), list[Route]()
    page, known = found.page, Oracle(plan)
    page.route("**/bokeh.min.js*", lambda route: held.append(route))
    page.goto(address)
    page.wait_for_function("() => performance.getEntriesByName('zbv:answers').length > 0")
    box = page.locator(".placeholder .picture").bounding_box()
    assert box is not None

    def spot(at: int) -> tuple[float, float]:
        middle = (known.start[at] + known.end[at]) / 2 / plan.metrics.makespan
        row = (known.rank[at] + 0.5) / plan.orders.pp_degree
        return box["x"] + middle * box["width"], box["y"] + row * box["height"]

    for at in (0, known.texts.index("3I5"), len(known.texts) - 1):
        page.mouse.move(*spot(at))
        found.tooltip().get_by_text(known.texts[at], exact=True).wait_for()
    chosen = known.texts.index("3I5")
    page.mouse.click(*spot(chosen))
    assert page.locator("#inspector").inner_text().startswith("3I5")
    frame = page.locator(".placeholder .frame").bounding_box()
    assert frame is not None
    assert frame["x"] < spot(chosen)[0] < frame["x"] + frame["width"]
    assert frame["y"] < spot(chosen)[1] < frame["y"] + frame["height"]
    page.get_by_role("button", name="Idle time").click()
    page.get_by_role("button", name="Zoom to it").click()

    for route in held:
        route.continue_()
    page.wait_for_selector('#chart[data-state="ready"]')
    page.wait_for_selector(".placeholder", state="detached")
    found.settle()
    start, end = found.window()
    assert start < known.start[chosen] < known.end[chosen] < end < start + plan.metrics.makespan
    assert column(page, "chosen", "left") == [known.start[chosen]]
    assert column(page, "path", "x")[-1] == known.end[chosen]
    assert column(page, "idle", "left") != []
    assert page.locator(".tip").count() == 1
    assert found.complaints == []


def test_without_bokeh_the_first_picture_stays_and_says_so(
    look: Callable[..., Look], service: Service, address: str
) -> None:
    found = look(service.url)
    page = found.page
    page.route("**/bokeh.min.js*", lambda route: route.abort())
    page.goto(address)
    page.wait_for_selector('#chart[data-state="failed"]')
    assert "Bokeh's script did not load" in page.locator("#chart").inner_text()
    page.get_by_label("Find action", exact=True).fill("3F2")
    page.get_by_label("Find action", exact=True).press("Enter")
    assert page.locator("#inspector").inner_text().startswith("3F2")
    assert page.locator(".placeholder .frame").is_visible()


def test_the_file_that_opens_from_disk_does_all_that_the_page_does(
    look: Callable[..., Look], plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(export(plan, "html"), encoding="utf-8")
    found = look("file://", offline=True, color_scheme="dark")
    found.open(path.as_uri())
    page, known = found.page, Oracle(plan)
    page.get_by_role("button", name="Idle time").click()
    assert column(page, "idle", "left") != []
    page.get_by_role("button", name="Critical path").click()
    page.get_by_label("Find action", exact=True).fill("3F2")
    page.get_by_label("Find action", exact=True).press("Enter")
    at = known.texts.index("3F2")
    assert f"{len(known.path(at))} actions" in page.locator('[data-part="path"]').inner_text()
    assert page.locator(".next").count() == page.locator(".exports").count() == 0
    assert found.complaints == []
    assert found.requests == [path.as_uri()]
    found.keep("plan-standalone")
