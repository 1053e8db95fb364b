"""One address with several representations: JSON for programs, pages for browsers."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from support.serving import Serving
from zbv_service.api.negotiation import HTML, JSON, preferred, wants_page

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


def asking(*values: str) -> Request:
    return Request({"type": "http", "headers": [(b"accept", value.encode()) for value in values]})


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        ([], False),
        (["*/*"], False),
        (["application/json"], False),
        ([BROWSER], True),
        (["text/html"], True),
        (["TEXT/HTML"], True),
        (["text/*"], True),
        (["text/html;level=1;q=0.9, application/json"], False),
        (["application/json;q=0.5, text/html;q=0.6"], True),
        (["application/json;q=0.6, text/html;q=0.5"], False),
        (["text/html, application/json"], False),  # equally preferred: the first one offered
        (["text/html;q=0, */*"], False),
        (["*/*;q=0.9, application/json;q=0.1"], True),  # the most specific range counts
        (["application/*;q=0.2, text/html;q=0.1"], False),
        (["application/json;q=0.1", "text/html"], True),  # repeated headers form one list
        (["image/png"], False),  # neither is accepted: JSON is more useful than an error
        (["text/html;q=2"], False),
        (["text/html;q=x, application/json;q=0.001"], False),
        (["text/html;q=1.000"], True),
        (["text/html;q=.5"], True),
        ([";;;,,/,text/,/html"], False),
        (["text/html;q=0.9999, application/json;q=0.1"], False),
        (["text/html;q=nan"], False),
        (["a/b," * 400 + "text/html"], False),  # only the beginning is read: parsing comes before the token
    ],
)
def test_the_preferred_media_type_is_chosen(accept: list[str], is_page: bool) -> None:
    assert wants_page(asking(*accept)) is is_page


def test_the_first_of_equally_preferred_types_is_chosen() -> None:
    assert preferred(asking("*/*"), (HTML, JSON)) == HTML
    assert preferred(asking("*/*"), (JSON, HTML)) == JSON


@pytest.mark.anyio
async def test_a_browser_is_redirected_from_a_resource_to_its_page(serving: Serving) -> None:
    async with serving("immediate") as service:
        accepted = await service.submit()
        ended = await service.ended(accepted.json()["id"])
        plan = f"/v1/plans/{ended['plan_id']}"
        asked = {"plan_id": ended["plan_id"], "model": {"factory": "a:b"}, "nodes": 1, "steps": 1}
        run = (await service.http.post("/v1/runs", json=asked)).json()
        for address, page in (
            (accepted.headers["location"], f"/searches/{ended['id']}"),
            (plan, f"/plans/{ended['plan_id']}"),
            ("/v1/searches", "/searches"),
            ("/v1/runs?state=waiting", "/runs?state=waiting"),
            (f"/v1/runs/{run['id']}", f"/runs/{run['id']}"),
            ("/v1/searches?pp_degree=2&limit=1", "/searches?pp_degree=2&limit=1"),
            ("/v1/plans?q=" + ended["plan_id"][:5], "/plans?q=" + ended["plan_id"][:5]),
        ):
            as_json = await service.http.get(address)
            assert as_json.headers["content-type"] == "application/json"
            to_page = await service.http.get(address, headers={"accept": BROWSER})
            assert (to_page.status_code, to_page.headers["location"]) == (303, page)
            assert as_json.headers["vary"] == to_page.headers["vary"] == "Accept"
            # A cache that kept this redirect would hide the JSON.
            assert "immutable" not in to_page.headers["cache-control"]
            shown = await service.http.get(page)
            assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert ended["plan_id"][:12] in shown.text
        known = await service.http.get(plan, headers={"if-none-match": f'"{ended["plan_id"]}"'})
        assert (known.status_code, known.headers["vary"]) == (304, "Accept")


@pytest.mark.anyio
async def test_the_page_of_a_search_shows_its_state(serving: Serving) -> None:
    async with serving("held") as service:
        search_id = (await service.submit()).json()["id"]
        await service.until(search_id, lambda found: found["objective"] is not None)
        going_on = await service.http.get(f"/searches/{search_id}")
        assert 'http-equiv="refresh"' in going_on.text
        assert "running" in going_on.text
        await service.http.post(f"/v1/searches/{search_id}/cancel")
        await service.ended(search_id)
        over = await service.http.get(f"/searches/{search_id}")
        assert 'http-equiv="refresh"' not in over.text
        assert "cancelled" in over.text
        missing = await service.http.get("/searches/nothing", headers={"accept": BROWSER})
        assert (missing.status_code, missing.headers["content-type"]) == (404, "text/html; charset=utf-8")
