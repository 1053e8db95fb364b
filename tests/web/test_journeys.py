"""What readers do on pages: sign in, filter lists, compare schedules, search layouts, change the theme."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from zbv_service.client.tokens import find
from zbv_solver.plans.plan import Plan

from web.browsing import LAYOUTS, Look, Open, Service
from web.played_runs import play

UNAUTHORISED = "error: Failed to load resource: the server responded with a status of 401 (Unauthorized)"


@pytest.fixture(scope="module")
def reader(look: Open, service: Service, plan: Plan) -> Look:
    """A signed-in reader of a service with a plan in it."""
    return look(service.url)


def bars(page: Page) -> list[int]:
    """How many actions each chart shows, once they are computed and drawn."""
    page.wait_for_selector('#chart[data-state="ready"]')
    return [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]


def test_a_token_signs_in_and_opens_the_requested_page(look: Open, service: Service, plan: Plan) -> None:
    found = look(service.url, is_known=False)
    page = found.page
    for token in ("zbv_wrong", str(find(service.url))):
        found.open(f"{service.url}/plans/{plan.plan_id}")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        if token == "zbv_wrong":
            assert "Unknown, expired or revoked token" in page.get_by_role("alert").inner_text()
    bars(page)
    assert page.url == f"{service.url}/plans/{plan.plan_id}"
    assert set(found.complaints) == {UNAUTHORISED}, "nothing that the policy of the page forbids"
    assert found.strangers() == []
    # A link on another site leads to the page, too.
    page.goto(f"{service.url.replace('127.0.0.1', 'localhost')}/sign-in")
    page.evaluate(f"() => {{ location.href = '{service.url}/' }}")
    page.wait_for_selector("[aria-labelledby=submit]")
    page.get_by_role("button", name="Search an example").click()
    page.wait_for_url("**/searches/*")
    service.call(f"/v1/searches/{page.url.rsplit('/', 1)[1]}/cancel", {})
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{service.url}/sign-in")


def test_lists_are_filtered_by_keyboard_and_whole_rows_are_links(reader: Look, plan: Plan) -> None:
    page = reader.page
    reader.open(f"{reader.origin}/searches")
    page.get_by_label("Objective").focus()
    for key in ("Tab", "Tab", "Tab", "Space", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/searches?*state=done*")
    assert page.get_by_label("done").is_checked()
    reader.open(f"{reader.origin}/plans")
    page.get_by_label("Find").fill(plan.plan_id[:6])
    page.keyboard.press("Enter")
    page.wait_for_url(f"**q={plan.plan_id[:6]}*")
    box = page.locator("tbody tr").get_by_text("4 × 8").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 3, box["y"] + box["height"] / 2)
    page.wait_for_url(f"**/plans/{plan.plan_id}", wait_until="commit")
    assert reader.complaints == []


def test_schedules_share_one_time_axis_and_one_highlight(reader: Look, plan: Plan) -> None:
    page = reader.page
    page.goto(f"{reader.origin}/plans/{plan.plan_id}/compare")
    before = bars(page)
    assert before == [len(plan.orders), 64, 128, 96]
    page.mouse.click(*reader.point_at(500, 0, 4, lane=1))
    page.get_by_text("Microbatch 0 is highlighted").wait_for()
    dimmed = "(at) => zbv.chart.gantts[at].highlighted?.filter((each) => each === 0).length ?? 0"
    assert all(page.evaluate(dimmed, lane) > 0 for lane in range(4))
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.getElementById('highlighted').textContent === ''")
    assert page.evaluate(dimmed, 0) == 0
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    reader.settle()
    assert all(0 < now < was for now, was in zip(bars(page), before, strict=True))
    assert reader.complaints == []
    assert reader.strangers() == []


def test_a_measured_action_has_its_planned_time(reader: Look, service: Service, plan: Plan) -> None:
    run = play(service, plan)
    run.beat(6)
    run.measured()
    reader.open(f"{run.url}/measured")
    assert bars(reader.page) == [len(plan.orders)] * 2
    x, y = reader.point_at(500, 0, 4, lane=1)
    reader.page.mouse.move(x, y - 1)
    reader.page.mouse.move(x, y)
    tip = reader.page.locator(".tip").filter(visible=True)
    tip.get_by_text("0F0", exact=True).wait_for()
    told = "".join(tip.inner_text().split())
    assert "planned1000µs" in told
    assert "measured1000µs(1×)" in told
    run.stop()
    assert reader.complaints == []


def test_the_form_leads_to_the_best_layouts_and_comes_back(
    look: Open, service: Service, layout_search: dict[str, Any]
) -> None:
    found = look(service.url, java_script_enabled=False, color_scheme="dark")
    page = found.page
    found.open(f"{service.url}/layouts")
    for summary in ("Own model", "Fix parts of the layout", "Measured layers"):
        page.get_by_text(summary, exact=True).click()
    texts = {name: value for name, value in LAYOUTS.items() if name not in ("device", "sensitivity")}
    for name, value in texts.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_label("Sensitivity").check()
    page.locator("#profiles_json").fill('[{"layouts": []}]')
    page.get_by_role("button", name="Search layouts").click()
    expect(page.get_by_role("alert")).to_contain_text("Profiles, 0: this is no profile")
    expect(page.locator("#profiles_json")).to_have_value('[{"layouts": []}]')
    page.locator("#profiles_json").fill("")
    page.get_by_role("button", name="Search layouts").click()
    page.wait_for_url("**/layouts/*")
    assert page.url.endswith(layout_search["id"]), "the same search for the same fields"
    expect(page.locator("#ranking")).to_be_visible()
    expect(page.locator(".verdict")).to_contain_text("No layout has a step below")
    expect(page.locator(".plot circle.best")).to_have_count(1)
    expect(page.locator("[aria-labelledby=sensitivity] tbody tr")).to_have_count(8)
    ranks = layout_search["answer"]["layouts"][0]["memory"]
    expect(page.locator("[aria-labelledby=memory] tbody tr")).to_have_count(len(ranks))
    expect(page.get_by_text("2, 80 GB each")).to_be_visible()  # the size of an H100, not the room for tensors
    page.get_by_role("link", name="Change and search again").click()
    for name in texts.keys() - {"model_json"}:
        expect(page.locator(f"#{name}")).to_have_value(texts[name])
    assert json.loads(page.locator("#model_json").input_value()) == json.loads(LAYOUTS["model_json"])
    page.goto(f"{service.url}/layouts/{layout_search['id']}")
    page.locator(".plot a circle.best").click()
    page.wait_for_url(f"**/plans/{layout_search['answer']['layouts'][0]['plan_id']}")


def test_the_theme_is_the_systems_until_the_reader_chooses(look: Open, service: Service) -> None:
    found = look(service.url, color_scheme="dark")
    page = found.page

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    found.open(service.url)
    assert (ground(), page.get_by_label("As the system").is_checked()) == ("rgb(11, 14, 20)", True)
    page.get_by_label("Light", exact=True).check()
    assert ground() == "rgb(243, 245, 249)"
    # What a page looks like before its body is there is what flashes.
    page.add_init_script(
        """new MutationObserver((_, seen) => {
          if (document.body !== null) {
            window.first = getComputedStyle(document.documentElement).colorScheme;
            seen.disconnect();
          }
        }).observe(document, {childList: true, subtree: true});"""
    )
    found.open(f"{service.url}/plans")
    assert page.evaluate("window.first") == "light", "remembered"
    other = page.context.new_page()
    other.goto(f"{service.url}/runs")
    other.get_by_label("Dark", exact=True).check()
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.get_by_label("As the system").check()
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    assert found.complaints == []


def test_without_javascript_pages_say_what_they_lack(look: Open, service: Service, plan: Plan) -> None:
    page = look(service.url, java_script_enabled=False).page
    for path, words in (
        (f"/plans/{plan.plan_id}/compare", "The chart needs JavaScript"),
        (f"/plans/{plan.plan_id}", "The chart needs JavaScript"),
        ("/new", "zbv-service submit problem.json"),
    ):
        page.goto(f"{service.url}{path}")
        assert words in page.locator("main").inner_text()
    assert page.locator("#app").is_hidden()
    assert not page.locator("[data-theme-switch]").is_visible(), "a switch that could do nothing"
