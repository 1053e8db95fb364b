"""Lists over HTTP: their pages, and wrong parameters."""

from __future__ import annotations

import base64
import re

import httpx
from support.serving import Service


async def pages(service: Service, address: str) -> list[httpx.Response]:
    """All pages from an address on, following ``next``."""
    found = []
    following: str | None = address
    while following is not None:
        answer = await service.http.get(following)
        assert answer.status_code == 200, answer.text
        found.append(answer)
        following = answer.json()["next"]
    return found


async def test_pages_link_to_each_other_with_their_filters_below_the_root_path(service: Service) -> None:
    ids = [(await service.done(seed=seed))["id"] for seed in range(5)]
    found = await pages(service, "/v1/searches?limit=2&pp_degree=2")
    assert [len(page.json()["searches"]) for page in found] == [2, 2, 1]
    assert [entry["id"] for page in found for entry in page.json()["searches"]] == ids[::-1]
    for page in found:
        # The header Link (RFC 8288) has the same address, which keeps the filters.
        address = page.json()["next"]
        assert page.headers.get("link") == (address and f'<{address}>; rel="next"')
        assert address is None or ("pp_degree=2" in address and address.count("cursor=") == 1)
    assert found[-1].json()["next"] is None
    assert "link" not in (await service.http.get("/v1/searches")).headers
    transport = httpx.ASGITransport(service.app, root_path="/planner")
    async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
        page = await http.get("/planner/v1/searches?limit=1")
        assert page.json()["next"].startswith("/v1/searches?")
        assert page.headers["link"].startswith("</planner/v1/searches?")


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


WRONG = {
    "limit": ("0", "10001"),
    "state": ("asleep",),
    "created_after": ("yesterday", "2030-01-01T00:00:00"),
    "created_before": ("0001-01-01T00:00:00%2B10:00",),
    "sort": ("oldest",),
    "cursor": (
        *("x", "%00", "A" * 201),
        encoded("2030-01-01T00:00:00+00:00 '; DROP TABLE searches"),
        encoded("2030-99-01T00:00:00+00:00 abc"),
        encoded("2030-01-01T00:00:00+00:00 abc older"),
    ),
    "q": ("%00", "a" * 201),
}


async def test_a_wrong_parameter_is_named(service: Service) -> None:
    for kind in ("searches", "plans", "runs", "agents"):
        for name, value in ((name, value) for name, values in WRONG.items() for value in values):
            answer = await service.http.get(f"/v1/{kind}?{name}={value}")
            assert answer.status_code == 422, (kind, name, value)
            assert answer.json()["type"] == "/errors/invalid-parameter"
            (error,) = answer.json()["errors"]
            assert re.fullmatch(rf"{name}(\.0)?", error["parameter"]), error
