"""The lists of /v1 as pages, with forms as filters and links to other pages."""

from __future__ import annotations

import html
import re
from typing import Any

import httpx
import pytest
from support.serving import PROBLEM, Service, Serving

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LISTS = ("searches", "plans", "runs", "agents")


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


async def some_searches(service: Service, count: int) -> list[str]:
    found = []
    for seed in range(count):
        search: dict[str, Any] = (await service.submit(seed=seed)).json()
        found.append((await service.ended(search["id"]))["id"][:12])
    return found[::-1]


@pytest.mark.parametrize("name", LISTS)
async def test_empty_lists_explain_how_to_fill_or_clear_them(serving: Serving, name: str) -> None:
    async with serving("immediate") as service:
        empty = await shown(service.http, f"/{name}")
        assert re.search(r"No (plans|searches|runs|agents) yet", empty)
        assert f"<h1>{name.capitalize()}</h1>" in empty
        nothing = await shown(service.http, f"/{name}?q=zzz")
        assert re.search(rf"No {name.removesuffix('s').removesuffix('e')}\w* matches", nothing)
        assert 'value="zzz"' in nothing
        assert f'href="/{name}">Show all' in nothing


async def test_pages_link_to_older_and_newer_ones(serving: Serving) -> None:
    async with serving("immediate") as service:
        ids = await some_searches(service, 5)
        first = await shown(service.http, "/searches?limit=2&pp_degree=2&q=&objective=")
        assert rows(first) == ids[:2]
        assert link(first, "prev") is None
        second = await shown(service.http, str(link(first, "next")))
        assert rows(second) == ids[2:4]
        assert "pp_degree=2" in str(link(second, "next")), "filters are kept"
        last = await shown(service.http, str(link(second, "next")))
        assert (rows(last), link(last, "next")) == (ids[4:], None)
        back = await shown(service.http, str(link(last, "prev")))
        assert rows(back) == ids[2:4]
        # The first page is a full one, even if newer searches were added meanwhile.
        newer = await some_searches(service, 6)
        top = await shown(service.http, str(link(back, "prev")))
        assert rows(top) == ids[:2]
        assert rows(await shown(service.http, str(link(top, "prev")))) == newer[:2][-2:]


async def test_a_list_shows_the_entries_that_match_its_filters(serving: Serving) -> None:
    async with serving("immediate") as service:
        one = (await some_searches(service, 1))[0]
        wide = (await service.submit({**PROBLEM, "microbatches": 6, "objective": "makespan"})).json()["id"]
        await service.ended(wide)
        both = [wide[:12], one]
        for query, expected in (
            ("state=done", both),
            ("state=done&state=failed", both),
            ("state=queued", []),
            ("microbatches=6", both[:1]),
            ("objective=span&pp_degree=2", both[1:]),
            (f"q={wide[:8]}", both[:1]),
        ):
            text = await shown(service.http, f"/searches?{query}")
            assert rows(text) == expected, query
        assert re.search(r'value="done" checked', await shown(service.http, "/searches?state=done"))
        assert '<option value="span" selected>' in await shown(service.http, "/searches?objective=span")


async def test_a_wrong_filter_is_named_on_an_error_page(serving: Serving) -> None:
    async with serving("immediate") as service:
        text = await shown(service.http, "/plans?pp_degree=x&colour=red", 422)
        assert "<code>pp_degree</code>" in text
        assert "<code>colour</code>" in text
        assert 'href="/plans">Without the parameters' in text
        await shown(service.http, "/runs?cursor=x", 422)


async def test_names_are_escaped(serving: Serving) -> None:
    async with serving("immediate") as service:
        name = "<script>alert(1)</script>"
        node = {"name": name, "address": '"><b>', "port": 1, "slots": 1, "devices": ["A", "B", "A"]}
        agent = {"id": "a" * 32, **node, "allows": {"models": ["<i>"]}}
        assert (await service.http.post("/v1/agents", json=agent)).status_code == 201
        text = await shown(service.http, "/agents?q=%22%3E%3Cb")
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "2 × A, B" in text
        for raw in ("<script>alert", "<b>:1", "<i>", 'value=""><b'):
            assert raw not in text


async def test_pages_under_a_prefix_link_under_it(serving: Serving) -> None:
    async with serving("immediate") as service:
        await some_searches(service, 2)
        transport = httpx.ASGITransport(service.app, root_path="/planner")
        async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
            for address in ("/planner/", "/planner/searches?limit=1", "/planner/plans", "/planner/nothing"):
                text = (await http.get(address, headers=BROWSER)).text
                links = re.findall(r'(?:href|src|action)="([^"]*)"', text)
                assert links
                assert [found for found in links if not found.startswith("/planner/")] == ["#main"]
                assert text.count('aria-current="page"') == (0 if "nothing" in address else 1), address


async def test_the_front_page_shows_open_searches(serving: Serving) -> None:
    async with serving("held") as service:
        await some_searches_held(service)
        text = await shown(service.http, "/")
        assert "<b>2</b> searching, <b>1</b> queued" in text
        assert text.count('data-live="search-') == 3
        assert "data-open" in text


async def some_searches_held(service: Service) -> None:
    ids = [(await service.submit(seed=seed)).json()["id"] for seed in range(3)]
    for search_id in ids[:2]:
        await service.until(search_id, lambda found: found["state"] == "running")


async def test_an_example_is_searched_at_once(serving: Serving) -> None:
    async with serving("immediate") as service:
        answer = await service.http.post("/example", headers={"origin": "http://zbv"})
        assert answer.status_code == 303
        search_id = answer.headers["location"].removeprefix("/searches/")
        assert (await service.ended(search_id))["state"] == "done"
        again = await service.http.post("/example", headers={"origin": "http://zbv"})
        assert again.headers["location"] == answer.headers["location"]
        elsewhere = await service.http.post("/example", headers={"origin": "http://evil.example"})
        assert elsewhere.status_code == 403


async def test_a_plan_has_an_immutable_thumbnail(serving: Serving) -> None:
    async with serving("honest") as service:
        ended = await service.ended((await service.submit()).json()["id"])
        address = f"/plans/{ended['plan_id']}/thumbnail.png"
        picture = await service.http.get(address)
        assert picture.headers["content-type"] == "image/png"
        assert picture.content.startswith(b"\x89PNG")
        known = await service.http.get(address, headers={"if-none-match": picture.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
        (shown_at,) = re.findall(rf'src="({address}[^"]*)"', await shown(service.http, "/"))
        assert "immutable" in (await service.http.get(shown_at)).headers["cache-control"]
        assert (await service.http.get("/plans/nothing/thumbnail.png")).status_code == 404


async def test_the_front_page_of_an_empty_service_offers_an_example(serving: Serving) -> None:
    async with serving("immediate") as service:
        text = await shown(service.http, "/")
        assert "No plans yet" in text
        assert "Search an example" in text
        assert "zbv-service submit problem.json --server http://" in text
        await some_searches(service, 1)
        assert "No plans yet" not in await shown(service.http, "/")
