"""Lists over HTTP: filters and pages."""

from __future__ import annotations

import base64
import re

import httpx
from support.serving import PROBLEM, Service


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


async def test_pages_cover_all_searches(service: Service) -> None:
    ids = [(await service.submit(seed=seed)).json()["id"] for seed in range(5)]
    for search_id in ids:
        await service.ended(search_id)  # so that a page does not change between two requests
    found = await pages(service, "/v1/searches?limit=2&pp_degree=2")
    assert [len(page.json()["searches"]) for page in found] == [2, 2, 1]
    assert [entry["id"] for page in found for entry in page.json()["searches"]] == ids[::-1]
    for page in found:
        # The header Link (RFC 8288) has the same addresses, which keep the filters.
        ways = {"prev": page.json()["previous"], "next": page.json()["next"]}
        links = [f'<{address}>; rel="{name}"' for name, address in ways.items() if address is not None]
        assert page.headers["link"] == ", ".join(links)
        assert all("pp_degree=2" in link for link in links)
    assert (found[0].json()["previous"], found[-1].json()["next"]) == (None, None)
    assert (await service.http.get(found[2].json()["previous"])).json() == found[1].json()
    alone = await service.http.get("/v1/searches")
    assert "link" not in alone.headers


async def test_links_between_pages_contain_the_root_path(service: Service) -> None:
    for seed in range(2):
        await service.submit(seed=seed)
    transport = httpx.ASGITransport(service.app, root_path="/planner")
    async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
        page = await http.get("/planner/v1/searches?limit=1")
        assert page.json()["next"].startswith("/v1/searches?")
        assert page.headers["link"].startswith("</planner/v1/searches?")


async def test_searches_are_filtered(service: Service) -> None:
    first = (await service.submit()).json()
    wide = (await service.submit({**PROBLEM, "microbatches": 6, "objective": "makespan"})).json()
    for search in (first, wide):
        await service.ended(search["id"])

    async def listed(**params: object) -> list[str]:
        answer = await service.http.get("/v1/searches", params=httpx.QueryParams(params))  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return [entry["id"] for entry in answer.json()["searches"]]

    both = [wide["id"], first["id"]]
    assert await listed(state="done") == both
    assert await listed(state=["failed", "done"]) == both
    assert await listed(state="failed") == []
    assert await listed(microbatches=6) == both[:1]
    assert await listed(objective="span") == both[1:]
    assert await listed(placement="loop") == []
    assert await listed(created_after=first["created_at"]) == both[:1]
    assert await listed(created_before=wide["created_at"]) == both[1:]


async def test_plans_are_listed_and_filtered(honest: Service) -> None:
    for microbatches in (2, 3, 4):
        ended = (await honest.submit({**PROBLEM, "microbatches": microbatches})).json()
        await honest.ended(ended["id"])
    found = await pages(honest, "/v1/plans?limit=2")
    entries = [entry for page in found for entry in page.json()["plans"]]
    assert [entry["microbatches"] for entry in entries] == [4, 3, 2]
    assert found[0].headers["link"] == f'<{found[0].json()["next"]}>; rel="next"'
    plan = await honest.get(f"/v1/plans/{entries[0]['plan_id']}")
    assert entries[0]["value"] == plan["metrics"]["span"]
    one = (await honest.get("/v1/plans?microbatches=3&status=feasible"))["plans"]
    assert [entry["microbatches"] for entry in one] == [3]
    assert (await honest.get("/v1/plans?status=optimal"))["plans"] == []


async def test_runs_and_agents_are_listed_and_filtered(honest: Service) -> None:
    ended = await honest.done()
    for name in "abc":
        run = {"plan_id": ended["plan_id"], "model": {"factory": f"models:{name}"}, "nodes": 1, "steps": 1}
        assert (await honest.http.post("/v1/runs", json=run)).status_code == 202
        node = {"name": name, "address": name, "port": 1, "slots": 1}
        agent = {"id": f"{ord(name):032x}", **node}
        assert (await honest.http.post("/v1/agents", json=agent)).status_code == 201
    runs = [entry for page in await pages(honest, "/v1/runs?limit=2") for entry in page.json()["runs"]]
    assert [run["model"]["factory"] for run in runs] == ["models:c", "models:b", "models:a"]
    agents = [p.json()["agents"] for p in await pages(honest, "/v1/agents?limit=1")]
    assert [[agent["name"] for agent in page] for page in agents] == [["c"], ["b"], ["a"]]

    async def listed(path: str) -> list[str]:
        answer = await honest.http.get(path)
        assert answer.status_code == 200, answer.text
        return [entry["id"] for entry in next(iter(answer.json().values()))]

    assert await listed("/v1/runs?q=models:b") == [runs[1]["id"]]
    assert await listed(f"/v1/runs?q={ended['plan_id'][:9]}") == [run["id"] for run in runs]
    assert await listed("/v1/runs?state=succeeded&state=failed") == []
    assert await listed("/v1/agents?state=lost") == []
    assert await listed("/v1/agents?q=b") == [f"{ord('b'):032x}"]
    assert await listed(f"/v1/searches?q={ended['plan_id'][:5]}") == [ended["id"]]


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


WRONG_QUERIES = [
    "limit=0",
    "limit=1001",
    "state=asleep",
    "pp_degree=0",
    "pp_degree=99999999999999999999",
    "microbatches=x",
    "placement=w",
    "objective=time",
    "created_after=yesterday",
    "created_after=2030-01-01T00:00:00",
    "created_before=0001-01-01T00:00:00%2B10:00",
    "sort=oldest",
    "cursor=x",
    "cursor=%00",
    "cursor=" + "A" * 201,
    "cursor=" + encoded("2030-01-01T00:00:00+00:00 '; DROP TABLE searches"),
    "cursor=" + encoded("2030-99-01T00:00:00+00:00 abc"),
    "cursor=" + encoded("2030-01-01T00:00:00+00:00 abc older"),
    "q=%00",
    "q=" + "a" * 201,
]


async def test_a_wrong_parameter_is_named(service: Service) -> None:
    for query in WRONG_QUERIES:
        for path in ("/v1/searches", "/v1/plans", "/v1/runs", "/v1/agents"):
            if path == "/v1/plans" and query.startswith("state"):
                continue
            limited = "limit=10001" if path == "/v1/agents" and query == "limit=1001" else query
            answer = await service.http.get(f"{path}?{limited}")
            assert answer.status_code == 422, (path, query)
            assert answer.json()["type"] == "/errors/invalid-parameter"
            (error,) = answer.json()["errors"]
            assert re.fullmatch(rf"{query.partition('=')[0]}(\.0)?", error["parameter"]), error
