"""A run in a browser: the page keeps up with it, and stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from web.browsing import Look, Service
from web.played_runs import PlayedRun, play, slower, traces
from zbv_solver.plans.plan import Plan

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def run(service: Service, plan: Plan) -> Iterator[PlayedRun]:
    """A run with its agents, which leave in the end."""
    played = play(service, plan)
    yield played
    played.end("stopped")


def test_the_page_keeps_up_with_the_run_and_a_browser_stops_it(
    look: Callable[..., Look], service: Service, plan: Plan, run: PlayedRun
) -> None:
    found = look(service.url, has_clock=True)
    page = found.page
    found.open(run.url)
    state = page.locator("[data-live=state]")
    assert "starting" in state.inner_text()
    run.beat(3)
    found.soon(state.get_by_text("All ranks have reported step 3 of 40."))
    assert state.get_by_text("running", exact=True).is_visible()
    run.measured(traces(plan, slower(plan.problem, 2, 1.4)))
    found.soon(page.locator("[data-live=steps] rect.step").nth(5))
    page.get_by_role("link", name="Planned against measured").wait_for()
    assert page.locator("[data-live=steps] circle.dot").count() == 6
    run.log(1, "what rank 1 printed")
    found.soon(page.locator("[data-live=ranks] a", has_text="log").first)
    found.keep("run-light")
    assert page.locator("[aria-labelledby=events] li").first.inner_text().startswith(tuple("012"))

    page.get_by_text("Cancel run").click()
    run.beat(4)
    found.soon(state.get_by_text("All ranks have reported step 4 of 40."))
    assert page.get_by_role("button", name="Stop all ranks").is_visible(), "what was opened stays open"
    page.get_by_role("button", name="Stop all ranks").click()
    page.get_by_text("Cancelling: its ranks are stopping").wait_for()
    run.end("stopped")
    found.soon(page.locator("[data-live=state] .state.cancelled"))
    assert page.locator("[data-open]").count() == 0
    log = page.locator("[data-live=ranks] a", has_text="log").first.get_attribute("href")
    assert page.request.get(f"{service.url}{log}").text() == "what rank 1 printed"
    assert found.complaints == []
    assert found.strangers() == []


@pytest.mark.parametrize("name", ["dark", "phone"])
def test_it_is_dark_at_night_and_fits_a_phone(
    look: Callable[..., Look], service: Service, run: PlayedRun, name: str
) -> None:
    found = look(service.url, **(PHONE if name == "phone" else {"color_scheme": "dark"}))
    found.open(run.url)
    page = found.page
    assert page.evaluate("() => document.documentElement.scrollWidth") == page.evaluate("() => innerWidth")
    found.keep(f"run-{name}")
    assert found.complaints == []
