"""An agent belongs to the token that registered it; other tokens cannot act for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import text
from support.serving import Service, Serving
from support.tokens import add, kind_of
from zbv_service.client import AgentClient, AgentGone
from zbv_service.security.access import scopes_of

Fields = dict[str, str]


@pytest.fixture
async def service(serving: Serving) -> AsyncIterator[Service]:
    async with serving("immediate", auth="tokens") as found:
        yield found


async def register(service: Service, digit: str, fields: Fields) -> httpx.Response:
    body = {"id": digit * 32, "name": f"host-{digit}", "address": f"10.0.0.{ord(digit)}", "port": 29500}
    body |= {"slots": 1, "allows": {"models": ["a.*"]}}
    return await service.http.post("/v1/agents", json=body, headers=fields)


async def run_on_two(service: Service) -> str:
    service.http.headers.update(await add(service, "launch", "read", name="launcher"))
    answer = await service.submit_run()
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def test_only_the_registering_token_or_admin_acts_for_an_agent(service: Service) -> None:
    own = await add(service, "agent", name="own")
    foreign = await add(service, "agent", "read", "search", "launch", name="foreign")
    admin = await add(service, "admin", name="admin")
    assert (await register(service, "a", own)).status_code == 201
    agent, asked = "a" * 32, 0
    for route in service.app.router.routes:
        if not isinstance(route, APIRoute) or "{agent_id}" not in route.path or scopes_of(route) != ["agent"]:
            continue
        asked += 1
        method, path = next(iter(route.methods or ())), route.path
        address = path.format(agent_id=agent, run_id="0" * 32, generation=0, rank=0)
        answer = await service.http.request(method, address, headers=foreign)
        assert (answer.status_code, kind_of(answer)) == (403, "agent-of-others"), f"{method} {path}"
        assert "only that token" in answer.json()["detail"]
        for fields in (own, admin) if method != "DELETE" else ():
            answer = await service.http.request(method, address, headers=fields)
            assert answer.status_code != 403, f"{method} {path}: {answer.text}"
    assert asked >= 7
    assert (await service.http.get(f"/v1/agents/{agent}", headers=foreign)).json()["state"] == "draining"
    assert (await service.http.delete(f"/v1/agents/{agent}", headers=admin)).status_code == 204


async def test_another_token_can_neither_repeat_nor_read_a_registration(service: Service) -> None:
    own, foreign = await add(service, "agent", name="own"), await add(service, "agent", name="foreign")
    assert (await register(service, "a", own)).status_code == 201
    assert (await register(service, "a", own)).status_code == 200
    refused = await register(service, "a", foreign)
    assert (refused.status_code, kind_of(refused)) == (403, "agent-of-others")
    assert "host-a" not in refused.text
    address = f"/v1/agents/{'a' * 32}"
    assert (await service.http.get(address, headers=own)).json()["name"] == "host-a"
    assert (await service.http.get(address, headers=foreign)).status_code == 403
    reader = await add(service, "agent", "read", name="reader")
    assert (await service.http.get(address, headers=reader)).status_code == 200, "the scope read allows it"


async def test_an_agent_of_another_token_gets_no_node_of_a_run(service: Service) -> None:
    """As node 0 it would set the rendezvous, and the ranks would unpickle its messages."""
    own, foreign = await add(service, "agent", name="own"), await add(service, "agent", name="foreign")
    run_id = await run_on_two(service)
    for digit, fields in (("0", foreign), ("a", own), ("b", own)):
        assert (await register(service, digit, fields)).status_code == 201
    works = []
    for digit in "ab":
        answer = await service.http.get(f"/v1/agents/{digit * 32}/work", params={"wait": 5}, headers=own)
        assert answer.status_code == 200, answer.text
        works.append(answer.json())
    assert {found["rendezvous"] for found in works} == {"10.0.0.97:29500"}
    none = await service.http.get(f"/v1/agents/{'0' * 32}/work", headers=foreign)
    assert none.status_code == 204
    assert "b" * 32 not in str(works[0]), "a node learns only the rendezvous of the others"
    end = {"run_id": run_id, "generation": 0, "outcome": "failed", "failures": []}
    for digit in "0a":
        await service.http.post(f"/v1/agents/{digit * 32}/ended", json=end, headers=foreign)
    assert (await service.get(f"/v1/runs/{run_id}"))["state"] == "starting"


def test_the_client_reports_a_replaced_token_as_a_gone_agent() -> None:
    """The agent then registers again with the new token. The service is below a root path here."""
    told = {"type": "/planner/errors/agent-of-others", "title": "T", "status": 403, "detail": "D"}
    transport = httpx.MockTransport(lambda _request: httpx.Response(403, json=told))
    with AgentClient("http://zbv", transport=transport, retries=0) as client, pytest.raises(AgentGone):
        client.heartbeat("a", {})


async def test_a_removed_agent_can_be_registered_by_another_token(service: Service) -> None:
    """Retention removes agents that left, which frees their ids."""
    first, second = [await add(service, "agent", name=name) for name in ("first", "second")]
    assert (await register(service, "c", first)).status_code == 201
    agent = f"/v1/agents/{'c' * 32}"
    assert (await service.http.get(agent, headers=first)).status_code == 200
    async with service.app.state.application.database.writing() as session:
        await session.execute(text("DELETE FROM agents"))
    assert (await register(service, "c", second)).status_code == 201
    assert (await service.http.get(agent, headers=second)).status_code == 200
    assert kind_of(await service.http.get(agent, headers=first)) == "agent-of-others"
