"""The calls for runs and agents."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from zbv_service.client import (
    AgentClient,
    AgentGone,
    HeartbeatReply,
    InvalidAnswer,
    InvalidRequest,
    NodeWork,
    RunTimeout,
)

RUN: dict[str, Any] = {"id": "r", "state": "running", "plan_id": "p", "error": None}
WORK: dict[str, Any] = {
    "run_id": "r",
    "generation": 0,
    "node_rank": 1,
    "nodes": 2,
    "ranks_per_node": 1,
    "rendezvous": "h:1",
    "plan_id": "p",
    "model": {"factory": "a:b"},
}


NODE = NodeWork("r", 2, 1, 2, 1, "h:1", "p", "a:b", {})


def answering(status: int, document: Any = None) -> AgentClient:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=document) if document is not None else httpx.Response(status)

    return AgentClient("http://zbv", transport=httpx.MockTransport(answer), retries=0)


def problem(status: int) -> dict[str, Any]:
    return {"type": "t", "title": "T", "status": status, "detail": "D"}


def test_a_lost_answer_to_a_new_run_is_retried_under_the_same_key(pauses: list[float]) -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise httpx.ReadError("cut off")
        return httpx.Response(503 if len(keys) == 2 else 202, json=RUN if len(keys) == 3 else problem(503))

    with AgentClient("http://zbv", transport=httpx.MockTransport(answer)) as client:
        client.submit_run("p", {"factory": "a.b:c"}, nodes=1, steps=1)
    assert (len(keys), len(set(keys))) == (3, 1)
    assert len(pauses) == 2


def test_next_work_is_read_or_none() -> None:
    assert answering(204).next_work("a", 1) is None
    work = answering(200, WORK).next_work("a", 1)
    assert work is not None
    assert (work.node_rank, work.rendezvous, work.factory, work.document) == (1, "h:1", "a:b", WORK)
    with pytest.raises(InvalidAnswer, match="rendezvous"):
        answering(200, {name: WORK[name] for name in WORK if name != "rendezvous"}).next_work("a", 1)


@pytest.mark.parametrize("status", [404, 410])
def test_a_call_of_an_unknown_agent_raises_agent_gone(status: int) -> None:
    client = answering(status, problem(status))
    calls: list[Callable[[], object]] = [
        lambda: client.next_work("a", 1),
        lambda: client.heartbeat("a", {}),
        lambda: client.put_trace("a", NODE, 0, b"{}"),
        lambda: client.put_log("a", NODE, 0, b""),
        lambda: client.report_end("a", {}),
        lambda: client.drain_agent("a"),
        lambda: client.remove_agent("a"),
    ]
    for call in calls:
        with pytest.raises(AgentGone, match="D"):
            call()


def test_a_refused_request_does_not_raise_agent_gone() -> None:
    with pytest.raises(InvalidRequest) as found:
        answering(422, problem(422)).heartbeat("a", {})
    assert not isinstance(found.value, AgentGone)


def test_wait_run_ends_with_the_run_or_raises_after_its_timeout() -> None:
    assert answering(200, {**RUN, "state": "succeeded"}).wait_run("r", 5).is_finished
    with pytest.raises(RunTimeout, match="still running"):
        answering(200, RUN).wait_run("r", 0)


def test_failures_of_a_run_are_empty_without_an_error() -> None:
    assert answering(200, RUN).run("r").failures == []
    failed = {**RUN, "state": "failed", "error": {"detail": "d", "failures": [{"rank": 1}]}}
    assert answering(200, failed).run("r").failures == [{"rank": 1}]


def test_the_answer_to_a_heartbeat_is_read() -> None:
    told = {"stop": True, "cause": "cancelled", "reason": "why", "plan_id": None}
    assert answering(200, told).heartbeat("a", {}) == HeartbeatReply(True, "cancelled", "why", None)
    on = {"stop": False, "cause": None, "reason": "", "plan_id": "p"}
    assert answering(200, on).heartbeat("a", {}) == HeartbeatReply(False, plan_id="p")


def test_traces_and_logs_are_sent_compressed_to_their_paths() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(204)

    client = AgentClient("http://zbv", transport=httpx.MockTransport(answer), retries=0)
    client.put_trace("a", NODE, 3, b"{}")
    client.put_log("a", NODE, 4, b"the end")
    below = "/v1/agents/a/runs/r/generations/2/ranks"
    assert [(each.method, each.url.path) for each in seen] == [
        ("PUT", f"{below}/3/trace"),
        ("PUT", f"{below}/4/log"),
    ]
    assert [gzip.decompress(each.content) for each in seen] == [b"{}", b"the end"]
    assert [each.headers["content-encoding"] for each in seen] == ["gzip", "gzip"]
    assert [each.headers["content-type"] for each in seen] == ["application/json", "text/plain"]
