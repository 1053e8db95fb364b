"""The plan's page in a browser: it shows the schedule, answers to the mouse and keys, and calls nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from web.browsing import Look, Service
from zbv_solver.plan import Plan
from zbv_solver.timing import evaluate

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
          const data = Bokeh.documents[0].get_model_by_name("drawn").data;
          return ["action", "left", "right", "rank"].map((name) => Array.from(data[name]));
        }"""
    )
    texts = [text for texts in plan.orders.all_text() for text in texts]
    assert drawn == [
        texts,
        timing.start.tolist(),
        timing.end.tolist(),
        plan.orders.rank_index().tolist(),
    ]


def test_hovering_an_action_tells_which_it_is(opened: Look, plan: Plan) -> None:
    timing = evaluate(plan.problem, plan.orders)
    at = plan.orders.slice_of(2).start + 7
    middle = (timing.start[at] + timing.end[at]) / 2
    x, y = opened.point_at(middle, 2, 4)
    opened.page.mouse.move(x, y - 1)
    opened.page.mouse.move(x, y)

    opened.tooltip().get_by_text(str(plan.orders.actions(2)[7]), exact=True).wait_for()
    said = opened.tooltip().inner_text()
    action = plan.orders.actions(2)[7]
    assert said.startswith(str(action))
    assert f"{timing.start[at]:,.0f} µs" in said
    assert f"{timing.end[at]:,.0f} µs" in said
    assert f"microbatch\n{action.microbatch}" in said


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


def test_exports_are_linked_and_answer(opened: Look, service: Service) -> None:
    links = opened.page.locator(".exports a")
    names = links.all_inner_texts()
    machines = ["torch-csv", "torch-comms-csv", "torchtitan", "megatron-json", "chrome-trace"]
    assert names == ["json", *machines, "svg", "html"]
    for url in links.evaluate_all("links => links.map((link) => link.href)"):
        answer = opened.page.request.get(url)
        assert answer.ok, url
        assert len(answer.body()) > 100


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


def test_a_large_plan_is_a_picture_that_turns_into_bars_when_zoomed_in(
    look: Callable[..., Look], service: Service, large_plan: Plan
) -> None:
    found = look(service.url)
    found.open(service.import_plan(large_plan))
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
    drawn = found.page.evaluate('() => Array.from(Bokeh.documents[0].get_model_by_name("drawn").data.action)')
    assert visible <= set(drawn)
    assert len(drawn) <= len(visible) + 2 * large_plan.problem.pp_degree
    assert found.complaints == []
    found.keep("large-plan-zoomed", whole=False)
