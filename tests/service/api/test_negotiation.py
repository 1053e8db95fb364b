"""JSON for programs, pages for browsers."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from support.serving import Service
from zbv_service.api.negotiation import HTML, accepts

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_named"),
    [
        ([], False),
        (["*/*"], False),
        (["application/json"], False),
        ([BROWSER], True),
        (["TEXT/HTML;level=1;q=0.9, application/json"], True),
        (["application/json", "text/html"], True),
        ([";;;,,/,text/,/html"], False),
    ],
)
def test_a_caller_accepts_what_it_names(accept: list[str], is_named: bool) -> None:
    headers = [(b"accept", value.encode()) for value in accept]
    assert accepts(Request({"type": "http", "headers": headers}), HTML) is is_named


async def test_resources_are_json_for_browsers_too_and_have_pages(service: Service) -> None:
    accepted = await service.submit()
    ended = await service.ended(accepted.json()["id"])
    for address in (accepted.headers["location"], f"/v1/plans/{ended['plan_id']}", "/v1/searches"):
        answer = await service.http.get(address, headers={"accept": BROWSER})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        shown = await service.http.get(address.removeprefix("/v1"))
        assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert ended["plan_id"][:12] in shown.text


async def test_the_page_of_a_search_shows_its_state(held: Service) -> None:
    search_id = await held.begun()
    going_on = await held.http.get(f"/searches/{search_id}")
    assert 'http-equiv="refresh"' in going_on.text
    assert "running" in going_on.text
    await held.cancel(search_id)
    await held.ended(search_id)
    over = await held.http.get(f"/searches/{search_id}")
    assert 'http-equiv="refresh"' not in over.text
    assert "cancelled" in over.text
    missing = await held.http.get("/searches/nothing", headers={"accept": BROWSER})
    assert (missing.status_code, missing.headers["content-type"]) == (404, "text/html; charset=utf-8")
