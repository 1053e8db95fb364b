"""The front page, signing in, error pages, and the file that opens from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from zbv_service.client.tokens import find
from zbv_solver.export import export
from zbv_solver.plans.plan import Plan

from web.browsing import Look, Service

UNAUTHORISED = "error: Failed to load resource: the server responded with a status of 401 (Unauthorized)"


@pytest.mark.usefixtures("plan")
def test_the_front_page_leads_to_plans_and_searches_an_example(
    look: Callable[..., Look], service: Service
) -> None:
    found = look(service.url)
    page = found.page
    found.open(service.url)
    newest = service.call("/v1/plans?limit=1")["plans"][0]["plan_id"]  # other tests store plans, too
    page.get_by_role("link", name=newest[:12]).click()
    page.wait_for_selector('#chart[data-state="ready"]')
    found.open(service.url)
    page.get_by_role("button", name="Search an example").click()
    page.wait_for_url("**/searches/*")
    assert page.locator("h1").inner_text() == "4 ranks × 16 microbatches"
    service.call(f"/v1/searches/{page.url.rsplit('/', 1)[1]}/cancel", {})
    assert found.complaints == []
    assert found.strangers() == []


def test_an_unknown_plan_gets_an_error_page(look: Callable[..., Look], service: Service) -> None:
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


def test_a_token_signs_in_and_opens_the_requested_page(
    look: Callable[..., Look], service: Service, plan: Plan
) -> None:
    found = look(service.url, is_known=False)
    page = found.page
    found.open(f"{service.url}/plans/{plan.plan_id}")
    found.keep("sign-in")
    page.get_by_label("Token").fill("zbv_wrong")
    page.get_by_role("button", name="Sign in").click()
    assert "Unknown, expired or revoked token" in page.get_by_role("alert").inner_text()

    found.open(f"{service.url}/plans/{plan.plan_id}")
    page.get_by_label("Token").fill(str(find(service.url)))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector('#chart[data-state="ready"]')
    assert page.url == f"{service.url}/plans/{plan.plan_id}"
    assert set(found.complaints) == {UNAUTHORISED}, "nothing that the policy of the page forbids"
    assert found.strangers() == []

    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{service.url}/sign-in")
    found.open(service.url)
    assert page.get_by_label("Token").count() == 1


def test_a_link_on_another_site_leads_to_the_page(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url)
    elsewhere = service.url.replace("127.0.0.1", "localhost")
    found.page.goto(f"{elsewhere}/sign-in")
    found.page.evaluate(f"() => {{ location.href = '{service.url}/' }}")
    found.page.wait_for_selector("[aria-labelledby=submit]")
    assert found.page.url == f"{service.url}/"
