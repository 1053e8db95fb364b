"""Signing in and out, as a person does."""

from __future__ import annotations

from collections.abc import Callable

from web.browsing import Look, Service
from zbv_service.client.tokens import find
from zbv_solver.plans.plan import Plan

UNAUTHORISED = "error: Failed to load resource: the server responded with a status of 401 (Unauthorized)"


def test_a_token_signs_in_and_leads_to_what_was_asked_for(
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
