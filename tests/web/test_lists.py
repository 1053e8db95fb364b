"""Lists and the front page in a browser: filters, keys, running searches, and themes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page
from zbv_solver.plans.plan import Plan

from web.browsing import PROBLEM, Look, Service

LONG = {**PROBLEM, "pp_degree": 8, "microbatches": 160, "memory": {**PROBLEM["memory"], "limit": 20}}


@pytest.fixture(scope="module")
def reader(look: Callable[..., Look], service: Service, plan: Plan) -> Look:
    """A signed-in reader of a service with a plan in it."""
    return look(service.url, has_clock=True)


@contextmanager
def going_on(service: Service) -> Iterator[str]:
    """A search that outlasts the test; cancelled at the end."""
    options = {"effort": "thorough", "time_limit": 300}
    search_id = service.call("/v1/searches", {"problem": LONG, "options": options})["id"]
    try:
        yield search_id
    finally:
        service.call(f"/v1/searches/{search_id}/cancel", {})


def rows(page: Page) -> list[str]:
    return [text.strip() for text in page.locator("tbody th").all_inner_texts()]


def test_a_plan_is_found_by_filters_and_opened_by_its_row(reader: Look, service: Service, plan: Plan) -> None:
    page = reader.page
    reader.open(f"{service.url}/plans")
    page.get_by_label("Ranks").fill("4")
    page.get_by_label("Microbatches").fill("8")
    page.get_by_label("Find").fill(plan.plan_id[:6])
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url(f"**q={plan.plan_id[:6]}*")
    assert rows(page) == [plan.plan_id[:12]]
    assert page.get_by_label("Ranks").input_value() == "4"
    page.get_by_label("Ranks").fill("5")
    page.keyboard.press("Enter")
    page.get_by_text("No plan matches these filters").wait_for()
    page.get_by_role("link", name="Show all").click()
    page.wait_for_url(f"{service.url}/plans")
    assert plan.plan_id[:12] in rows(page)
    # Anywhere on the row, not only on its link.
    cell = page.locator("tbody tr", has_text=plan.plan_id[:12]).get_by_text("4 × 8")
    cell.scroll_into_view_if_needed()  # other tests may have filled the list
    place = cell.bounding_box()
    assert place is not None
    page.mouse.click(place["x"] + 3, place["y"] + place["height"] / 2)
    page.wait_for_url(f"**/plans/{plan.plan_id}", wait_until="commit")
    assert reader.complaints == []
    assert reader.strangers() == []


def test_states_are_chosen_with_the_keyboard(reader: Look, service: Service) -> None:
    page = reader.page
    reader.open(f"{service.url}/searches")
    page.get_by_label("Objective").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "done"
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.wait_for_url("**/searches?*state=done*")
    assert page.get_by_label("done").is_checked()
    assert set(page.locator("tbody .state").all_inner_texts()) == {"done"}


def test_paging_works_without_scripts(look: Callable[..., Look], service: Service, plan: Plan) -> None:
    service.search({**PROBLEM, "microbatches": 3})
    found = look(service.url, java_script_enabled=False)
    page = found.page
    found.open(f"{service.url}/plans?limit=1")
    newest = rows(page)
    with page.expect_event("load"):  # a click alone does not wait for the page it leads to
        page.get_by_role("link", name="Older").click()
    assert len(rows(page)) == 1
    assert rows(page) != newest
    with page.expect_event("load"):
        page.get_by_role("link", name="Newer").click()
    assert rows(page) == newest
    assert not page.locator("[data-theme-switch]").is_visible(), "a switch that could do nothing"


def test_lists_follow_running_searches(reader: Look, service: Service) -> None:
    page = reader.page
    with going_on(service) as search_id:
        reader.open(f"{service.url}/searches")
        row = page.locator(f'[data-live="search-{search_id}"]')
        reader.soon(row.locator('[data-label="best"]'))
        row.locator("a").first.focus()
        reader.open(service.url)
        assert page.locator(f'[data-live="now"] [data-live="search-{search_id}"]').count() == 1
        reader.keep("home-live")
        reader.open(f"{service.url}/searches?state=running&state=cancelled")
        assert row.locator(".state").inner_text() == "running"
        row.locator("a").first.focus()
    reader.soon(row.locator(".state.cancelled"))
    assert row.locator("a").first.evaluate("link => link === document.activeElement"), "the focus stays"
    reader.open(service.url)
    reader.soon(page.locator(f'[data-live="search-{search_id}"]'), "detached")
    assert reader.complaints == []


def test_every_plan_on_the_front_page_has_a_thumbnail(reader: Look, service: Service) -> None:
    page = reader.page
    reader.open(service.url)
    page.locator(".gallery img").last.scroll_into_view_if_needed()
    page.wait_for_function("() => [...document.querySelectorAll('.gallery img')].every(i => i.complete)")
    widths = page.locator(".gallery img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert widths
    assert set(widths) == {600}
    reader.keep("home")


def test_the_theme_is_the_systems_until_the_reader_chooses(
    look: Callable[..., Look], service: Service
) -> None:
    found = look(service.url, color_scheme="dark")
    page = found.page

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark, light = "rgb(11, 14, 20)", "rgb(243, 245, 249)"
    found.open(service.url)
    assert (ground(), page.get_by_label("As the system").is_checked()) == (dark, True)
    page.evaluate("document.addEventListener('zbv:theme', (e) => (window.told = e.detail.theme))")
    page.get_by_label("Light", exact=True).check()
    assert (ground(), page.evaluate("window.told")) == (light, "light")
    found.open(f"{service.url}/plans")
    assert (ground(), page.get_by_label("Light", exact=True).is_checked()) == (light, True), "remembered"

    other = page.context.new_page()
    other.goto(f"{service.url}/runs")
    other.get_by_label("Dark", exact=True).check()
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.get_by_label("As the system").check()
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    assert found.complaints == []


def test_the_first_paint_has_the_chosen_theme(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url, color_scheme="light")
    page = found.page
    found.open(service.url)
    page.get_by_label("Dark", exact=True).check()
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
    assert page.evaluate("window.first") == "dark"
