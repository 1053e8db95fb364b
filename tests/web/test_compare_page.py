"""The comparison in a browser: schedules above each other that move together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from web.browsing import PROBLEM, Look, Service
from zbv_solver.plans.plan import Plan

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LANES = '() => JSON.parse(document.getElementById("chart-lanes").textContent).map((lane) => lane.title)'


@pytest.fixture(scope="module")
def address(service: Service, plan: Plan) -> str:
    return f"{service.url}/plans/{plan.plan_id}/compare"


def opened(found: Look, address: str) -> Look:
    """Open a comparison; while schedules are made, the page comes again by itself."""
    found.page.goto(address)
    found.page.wait_for_selector('#chart[data-state="ready"]')
    return found


def settle(found: Look) -> None:
    found.page.wait_for_function(
        """() => {
          const range = Bokeh.documents[0].get_model_by_name("lane0").x_range;
          return document.getElementById("chart").dataset.window === `${range.start} ${range.end}`;
        }"""
    )


def test_schedules_stand_above_each_other_and_zoom_together(
    look: Callable[..., Look], address: str, plan: Plan
) -> None:
    found = opened(look(address.partition("/plans")[0]), address)
    page = found.page
    titles = [title.partition(":")[0] for title in page.evaluate(LANES)]
    assert titles == ["this plan", "1f1b", "interleaved-1f1b", "zb-h1"]
    bars = [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]
    assert bars == [len(plan.orders), 64, 128, 96]
    found.keep("compare-light")
    ranges = """() => ["lane0", "lane1", "lane2", "lane3"].map(
      (name) => Bokeh.documents[0].get_model_by_name(name).x_range.id)"""
    assert len(set(page.evaluate(ranges))) == 1
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    settle(found)
    zoomed = [int(count) for count in (page.get_attribute("#chart", "data-bars") or "").split()]
    assert all(0 < now < before for now, before in zip(zoomed, bars, strict=True))

    rows = page.locator("[aria-labelledby=numbers] tbody tr")
    assert rows.count() == 4
    baseline = next(each for each in plan.baselines if each.name == "1f1b")
    told = re.sub(r"\s", "", rows.nth(1).inner_text())
    assert told.startswith(f"1f1b{baseline.span:.0f}{baseline.makespan:.0f}")
    assert found.complaints == []
    assert found.strangers() == []


def test_clicking_an_action_points_its_microbatch_out_in_every_schedule(
    look: Callable[..., Look], address: str
) -> None:
    found = opened(look(address.partition("/plans")[0]), address)
    page = found.page
    place = page.evaluate(
        """() => {
          const gantt = Bokeh.documents[0].get_model_by_name("lane1");
          const view = Bokeh.index.find_one_by_id(gantt.id);
          view.el.scrollIntoView({block: "center", behavior: "instant"});
          const box = view.el.getBoundingClientRect(), frame = view.frame.bbox, {start, end} = gantt.x_range;
          return [box.left + frame.left + (500 - start) / (end - start) * frame.width,
                  box.top + frame.top + frame.height / 8];
        }"""
    )
    page.mouse.click(*place)
    page.get_by_text("Microbatch 0 is pointed out").wait_for()
    dimmed = """(name) => Array.from(Bokeh.documents[0].get_model_by_name(`${name}:drawn`).data.alpha)
      .filter((alpha) => alpha < 1).length"""
    assert page.evaluate(dimmed, "lane0") > 0
    assert page.evaluate(dimmed, "lane2") > 0
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.getElementById('pointed-out').textContent === ''")
    assert page.evaluate(dimmed, "lane0") == 0
    assert found.complaints == []


def test_the_form_chooses_what_to_compare_with(
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


@pytest.mark.parametrize(
    ("name", "options"), [("dark", {"color_scheme": "dark"}), ("phone", PHONE)], ids=["dark", "phone"]
)
def test_it_is_dark_at_night_and_fits_a_phone(
    look: Callable[..., Look], address: str, name: str, options: dict[str, Any]
) -> None:
    found = opened(look(address.partition("/plans")[0], **options), address)
    page = found.page
    assert page.evaluate("() => document.documentElement.scrollWidth") == page.evaluate("() => innerWidth")
    background = '() => Bokeh.documents[0].get_model_by_name("lane1").background_fill_color'
    assert page.evaluate(background) == ("#0b0e14" if name == "dark" else "#ffffff")
    found.keep(f"compare-{name}")
    assert found.complaints == []
