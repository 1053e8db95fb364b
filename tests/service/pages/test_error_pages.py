"""Errors are pages for browsers and documents for other clients."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs_over_http import submit
from support.serving import Serving
from support.tokens import add, kind_of
from zbv_service.database import DatabaseAway

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("method", "address", "status", "told"),
    [
        ("GET", "/nothing", 404, "Found no /nothing here"),
        ("GET", "/v1/plans/nothing/export/svg", 404, "Found no plan"),
        ("GET", "/plans?cursor=x", 422, "it must come from an earlier page"),
        ("POST", "/", 405, "accepts GET"),
        ("GET", "/errors/nothing", 404, "found no type of error"),
    ],
)
async def test_a_browser_gets_errors_as_pages_and_others_as_documents(
    serving: Serving, method: str, address: str, status: int, told: str
) -> None:
    async with serving("immediate") as service:
        answer = await service.http.request(method, address, headers=BROWSER)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert told.lower() in answer.text.lower()
        assert 'aria-label="Pages"' in answer.text
        assert answer.headers["x-request-id"] in answer.text
        document = await service.http.request(method, address)
        assert document.headers["content-type"] == "application/problem+json"
        assert document.status_code == status
        assert document.json()["type"] in answer.text, "links to the explanation"
        for name in ("allow", "retry-after"):
            assert answer.headers.get(name) == document.headers.get(name)


@pytest.mark.parametrize(
    ("error", "status", "kind"), [(DatabaseAway, 503, "not-ready"), (RuntimeError, 500, "internal-error")]
)
async def test_a_temporary_error_has_a_link_to_try_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int, kind: str
) -> None:
    async with serving("immediate") as service:

        async def fail(*_: Any) -> None:
            raise error("a secret of the service")

        monkeypatch.setattr(service.app.state.application.searches, "page", fail)
        answer = await service.http.get("/searches?q=a&state=done", headers=BROWSER)
        assert answer.status_code == status
        assert 'href="/searches?q=a&amp;state=done">Try again' in answer.text
        assert f"/errors/{kind}" in answer.text
        assert "secret" not in answer.text
        assert kind_of(await service.http.get("/searches")) == kind


async def test_an_error_page_links_to_the_address_without_its_wrong_parameters(serving: Serving) -> None:
    async with serving("immediate") as service:
        answer = await service.http.get("/searches?limit=x", headers=BROWSER)
        assert answer.status_code == 422
        assert 'href="/searches">Without the parameters' in answer.text
        answer = await service.http.get("/runs/x/measured?step=x", headers=BROWSER)
        assert 'href="/runs/x/measured">Without' in answer.text
        fields = {**BROWSER, "Sec-Fetch-Site": "same-origin"}
        run = f"/runs/{(await submit(service)).json()['id']}/plan?a=b"
        answer = await service.http.post(run, data={"plan_id": "0" * 64}, headers=fields)
        assert answer.status_code == 422
        assert "Without the parameters" not in answer.text


async def test_a_missing_scope_is_an_error_page(serving: Serving) -> None:
    async with serving("immediate", auth="tokens") as service:
        answer = await service.http.get(
            "/plans", headers={**BROWSER, **await add(service, "agent", name="agent-only")}
        )
        assert answer.status_code == 403
        assert "agent-only" in answer.text
        assert "Try again" not in answer.text


async def test_the_error_page_of_an_unread_form_closes_the_connection(serving: Serving) -> None:
    async with serving("immediate") as service:
        fields = {**BROWSER, "content-type": "application/x-www-form-urlencoded"}
        fields |= {"sec-fetch-site": "same-origin"}
        answer = await service.http.post(f"/runs/{'0' * 32}/plan", content="a" * 9999, headers=fields)
        assert (answer.status_code, answer.headers["content-type"]) == (413, "text/html; charset=utf-8")
        assert answer.headers["connection"] == "close", "otherwise the server reads the rest of the body"
