"""A run in a browser: the page follows and stops it, and compares its measurements with the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from zbv_solver.plans.plan import Plan

from web.browsing import Look, Service
from web.played_runs import PlayedRun, play, slower, traces


@pytest.fixture(scope="module")
def run(service: Service, plan: Plan) -> Iterator[PlayedRun]:
    """A run with its agents, which leave in the end."""
    played = play(service, plan)
    yield played
    played.end("stopped")


def test_the_page_follows_a_run_and_can_stop_it(
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
    assert page.get_by_role("button", name="Stop all ranks").is_visible(), "open details stay open"
    page.get_by_role("button", name="Stop all ranks").click()
    page.get_by_text("Cancelling: its ranks are stopping").wait_for()
    run.end("stopped")
    found.soon(page.locator("[data-live=state] .state.cancelled"))
    assert page.locator("[data-open]").count() == 0
    log = page.locator("[data-live=ranks] a", has_text="log").first.get_attribute("href")
    assert page.request.get(f"{service.url}{log}").text() == "what rank 1 printed"
    assert found.complaints == []
    assert found.strangers() == []


@pytest.fixture(scope="module")
def measured(service: Service, plan: Plan) -> Iterator[PlayedRun]:
    """A run with slow W actions on rank 2."""
    played = play(service, plan)
    played.beat(6)
    played.measured(traces(plan, slower(plan.problem, 2, 2.0)))
    yield played
    played.end("stopped")


def number(text: str) -> float:
    return float("".join(text.split()).replace("−", "-").replace("+", ""))


def test_the_plan_and_the_measured_step_are_compared(
    look: Callable[..., Look], service: Service, plan: Plan, measured: PlayedRun
) -> None:
    found = look(service.url)
    page = found.page
    found.open(f"{measured.url}/measured")
    assert "Rank 2's W took 2.00 × what was planned" in page.locator(".finding").inner_text()
    bars = [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]
    assert bars == [len(plan.orders), len(plan.orders)]
    found.keep("measured-light")

    rows = page.locator("[aria-labelledby=went] tbody tr")
    totals = set()
    for index in range(rows.count()):
        cells = [number(text) for text in rows.nth(index).locator("td").all_inner_texts()[:5]]
        assert sum(cells[:4]) == pytest.approx(cells[4], abs=2), "to the digits that are shown"
        totals.add(cells[4])
    assert len(totals) == 1
    slow = page.locator("[aria-labelledby=kinds] .ratio.slow")
    assert slow.count() == 1
    assert slow.inner_text().startswith("2.00")
    assert found.complaints == []
    assert found.strangers() == []


def test_the_tooltip_of_a_measured_action_has_its_planned_time(
    look: Callable[..., Look], service: Service, plan: Plan, measured: PlayedRun
) -> None:
    found = look(service.url)
    page = found.page
    found.open(f"{measured.url}/measured")
    place = found.point_at(500, 0, 4, lane=1)
    page.mouse.move(place[0], place[1] - 1)
    page.mouse.move(*place)
    tip = page.locator(".tip").filter(visible=True)
    tip.get_by_text("0F0", exact=True).wait_for()
    told = "".join(tip.inner_text().split())
    assert "planned1000µs" in told
    assert "measured1000µs(1×)" in told


def test_a_step_is_chosen_and_the_trace_downloads(
    look: Callable[..., Look], service: Service, measured: PlayedRun
) -> None:
    found = look(service.url)
    page = found.page
    found.open(f"{measured.url}/measured")
    page.locator("select[name=step]").select_option("4")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_url("**step=4**")
    page.wait_for_selector('#chart[data-state="ready"]')
    assert page.locator(".sub").inner_text() == "Step 4, generation 0."
    with page.expect_download() as download:
        page.get_by_role("link", name="Trace for Perfetto").click()
    assert download.value.suggested_filename.endswith("-trace.json")
    assert found.complaints == []
