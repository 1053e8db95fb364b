"""Runs and agents over HTTP: states, repeated messages, causes of failures, and lost agents."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from support.serving import DEADLINE, Service, Serving


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
    assert await service.beat(second, run_id, 0) == {
        "stop": False,
        "cause": None,
        "reason": "",
        "plan_id": None,
    }
    found = await service.run(run_id)
    assert found["state"] == "running"
    assert found["members"][0]["ranks"] == [{"rank": 0, "step": 0, "action": "3F1"}]
    await service.end_node(first, run_id, "succeeded")
    assert (await service.run(run_id))["state"] == "running"
    await service.end_node(second, run_id, "succeeded")
    await service.end_node(second, run_id, "failed")
    assert (await service.run(run_id))["state"] == "succeeded"
    events = (await service.get(f"/v1/runs/{run_id}/events"))["events"]
    assert [event["kind"] for event in events] == ["waiting", "starting", "running", "succeeded"]
    later = await service.http.get(f"/v1/runs/{run_id}/events", params={"after": events[1]["id"]})
    assert later.json()["events"] == events[2:]


async def test_the_events_of_a_run_are_streamed_until_it_ends(service: Service) -> None:
    run_id, first, second = await service.started_run()
    address, stream = f"/v1/runs/{run_id}/events", {"Accept": "text/event-stream"}
    follower = asyncio.create_task(service.http.get(address, headers=stream))
    for agent in (first, second):
        await service.beat(agent, run_id, 0)
        await service.end_node(agent, run_id, "succeeded")
    answer = await asyncio.wait_for(follower, 30)
    assert answer.headers["content-type"].startswith("text/event-stream")
    listed = (await service.http.get(address)).json()["events"]
    sent = [dict(line.split(": ", 1) for line in text.splitlines()) for text in answer.text.split("\n\n")]
    events = [event for event in sent if "event" in event]
    assert [json.loads(event["data"]) for event in events] == [*listed, {"state": "succeeded"}]
    assert [event["event"] for event in events] == [*(each["kind"] for each in listed), "end"]
    assert [event.get("id") for event in events] == [*(str(each["id"]) for each in listed), None]

    resumed = await service.http.get(address, headers={**stream, "Last-Event-ID": events[1]["id"]})
    assert resumed.text.count("\ndata: ") == len(events) - 2
    over = await service.http.get(address, headers={**stream, "Last-Event-ID": events[-2]["id"]})
    assert (over.status_code, over.content) == (204, b"")
    unknown = await service.http.get("/v1/runs/none/events", headers=stream)
    assert unknown.status_code == 404


async def test_a_stream_of_a_run_that_goes_on_ends_when_the_service_stops(service: Service) -> None:
    run_id, _, _ = await service.started_run()
    stream = {"Accept": "text/event-stream"}
    follower = asyncio.create_task(service.http.get(f"/v1/runs/{run_id}/events", headers=stream))
    await asyncio.sleep(0.2)
    assert not follower.done()
    service.app.state.application.run_events.hang_up()
    answer = await asyncio.wait_for(follower, 30)
    assert "event: end" not in answer.text


async def test_a_failed_run_keeps_a_bounded_part_of_its_reports(serving: Serving) -> None:
    async with serving("immediate", max_body_bytes=2**20) as service:
        run_id, first, second = await service.started_run()
        long = {"kind": "error", "rank": 0, "detail": "begin" + "x" * 3_900 + "end"}
        for agent in (first, second):
            await service.end_node(agent, run_id, "failed", *[long] * 256)
        answer = await service.http.get(f"/v1/runs/{run_id}")
        error = answer.json()["error"]
        assert (len(error["failures"]), error["failures_left_out"]) == (100, 412)
        assert all(each["detail"].startswith("begin") for each in error["failures"])
        assert all(each["detail"].endswith("end") for each in error["failures"])
        assert len(answer.content) < 100_000
        assert len((await service.http.get("/v1/runs")).content) < 100_000


async def test_a_failure_stops_other_nodes_and_the_cause_is_the_error_of_the_run(service: Service) -> None:
    run_id, first, second = await service.started_run()
    lost = {"kind": "peer", "rank": 0, "action": "3F1", "peer": 1, "detail": "rank 1 did not deliver"}
    await service.end_node(first, run_id, "failed", lost)
    assert (await service.run(run_id))["state"] == "starting"  # the other node may report the cause
    answer = await service.beat(second, run_id)
    assert (answer["stop"], answer["cause"]) == (True, "failed")
    await service.end_node(second, run_id, "failed", {"kind": "killed", "rank": 1, "detail": "SIGKILL"})
    found = await service.run(run_id)
    assert (found["state"], found["error"]["detail"]) == ("failed", "SIGKILL")
    assert found["error"]["type"] == "/errors/run-failed"
    assert [failure["agent"] for failure in found["error"]["failures"]] == ["host-b", "host-a"]
    assert [failure["peer"] for failure in found["error"]["failures"]] == [None, 1]


async def test_a_waiting_run_is_cancelled_at_once_and_a_started_one_once_its_nodes_stopped(
    service: Service,
) -> None:
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
    listed = await service.listed("runs")
    assert [run["id"] for run in listed] == [run_id, waiting]


async def test_only_silent_agents_are_lost(serving: Serving) -> None:
    async with serving("immediate", agent_heartbeat_seconds=0.1, agent_timeout_seconds=1.0) as service:
        run_id, first, second = await service.started_run()
        until = time.monotonic() + DEADLINE
        while not (answer := await service.beat(first, run_id, 2))["stop"]:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        assert answer["cause"] == "failed"
        await service.end_node(first, run_id, "stopped")
        found = await service.run(run_id)
        assert found["state"] == "failed"
        assert found["error"]["detail"].startswith("agent host-b (10.0.0.1, node 1) gave no sign of life")
        gone = await service.http.post(f"/v1/agents/{second}/heartbeat", json={})
        assert (gone.status_code, gone.json()["type"]) == (410, "/errors/agent-gone")
        listed = await service.listed("agents")
        assert [agent["name"] for agent in listed] == ["host-a"]


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


async def test_a_repeated_registration_is_one_agent(service: Service) -> None:
    agent = await service.register("a")
    again = await service.http.post(
        "/v1/agents", json={"id": agent, "name": "h", "address": "h", "port": 1, "slots": 1}
    )
    assert (again.status_code, again.json()["agent"]["name"]) == (200, "host-a")
    assert again.json()["timeout_seconds"] == 15.0
    assert len(await service.listed("agents")) == 1


WRONG_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"plan_id": "0" * 64}, "/plan_id"),
    ({"plan_id": "x"}, "/plan_id"),
    ({"nodes": 3}, "/nodes"),
    ({"nodes": 0}, "/nodes"),
    ({"steps": 2**40}, "/steps"),
    ({"model": {"factory": "no colon"}}, "/model/factory"),
    ({"model": {"factory": "a:b", "seed": -1}}, "/model/seed"),
    ({"options": {"backend": "mpi"}}, "/options/backend"),
    ({"extra": 1}, "/extra"),
]


async def test_a_wrong_run_is_refused_with_a_pointer(service: Service) -> None:
    for changes, pointer in WRONG_RUNS:
        answer = await service.submit_run(**changes)
        assert answer.status_code == 422, answer.text
        assert [entry["pointer"] for entry in answer.json()["errors"]] == [pointer]
    assert (await service.get("/v1/runs")) == {"runs": [], "next": None, "previous": None}


async def test_arguments_that_responses_cannot_contain_are_refused(service: Service) -> None:
    plan_id = await service.import_plan()
    start = f'{{"plan_id": "{plan_id}", "nodes": 1, "steps": 1, "model": {{"factory": "a:b", '
    for argument in (
        "1e999",
        '"\\ud800"',
        '"\\u0000"',
        '{"\\udfff": 1}',
        '{"\\\\\\u0000": 1}',
        "[" * 32 + "]" * 32,
    ):
        content = f'{start}"arguments": {{"x": {argument}}}}}}}'
        answer = await service.http.post(
            "/v1/runs", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, argument
        assert answer.json()["errors"][0]["pointer"].startswith("/model/arguments"), argument


async def test_arguments_at_every_limit_are_shown_everywhere(service: Service) -> None:
    plan_id = await service.import_plan()
    nested: Any = "\\u0000 é 😀 " + "x" * 16_000
    for _ in range(32):
        nested = {"a": nested}
    model = {"factory": "a.b:c", "arguments": nested}
    body = {"plan_id": plan_id, "model": model, "nodes": 1, "steps": 1}
    answer = await service.http.post("/v1/runs", json=body)
    assert answer.status_code == 202, answer.text
    for path in ("/v1/runs", "/runs", f"/runs/{answer.json()['id']}"):
        assert (await service.http.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"allows": {"models": ["x" * 199] * 50}}, "patterns and directories have 9950 characters"),
        ({"allows": {"checkpoint_directories": ["/" + "x" * 3999] * 3}}, "have 12000 characters"),
        ({"devices": ["x" * 200] * 200}, "devices and versions have 40000 characters"),
    ],
)
async def test_an_agent_says_little_because_every_look_for_agents_reads_it(
    serving: Serving, more: dict[str, Any], said: str
) -> None:
    body = {"id": "a" * 32, "name": "host", "address": "10.0.0.1", "port": 29500, "slots": 1, **more}
    async with serving("immediate") as service:
        answer = await service.http.post("/v1/agents", json=body)
    assert answer.status_code == 422
    assert said in answer.json()["errors"][0]["detail"]


async def test_unknown_ids_are_not_found(service: Service) -> None:
    for address in ("/v1/runs/x", "/v1/runs/x/events", "/v1/agents/x", "/v1/agents/x/work"):
        answer = await service.http.get(address)
        assert (answer.status_code, answer.json()["type"]) == (404, "/errors/not-found"), address
