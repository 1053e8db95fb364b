"""Pages that follow what goes on: searches, lists, runs, and the points of a frontier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from playwright.sync_api import Page
from support.processes import wait_until
from zbv_service.client import NotFound
from zbv_solver.plans.plan import Plan

from web.browsing import PHONE, PROBLEM, Open, Service
from web.played_runs import play

LONG: dict[str, Any] = {
    **PROBLEM,
    "pp_degree": 6,
    "microbatches": 24,
    "costs": {"forward": [1000] * 11 + [1900], "backward_input": 1100, "backward_weight": 700, "p2p": 50},
}
"""Uneven and tight: a thorough search of it takes most of a minute."""


def ask(service: Service, problem: Any, **options: Any) -> str:
    return service.client.submit(problem, options).id


def drawn(page: Page) -> int:
    """How many moments the chart of a search shows, once it shows any."""
    page.locator(".course rect.hit").first.wait_for(state="attached")
    return page.locator(".course rect.hit").count()


@contextmanager
def going_on(service: Service, microbatches: int | None = None) -> Iterator[str]:
    """A search that runs until it is stopped: it improves, or with a number of microbatches it waits."""
    waiting = {"microbatches": microbatches} if microbatches else {}
    search_id = ask(service, {**LONG, **waiting}, effort="thorough", seed=1 if waiting else 0)
    wait_until(lambda: service.client.search(search_id).state == "running", "the search begins")
    yield search_id
    with suppress(NotFound):
        service.client.cancel(search_id)


def test_a_search_is_followed_and_stopped_and_keeps_its_best(look: Open, service: Service) -> None:
    found, waits = look(service.url, has_clock=True), look(service.url, has_clock=True)
    page = found.page
    with going_on(service) as search_id:
        page.goto(f"{service.url}/searches/{search_id}")
        found.soon(page.locator(".course:has(rect.hit ~ rect.hit ~ rect.hit)"))
        assert "6 ranks × 24 microbatches" in page.title()
        assert "lower bound" in page.locator(".course rect.hit title").first.evaluate("it => it.textContent")
        assert page.locator("[data-live=state] .state").inner_text() == "running"
        elapsed = page.locator("[data-live=numbers] .card", has_text="Elapsed").locator("strong")
        before = elapsed.inner_text()
        found.soon(page.locator("[data-live=numbers]").filter(has_not_text=before))

        tight = {**LONG, "microbatches": 4, "memory": {**PROBLEM["memory"], "limit": [3, 3, 12, 12, 12, 2]}}
        waits.page.goto(f"{service.url}/searches/{ask(service, tight, effort='quick')}")
        waits.page.get_by_text("Next in the queue.").wait_for()
        page.get_by_text("All improvements").click()
        page.get_by_role("button", name="Stop and keep best plan").click()
        found.soon(page.get_by_text("Stopped; best plan kept"))
    assert page.get_by_role("button", name="Stop and keep best plan").count() == 0
    assert page.locator("[data-open]").count() == 0
    ended = service.call(f"/v1/searches/{search_id}")
    target = page.get_by_role("link", name="Open plan").get_attribute("href")
    assert target == f"/plans/{ended['plan_id']}"
    assert page.locator("#improvements tbody tr").count() == drawn(page) >= 3
    # The turn of the other search has come, and no plan fits its limit.
    waits.soon(waits.page.get_by_text("No plan fits the memory limit"))
    assert waits.page.get_by_text("Next in the queue.").count() == 0
    assert [*found.complaints, *waits.complaints] == []
    assert [*found.strangers(), *waits.strangers()] == []


def test_a_page_says_that_the_service_is_away_and_that_a_search_is_gone(look: Open, service: Service) -> None:
    found, other = look(service.url, has_clock=True), look(service.url)
    page = found.page
    with going_on(service, microbatches=25) as search_id:
        page.goto(f"{service.url}/searches/{search_id}")
        drawn(page)
        away = page.get_by_text("Connection lost; reconnecting")
        page.context.set_offline(True)
        found.soon(away)
        page.context.set_offline(False)
        found.soon(away, "hidden")
        (session,) = page.context.cookies(service.url)
        page.context.clear_cookies()
        found.soon(page.get_by_text("You are signed out."))
        name, value = session["name"], session["value"]
        page.context.add_cookies([{"name": name, "value": value, "url": service.url}])
        other.page.goto(f"{service.url}/searches/{search_id}")
        other.page.get_by_role("button", name="Delete this search").click()
        other.page.wait_for_url(f"{service.url}/searches")
        found.soon(page.get_by_text("This page is gone"))
    assert other.complaints == []


def test_lists_follow_their_searches(look: Open, service: Service) -> None:
    reader = look(service.url, has_clock=True, **PHONE)
    page = reader.page
    with going_on(service, microbatches=27) as search_id:
        reader.open(service.url)
        assert page.locator(f'[data-live="now"] [data-live="search-{search_id}"]').count() == 1
        reader.open(f"{service.url}/searches?state=running&state=cancelled")
        row = page.locator(f'[data-live="search-{search_id}"]')
        assert row.locator(".state").inner_text() == "running"
        row.locator("a").first.focus()
    reader.soon(row.locator(".state.cancelled"))
    assert row.locator("a").first.evaluate("link => link === document.activeElement"), "the focus stays"
    assert reader.complaints == []


def test_the_page_follows_a_run_and_can_stop_it(look: Open, service: Service, plan: Plan) -> None:
    run, found = play(service, plan), look(service.url, has_clock=True)
    page = found.page
    found.open(run.url)
    state = page.locator("[data-live=state]")
    assert "starting" in state.inner_text()
    run.measured()
    run.log(1, "what rank 1 printed")
    page.get_by_text("Cancel run").click()
    run.beat(4)
    found.soon(state.get_by_text("All ranks have reported step 4 of 40."))
    found.soon(page.locator("[data-live=steps] rect.step").nth(5))
    page.get_by_role("link", name="Planned against measured").wait_for()
    assert page.locator("[data-live=steps] circle.dot").count() == 6
    found.soon(page.locator("[data-live=ranks] a", has_text="log").first)
    assert page.get_by_role("button", name="Stop all ranks").is_visible(), "open details stay open"
    page.get_by_role("button", name="Stop all ranks").click()
    page.get_by_text("Cancelling: its ranks are stopping").wait_for()
    run.stop()
    found.soon(page.locator("[data-live=state] .state.cancelled"))
    assert page.locator("[data-open]").count() == 0
    assert found.complaints == []
    assert found.strangers() == []


def test_missing_points_are_searched_and_the_frontier_fills_in(look: Open, service: Service) -> None:
    tight = service.search({**PROBLEM, "pp_degree": 2, "microbatches": 5})
    found = look(service.url, has_clock=True)
    page = found.page
    found.open(f"{service.url}/plans/{tight.plan_id}/frontier")
    before = page.locator(".plot a").count()
    page.get_by_label("Effort").select_option("quick")
    with page.expect_navigation():  # to the same address
        page.get_by_role("button", name="missing point").click()
    found.soon(page.locator("[data-live=frontier]:not([data-open])").filter(has_not_text="not searched yet"))
    assert page.locator(".plot a").count() > before, "without being loaded again"
    link = page.locator(".plot a").first
    target = str(link.get_attribute("href"))
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"{service.url}{target}")
    assert found.complaints == []
