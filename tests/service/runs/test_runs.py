"""Runs and agents over HTTP: states, causes of failures, lost agents, and owners of agents."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
from fastapi.routing import APIRoute
from sqlalchemy import text
from support.serving import DEADLINE, Service, Serving
from support.tokens import add, kind_of
from zbv_service.security.access import scopes_of
from zbv_service.settings import Settings


async def test_a_run_waits_for_all_its_agents_and_each_gets_a_node(service: Service) -> None:
    answer = await service.submit_run()
    assert (answer.status_code, answer.json()["state"]) == (202, "waiting")
    run_id = answer.json()["id"]
    assert answer.headers["location"] == f"/v1/runs/{run_id}"
    first = await service.register("a")
    none = await service.http.get(f"/v1/agents/{first}/work", params={"wait": 0.1})
    assert none.status_code == 204
    assert (await service.run(run_id))["state"] == "waiting"

    waiting = asyncio.create_task(service.work(first))
    second = await service.register("b")
    found = [await waiting, await service.work(second)]
    assert [each["node_rank"] for each in found] == [0, 1]
    assert {each["rendezvous"] for each in found} == {"10.0.0.1:29500"}
    assert {(each["run_id"], each["plan_id"]) for each in found} == {(run_id, answer.json()["plan_id"])}
    assert (await service.run(run_id))["state"] == "starting"
    assert await service.work(first) == found[0]


async def test_a_run_is_running_or_succeeded_once_all_nodes_are(service: Service) -> None:
    run_id, first, second = await service.started_run()
    await service.beat(first, run_id, 0)
    assert (await service.run(run_id))["state"] == "starting"
    answer = await service.beat(second, run_id, 0)
    assert answer == {"stop": False, "cause": None, "reason": "", "plan_id": None}
    found = await service.run(run_id)
    assert found["state"] == "running"
    assert found["members"][0]["ranks"] == [{"rank": 0, "step": 0, "action": "3F1"}]
    await service.end_node(first, run_id, "succeeded")
    assert (await service.run(run_id))["state"] == "running"
    await service.end_node(second, run_id, "succeeded")
    await service.end_node(second, run_id, "failed")
    assert (await service.run(run_id))["state"] == "succeeded"
    events = await service.events_of_run(run_id)
    assert [event["kind"] for event in events] == ["waiting", "starting", "running", "succeeded"]
    later = await service.get(f"/v1/runs/{run_id}/events", after=events[1]["id"])
    assert later["events"] == events[2:]


async def test_the_events_of_a_run_are_streamed_until_it_ends(service: Service) -> None:
    run_id, *agents = await service.started_run()
    address, stream = f"/v1/runs/{run_id}/events", {"Accept": "text/event-stream"}
    follower = asyncio.create_task(service.http.get(address, headers=stream))
    for agent in agents:
        await service.beat(agent, run_id, 0)
        await service.end_node(agent, run_id, "succeeded")
    answer = await asyncio.wait_for(follower, DEADLINE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    listed = await service.events_of_run(run_id)
    sent = [dict(line.split(": ", 1) for line in text.splitlines()) for text in answer.text.split("\n\n")]
    told = [event for event in sent if "event" in event]
    events = [(event["event"], event.get("id"), json.loads(event["data"])) for event in told]
    expected = [(each["kind"], str(each["id"]), each) for each in listed]
    assert events == [*expected, ("end", None, {"state": "succeeded"})]

    first, last = (str(each["id"]) for each in (listed[1], listed[-1]))
    resumed = await service.http.get(address, headers={**stream, "Last-Event-ID": first})
    assert resumed.text.count("\ndata: ") == len(events) - 2
    over = await service.http.get(address, headers={**stream, "Last-Event-ID": last})
    assert (over.status_code, over.content) == (204, b"")
    assert (await service.http.get("/v1/runs/none/events", headers=stream)).status_code == 404


async def test_a_failed_run_keeps_a_bounded_part_of_its_reports(serving: Serving) -> None:
    async with serving("immediate", max_body_bytes=2**20) as service:
        run_id, *agents = await service.started_run()
        long = {"kind": "error", "rank": 0, "detail": "begin" + "x" * 3_900 + "end"}
        for agent in agents:
            await service.end_node(agent, run_id, "failed", *[long] * 256)
        error = (await service.run(run_id))["error"]
        assert (len(error["failures"]), error["failures_left_out"]) == (100, 412)
        details = [each["detail"] for each in error["failures"]]
        assert all(detail.startswith("begin") and detail.endswith("end") for detail in details)
        for path in (f"/v1/runs/{run_id}", "/v1/runs"):
            assert len((await service.http.get(path)).content) < 100_000


async def test_a_waiting_run_is_cancelled_at_once_a_started_one_once_its_nodes_stop(service: Service) -> None:
    waiting = (await service.submit_run()).json()["id"]
    answer = await service.http.post(f"/v1/runs/{waiting}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    run_id, first, second = await service.started_run()
    answer = await service.http.post(f"/v1/runs/{run_id}/cancel")
    assert (answer.status_code, answer.json()["cancel_requested"]) == (202, True)
    for agent in (first, second):
        assert (await service.beat(agent, run_id))["cause"] == "cancelled"
        await service.end_node(agent, run_id, "stopped")
    assert (await service.run(run_id))["state"] == "cancelled"
    assert [run["id"] for run in await service.listed("runs")] == [run_id, waiting]


async def test_only_silent_agents_are_lost(serving: Serving) -> None:
    async with serving("immediate", agent_heartbeat_seconds=0.5, agent_timeout_seconds=5.0) as service:
        run_id, first, second = await service.started_run()
        deadline = time.monotonic() + DEADLINE
        while not (answer := await service.beat(first, run_id, 2))["stop"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert answer["cause"] == "failed"
        await service.end_node(first, run_id, "stopped")
        error = (await service.run(run_id))["error"]  # only a failed run has one
        assert error["detail"].startswith("agent host-b (10.0.0.1, node 1) gave no sign of life")
        gone = await service.http.post(f"/v1/agents/{second}/heartbeat", json={})
        assert (gone.status_code, gone.json()["type"]) == (410, "/errors/agent-gone")
        assert [agent["name"] for agent in await service.listed("agents")] == ["host-a"]


async def test_a_draining_agent_gets_no_work_and_a_leaving_agent_fails_its_run(service: Service) -> None:
    idle = await service.register("c")
    assert (await service.http.post(f"/v1/agents/{idle}/drain")).json()["state"] == "draining"
    run_id, first, second = await service.started_run()
    assert (await service.get(f"/v1/agents/{idle}"))["run_id"] is None
    assert (await service.http.delete(f"/v1/agents/{second}")).status_code == 204
    assert (await service.http.delete(f"/v1/agents/{second}")).status_code == 204
    await service.end_node(first, run_id, "stopped")
    found = await service.run(run_id)
    assert found["state"] == "failed"
    assert "host-b" in found["error"]["detail"]
    assert "deregistered while it had a node" in found["error"]["detail"]


async def test_unknown_ids_are_not_found_and_a_repeated_registration_is_one_agent(
    service: Service, settings: Settings
) -> None:
    for address in ("/v1/runs/x", "/v1/runs/x/events", "/v1/agents/x", "/v1/agents/x/work"):
        answer = await service.http.get(address)
        assert (answer.status_code, answer.json()["type"]) == (404, "/errors/not-found"), address
    agent = await service.register("a")
    stop = await service.beat(agent, "f" * 32)
    assert (stop["stop"], stop["cause"]) == (True, "unknown-run")
    body = {"id": agent, "name": "h", "address": "h", "port": 1, "slots": 1}
    again = await service.http.post("/v1/agents", json=body)
    assert (again.status_code, again.json()["agent"]["name"]) == (200, "host-a")
    assert again.json()["timeout_seconds"] == settings.agent_timeout_seconds
    assert len(await service.listed("agents")) == 1


Fields = dict[str, str]


async def register(guarded: Service, digit: str, fields: Fields) -> httpx.Response:
    body = {"id": digit * 32, "name": f"host-{digit}", "address": f"10.0.0.{ord(digit)}", "port": 29500}
    body |= {"slots": 1, "allows": {"models": ["a.*"]}}
    return await guarded.http.post("/v1/agents", json=body, headers=fields)


async def test_only_the_registering_token_or_admin_acts_for_an_agent(guarded: Service) -> None:
    own = await add(guarded, "agent", name="own")
    foreign = await add(guarded, "agent", "read", "search", "launch", name="foreign")
    admin = await add(guarded, "admin", name="admin")
    assert (await register(guarded, "a", own)).status_code == 201
    agent, asked = "a" * 32, 0
    for route in guarded.app.router.routes:
        if not isinstance(route, APIRoute) or "{agent_id}" not in route.path or scopes_of(route) != ["agent"]:
            continue
        asked += 1
        method, path = next(iter(route.methods or ())), route.path
        address = path.format(agent_id=agent, run_id="0" * 32, generation=0, rank=0)
        answer = await guarded.http.request(method, address, headers=foreign)
        assert (answer.status_code, kind_of(answer)) == (403, "agent-of-others"), f"{method} {path}"
        assert "only that token" in answer.json()["detail"]
        for fields in (own, admin) if method != "DELETE" else ():
            answer = await guarded.http.request(method, address, headers=fields)
            assert answer.status_code != 403, f"{method} {path}: {answer.text}"
    assert asked >= 7
    assert (await guarded.http.get(f"/v1/agents/{agent}", headers=foreign)).json()["state"] == "draining"
    assert (await guarded.http.delete(f"/v1/agents/{agent}", headers=admin)).status_code == 204


async def test_another_token_can_neither_repeat_nor_read_a_registration_until_its_agent_is_removed(
    guarded: Service,
) -> None:
    """Retention removes agents that left, which frees their ids."""
    own, foreign = await add(guarded, "agent", name="own"), await add(guarded, "agent", name="foreign")
    assert [(await register(guarded, "a", own)).status_code for _ in range(2)] == [201, 200]
    refused = await register(guarded, "a", foreign)
    assert (refused.status_code, kind_of(refused)) == (403, "agent-of-others")
    assert "host-a" not in refused.text
    address = f"/v1/agents/{'a' * 32}"
    assert (await guarded.http.get(address, headers=own)).json()["name"] == "host-a"
    assert (await guarded.http.get(address, headers=foreign)).status_code == 403
    reader = await add(guarded, "agent", "read", name="reader")
    assert (await guarded.http.get(address, headers=reader)).status_code == 200, "the scope read allows it"
    async with guarded.app.state.application.database.writing() as session:
        await session.execute(text("DELETE FROM agents"))
    assert (await register(guarded, "a", foreign)).status_code == 201
    assert (await guarded.http.get(address, headers=foreign)).status_code == 200
    assert kind_of(await guarded.http.get(address, headers=own)) == "agent-of-others"


async def test_an_agent_of_another_token_gets_no_node_of_a_run(guarded: Service) -> None:
    """As node 0 it would set the rendezvous, and the ranks would unpickle its messages."""
    own, foreign = await add(guarded, "agent", name="own"), await add(guarded, "agent", name="foreign")
    guarded.http.headers.update(await add(guarded, "launch", "read", name="launcher"))
    run_id = (await guarded.submit_run()).json()["id"]
    for digit, fields in (("0", foreign), ("a", own), ("b", own)):
        assert (await register(guarded, digit, fields)).status_code == 201
    works = []
    for digit in "ab":
        answer = await guarded.http.get(f"/v1/agents/{digit * 32}/work", params={"wait": 30}, headers=own)
        assert answer.status_code == 200, answer.text
        works.append(answer.json())
    assert {found["rendezvous"] for found in works} == {"10.0.0.97:29500"}
    none = await guarded.http.get(f"/v1/agents/{'0' * 32}/work", headers=foreign)
    assert none.status_code == 204
    assert "b" * 32 not in str(works[0]), "a node learns only the rendezvous of the others"
    end = {"run_id": run_id, "generation": 0, "outcome": "failed", "failures": []}
    for digit in "0a":
        await guarded.http.post(f"/v1/agents/{digit * 32}/ended", json=end, headers=foreign)
    assert (await guarded.get(f"/v1/runs/{run_id}"))["state"] == "starting"
