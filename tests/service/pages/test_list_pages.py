"""Lists and the front page as text: filters, links, empty lists, and errors as pages."""

from __future__ import annotations

import html
import re
from typing import Any

import httpx
import pytest
from support.serving import Service
from zbv_service.database import DatabaseAway

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


async def shown(http: httpx.AsyncClient, address: str, status: int = 200) -> str:
    """A page's text."""
    answer = await http.get(address, headers=BROWSER)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


def rows(text: str) -> list[str]:
    """The ids of a table's rows, shortened as they are shown."""
    return re.findall(r'<th scope="row">.*?<code>(\w+)</code>', text)


def link(text: str, rel: str) -> str | None:
    found = re.search(rf'rel="{rel}" href="([^"]+)"', text)
    return None if found is None else html.unescape(found[1])


async def test_empty_lists_explain_how_to_fill_or_clear_them(service: Service) -> None:
    for name in ("searches", "plans", "runs", "agents"):
        empty = await shown(service.http, f"/{name}")
        assert f"No {name} yet" in empty
        assert f"<h1>{name.capitalize()}</h1>" in empty
        nothing = await shown(service.http, f"/{name}?q=zzz")
        assert re.search(rf"No {name.removesuffix('s').removesuffix('e')}\w* matches", nothing)
        assert 'value="zzz"' in nothing
        assert f'href="/{name}">Show all' in nothing
    front = await shown(service.http, "/")
    for words in ("No plans yet", "Search an example", "zbv-service submit problem.json --server http://"):
        assert words in front


async def test_a_list_has_pages_and_filters_and_links_under_a_prefix(service: Service) -> None:
    ids = [(await service.done(seed=seed))["id"][:12] for seed in range(5)][::-1]
    first = await shown(service.http, "/searches?limit=2&pp_degree=2&q=&objective=")
    assert (rows(first), link(first, "first")) == (ids[:2], None)
    second = await shown(service.http, str(link(first, "next")))
    assert rows(second) == ids[2:4]
    assert "pp_degree=2" in str(link(second, "next")), "filters are kept"
    last = await shown(service.http, str(link(second, "next")))
    assert (rows(last), link(last, "next")) == (ids[4:], None)
    assert rows(await shown(service.http, str(link(last, "first")))) == ids[:2]

    filtered = await shown(service.http, "/searches?state=done&state=failed&objective=span")
    assert rows(filtered) == ids
    assert re.search(r'value="done" checked', filtered)
    assert '<option value="span" selected>' in filtered
    wrong = await shown(service.http, "/plans?pp_degree=x&colour=red", 422)
    for words in ('href="/plans">Without the parameters', "<code>pp_degree</code>", "<code>colour</code>"):
        assert words in wrong

    transport = httpx.ASGITransport(service.app, root_path="/planner")
    async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
        plan = f"/plans/{(await service.listed('plans'))[0]['plan_id']}"
        for address, count in (("/", 1), (link(first, "next"), 1), ("/plans", 1), (plan, 0), ("/nothing", 0)):
            text = (await http.get(f"/planner{address}", headers=BROWSER)).text
            links = re.findall(r'(?:href|src|action|data-actions)="(/[^"]*)"', text)
            assert len(links) > 10
            assert [each for each in links if not each.startswith("/planner/")] == []
            assert text.count('aria-current="page"') == count, address


async def test_names_are_escaped(service: Service) -> None:
    name = "<script>alert(1)</script>"
    node = {"name": name, "address": '"><b>', "port": 1, "slots": 1, "devices": ["A", "B", "A"]}
    agent = {"id": "a" * 32, **node, "allows": {"models": ["<i>"]}}
    assert (await service.http.post("/v1/agents", json=agent)).status_code == 201
    text = await shown(service.http, "/agents?q=%22%3E%3Cb")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "2 × A, B" in text
    for raw in ("<script>alert", "<b>:1", "<i>", 'value=""><b'):
        assert raw not in text


async def test_the_front_page_shows_plans_and_open_searches(held: Service) -> None:
    plan_id = await held.import_plan()
    ids = [(await held.submit(seed=seed)).json()["id"] for seed in range(3)]
    for search_id in ids[:2]:
        await held.until(search_id, lambda found: found["state"] == "running")
    text = await shown(held.http, "/")
    assert "<b>2</b> searching, <b>1</b> queued" in text
    assert text.count('data-live="search-') == 3
    (picture,) = re.findall(rf'src="(/plans/{plan_id}/thumbnail.png[^"]*)"', text)
    assert (await held.http.get(picture)).headers["content-type"] == "image/png"


async def test_a_browser_gets_errors_as_pages_and_others_as_documents(service: Service) -> None:
    for method, address, status, told in (
        ("GET", "/nothing", 404, "Found no /nothing here"),
        ("GET", "/v1/plans/nothing/export/svg", 404, "Found no plan"),
        ("GET", "/plans?cursor=x", 422, "it must come from an earlier page"),
        ("POST", "/", 405, "accepts GET"),
        ("GET", "/errors/nothing", 404, "found no type of error"),
    ):
        answer = await service.http.request(method, address, headers=BROWSER)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        assert told.lower() in answer.text.lower()
        assert 'aria-label="Pages"' in answer.text
        assert answer.headers["x-request-id"] in answer.text
        document = await service.http.request(method, address)
        assert document.headers["content-type"] == "application/problem+json"
        assert document.status_code == status
        assert document.json()["type"] in answer.text, "links to the explanation"
        for name in ("allow", "retry-after"):
            assert answer.headers.get(name) == document.headers.get(name)

    assert 'href="/runs/x/measured">Without' in await shown(service.http, "/runs/x/measured?step=x", 422)
    run = f"/runs/{(await service.submit_run()).json()['id']}/plan?a=b"
    answer = await service.http.post(run, data={"plan_id": "0" * 64}, headers=BROWSER | SAME_ORIGIN)
    assert answer.status_code == 422
    assert "Without the parameters" not in answer.text, "a form is sent again, not opened"
    fields = BROWSER | SAME_ORIGIN | {"content-type": "application/x-www-form-urlencoded"}
    answer = await service.http.post(f"/runs/{'0' * 32}/plan", content="a" * 9999, headers=fields)
    assert (answer.status_code, answer.headers["content-type"]) == (413, "text/html; charset=utf-8")
    assert answer.headers["connection"] == "close", "otherwise the server reads the rest of the body"


@pytest.mark.parametrize(
    ("error", "status", "kind"), [(DatabaseAway, 503, "not-ready"), (RuntimeError, 500, "internal-error")]
)
async def test_a_temporary_error_has_a_link_to_try_again(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int, kind: str
) -> None:

    async def fail(*_: Any) -> None:
        raise error("a secret of the service")

    monkeypatch.setattr(service.app.state.application.searches, "page", fail)
    text = await shown(service.http, "/searches?q=a&state=done", status)
    assert 'href="/searches?q=a&amp;state=done">Try again' in text
    assert f"/errors/{kind}" in text
    assert "secret" not in text
