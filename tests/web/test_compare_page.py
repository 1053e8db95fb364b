"""The comparison in a browser: schedules on one time axis."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from zbv_solver.plans.plan import Plan

from web.browsing import PROBLEM, Look, Service

LANES = '() => JSON.parse(document.getElementById("chart-lanes").textContent).map((lane) => lane.title)'


@pytest.fixture(scope="module")
def address(service: Service, plan: Plan) -> str:
    return f"{service.url}/plans/{plan.plan_id}/compare"


def opened(found: Look, address: str) -> Look:
    """Open a comparison; the page reloads until its schedules are computed."""
    found.page.goto(address)
    found.page.wait_for_selector('#chart[data-state="ready"]')
    return found


def test_schedules_share_one_time_axis_and_zoom_together(
    look: Callable[..., Look], address: str, plan: Plan
) -> None:
    found = opened(look(address.partition("/plans")[0]), address)
    page = found.page
    titles = [title.partition(":")[0] for title in page.evaluate(LANES)]
    assert titles == ["this plan", "1f1b", "interleaved-1f1b", "zb-h1"]
    bars = [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]
    assert bars == [len(plan.orders), 64, 128, 96]
    found.keep("compare-light")
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    found.settle()
    zoomed = [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]
    assert all(0 < now < before for now, before in zip(zoomed, bars, strict=True))

    rows = page.locator("[aria-labelledby=numbers] tbody tr")
    assert rows.count() == 4
    baseline = next(each for each in plan.baselines if each.name == "1f1b")
    told = re.sub(r"\s", "", rows.nth(1).inner_text())
    assert told.startswith(f"1f1b{baseline.span:.0f}{baseline.makespan:.0f}")
    assert found.complaints == []
    assert found.strangers() == []


def test_clicking_an_action_highlights_its_microbatch_in_every_schedule(
    look: Callable[..., Look], address: str
) -> None:
    found = opened(look(address.partition("/plans")[0]), address)
    page = found.page
    place = found.point_at(500, 0, 4, lane=1)
    page.mouse.click(*place)
    page.get_by_text("Microbatch 0 is highlighted").wait_for()
    dimmed = "(at) => zbv.chart.gantts[at].highlighted?.filter((each) => each === 0).length ?? 0"
    assert page.evaluate(dimmed, 0) > 0
    assert page.evaluate(dimmed, 2) > 0
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.getElementById('highlighted').textContent === ''")
    assert page.evaluate(dimmed, 0) == 0
    assert found.complaints == []


def test_the_form_chooses_the_schedules_to_compare(
    look: Callable[..., Look], service: Service, address: str, plan: Plan
) -> None:
    other = service.search({**PROBLEM, "microbatches": 3})
    found = opened(look(service.url), address)
    page = found.page
    page.get_by_label("interleaved-1f1b").uncheck()
    page.get_by_label("zb-h1").uncheck()
    page.get_by_label("or its id").fill(other.plan_id)
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_url("**with=**")
    page.wait_for_selector('#chart[data-state="ready"]')
    titles = [title.partition(":")[0] for title in page.evaluate(LANES)]
    assert titles == ["this plan", "1f1b", f"plan {other.plan_id[:12]}"]
    assert "microbatches" in page.locator("section[aria-labelledby=differs-1]").inner_text()
    assert found.complaints == []


def test_without_javascript_the_numbers_are_there(
    look: Callable[..., Look], address: str, plan: Plan
) -> None:
    found = look(address.partition("/plans")[0], java_script_enabled=False)
    found.page.goto(address)
    assert "The chart needs JavaScript" in found.page.locator("main").inner_text()
    assert found.page.locator("[aria-labelledby=numbers] tbody tr").count() == 4
