"""The frontier in a browser: missing points are searched, and the picture fills in by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from zbv_solver.plans.plan import Plan

from web.browsing import PROBLEM, Look, Service


@pytest.fixture(scope="module")
def tight(service: Service) -> Plan:
    """A plan that no other test uses."""
    return service.search({**PROBLEM, "microbatches": 5})


def test_missing_points_are_searched_and_the_picture_fills_in(
    look: Callable[..., Look], service: Service, tight: Plan
) -> None:
    found = look(service.url, has_clock=True)
    page = found.page
    found.open(f"{service.url}/plans/{tight.plan_id}/frontier")
    points = page.locator("[aria-labelledby=limits] tbody tr").count()
    assert page.locator(".plot .asked").count() == points
    own = page.locator(".plot a path.own")
    assert own.count() == 1
    before = page.locator(".plot a").count()
    page.get_by_label("Effort").select_option("quick")
    page.get_by_role("button", name="missing point").click()
    page.wait_for_url(f"**/{tight.plan_id}/frontier")
    effort = page.get_by_label("Effort")
    if effort.count():  # input is kept while the page updates
        effort.select_option("thorough")
        effort.focus()
    found.soon(page.locator("[data-live=frontier]:not([data-open])").filter(has_not_text="not searched yet"))
    assert page.locator(".plot a").count() > before, "without being loaded again"
    if effort.count():
        assert effort.input_value() == "thorough"
    assert page.get_by_role("button", name="missing point").count() == 0
    values = page.locator("[aria-labelledby=limits] tbody tr td:nth-child(3)").all_inner_texts()
    numbers = [float("".join(value.split())) for value in values]
    assert numbers == sorted(numbers, reverse=True)
    found.keep("frontier-light")
    assert found.complaints == []
    assert found.strangers() == []


def test_a_point_leads_to_its_plan_by_mouse_and_keyboard(
    look: Callable[..., Look], service: Service, tight: Plan
) -> None:
    found = look(service.url)
    page = found.page
    found.open(f"{service.url}/plans/{tight.plan_id}/frontier")
    link = page.locator(".plot a").first
    target = str(link.get_attribute("href"))
    assert target.startswith("/plans/")
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"{service.url}{target}")
    page.go_back()
    page.locator(".plot a path.own").click()
    page.wait_for_url(f"{service.url}/plans/{tight.plan_id}")


def test_it_needs_no_javascript(look: Callable[..., Look], service: Service, tight: Plan) -> None:
    found = look(service.url, java_script_enabled=False)
    found.page.goto(f"{service.url}/plans/{tight.plan_id}/frontier")
    assert found.page.locator(".plot .steps").count() >= 1
    assert found.page.locator(".plot a").count() >= 1
