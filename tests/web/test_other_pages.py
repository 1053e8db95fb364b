"""The front page, error pages, and the file that opens from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from web.browsing import Look, Service
from zbv_solver.export import export
from zbv_solver.plans.plan import Plan


def test_the_front_page_of_a_new_service_leads_to_its_first_plan(
    look: Callable[..., Look], empty_service: Service
) -> None:
    found = look(empty_service.url)
    page = found.page
    found.open(empty_service.url)
    assert "No plans yet" in page.locator("main").inner_text()
    assert "zbv-service submit problem.json --server http://" in page.locator("main").inner_text()
    found.keep("home-empty")
    page.get_by_role("button", name="Search an example").click()
    page.wait_for_url("**/searches/*")
    empty_service.ended(page.url.rsplit("/", 1)[1])
    found.open(empty_service.url)
    assert page.get_by_role("link", name="4 ranks, 16 microbatches").count() == 1
    assert found.complaints == []
    assert found.strangers() == []


@pytest.mark.usefixtures("plan")
def test_the_front_page_leads_to_plans(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url)
    found.open(service.url)
    newest = service.call("/v1/plans?limit=1")["plans"][0]["plan_id"]  # others' tests store plans, too
    found.page.get_by_role("link", name=newest[:12]).click()
    found.page.wait_for_selector('#chart[data-state="ready"]')
    assert found.complaints == []
    assert found.strangers() == []


def test_an_unknown_plan_is_a_page_that_says_so(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url)
    answer = found.page.goto(f"{service.url}/plans/{'0' * 64}")
    assert answer is not None
    assert answer.status == 404
    assert found.page.locator("h1").count() == 1
    for name in ("Front page", "What this means", "Plans"):
        assert found.page.get_by_role("link", name=name, exact=True).count() == 1
    found.keep("error")


def test_a_standalone_page_opens_from_disk_without_a_network(
    look: Callable[..., Look], plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(export(plan, "html"), encoding="utf-8")
    found = look("file://", offline=True)
    found.open(path.as_uri())

    assert found.page.get_attribute("#chart", "data-bars") == str(len(plan.orders))
    assert found.page.locator(".card").count() == 5
    assert found.complaints == []
    assert found.requests == [path.as_uri()]
