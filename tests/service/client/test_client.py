"""The client: requests, which of them it repeats, results, and typed errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from support.client_answers import SEARCH, Answering, Given, found, problem
from support.paths import ROOT
from zbv_service.client import (
    AgentClient,
    AgentGone,
    Client,
    ClientError,
    HeartbeatReply,
    InvalidAnswer,
    InvalidRequest,
    NodeWork,
    NotFound,
    Overloaded,
    Retries,
    RunTimeout,
    ServiceFailed,
    ServiceUnreachable,
)
from zbv_service.client.retries import RetryState

OPENAPI = ROOT / "service" / "openapi.json"


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (409, InvalidRequest), (422, InvalidRequest), (500, ServiceFailed)]
)
def test_each_problem_is_its_own_error(answering: Answering, status: int, kind: type[ClientError]) -> None:
    client, requests = answering(problem(status, request_id="r"))
    with pytest.raises(kind) as caught:
        client.search("a")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.request_id) == (status, "r")  # type: ignore[attr-defined]
    assert len(requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="nginx"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"id": "a"}),
        httpx.Response(200, json={**SEARCH, "created_at": "yesterday"}),
        httpx.Response(304),
    ],
)
def test_an_answer_that_breaks_the_api_is_an_invalid_answer(
    answering: Answering, answer: httpx.Response
) -> None:
    client, requests = answering(answer)
    with pytest.raises(InvalidAnswer):
        client.search("a")
    assert len(requests) == 1


def test_an_invalid_request_lists_the_broken_rules_with_pointers(answering: Answering) -> None:
    client, _ = answering(problem(422, errors=[{"pointer": "/problem/costs", "detail": "wrong"}]))
    with pytest.raises(InvalidRequest) as caught:
        client.submit({})
    assert [str(issue) for issue in caught.value.issues] == ["/problem/costs: wrong"]


def test_a_problem_document_with_odd_members_is_an_ordinary_error(answering: Answering) -> None:
    for odd in (
        {"status": "abc"},
        {"errors": "x"},
        {"errors": [7, {"pointer": None}]},
        {"request_id": 7, "type": None, "title": None},
    ):
        client, _ = answering(httpx.Response(422, json={"detail": "D", **odd}))
        with pytest.raises(InvalidRequest) as caught:
            client.search("a")
        assert caught.value.status == 422
        assert all(isinstance(str(issue), str) for issue in caught.value.issues)


def test_a_token_is_sent_with_every_request(answering: Answering) -> None:
    client, requests = answering(found(), token="secret")
    client.search("a")
    assert requests[0].headers["authorization"] == "Bearer secret"
    client, requests = answering(found())
    client.search("a")
    assert "authorization" not in requests[0].headers


def test_an_id_stays_one_segment_of_the_path(answering: Answering) -> None:
    client, requests = answering(found(), found())
    client.search("../plans/x?y#z")
    client.search("..")
    assert [request.url.raw_path for request in requests] == [
        b"/v1/searches/..%2Fplans%2Fx%3Fy%23z",
        b"/v1/searches/%2E%2E",
    ]


def test_an_invalid_address_is_an_error_with_an_example() -> None:
    with pytest.raises(ServiceUnreachable, match="http://127"):
        Client("nonsense").search("a")


def test_all_searches_reads_every_page(answering: Answering) -> None:
    first = {"searches": [{**SEARCH, "id": "a"}, {**SEARCH, "id": "b"}], "next": "/v1/searches?after=b"}
    last = {"searches": [{**SEARCH, "id": "c"}], "next": None}
    client, requests = answering(httpx.Response(200, json=first), httpx.Response(200, json=last))
    listed = list(client.all_searches(2, state="done"))
    assert [search.id for search in listed] == ["a", "b", "c"]
    assert [request.url.query for request in requests] == [b"limit=2&state=done", b"after=b"]


@pytest.mark.parametrize("following", ["https://evil.example/v1/", "//evil.example", 7, "v1/searches"])
def test_a_link_to_the_next_page_on_another_site_is_refused(answering: Answering, following: Any) -> None:
    """The client would send its token there."""
    client, requests = answering(httpx.Response(200, json={"searches": [], "next": following}))
    with pytest.raises(InvalidAnswer):
        list(client.all_searches())
    assert len(requests) == 1


_RANK: dict[str, Any] = {
    **{"plan_id": "p", "rank": 0, "pp_degree": 2, "microbatches": 1, "placement": "v", "chunks": 2},
    **{"stages": [0, 3], "actions": ["0F0"], "peers": [1], "channels": []},
}


@pytest.mark.parametrize(
    "change",
    [
        {"actions": ["0X0"]},
        {"channels": [{"peer": 1, "direction": "both", "transfers": []}]},
        {"channels": [{"peer": 1, "direction": "send", "transfers": ["0:0"]}]},
        {"channels": [{"peer": 1}]},
        {"rank": "zero"},
        {"partition": ["a"]},
        {"partition": [[1]]},
        {"recompute": [1]},
        {"recompute": True},
    ],
)
def test_a_malformed_rank_is_an_invalid_answer(answering: Answering, change: dict[str, Any]) -> None:
    cut = {"partition": [["a", "b"]], "recompute": [True]}
    client, _ = answering(*(httpx.Response(200, json={**_RANK, **more}) for more in (cut, {}, change)))
    found = client.rank("p", 0)
    assert (found.partition, found.recompute) == ((("a", "b"),), (True,))
    found = client.rank("p", 0)
    assert (found.partition, found.recompute) == (None, None)
    with pytest.raises(InvalidAnswer):
        client.rank("p", 0)


def test_another_plan_than_requested_is_an_invalid_answer(answering: Answering) -> None:
    client, _ = answering(httpx.Response(200, json={"problem": {}, "ranks": []}))
    with pytest.raises(InvalidAnswer):
        client.plan("p")


RUN: dict[str, Any] = {"id": "r", "state": "running", "plan_id": "p", "error": None}
WORK: dict[str, Any] = {
    **{"run_id": "r", "generation": 0, "node_rank": 1, "nodes": 2, "ranks_per_node": 1},
    **{"rendezvous": "h:1", "plan_id": "p", "model": {"factory": "a:b"}},
}


NODE = NodeWork("r", 2, 1, 2, 1, "h:1", "p", "a:b", {})


def answering(status: int, document: Any = None) -> AgentClient:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=document) if document is not None else httpx.Response(status)

    return AgentClient("http://zbv", transport=httpx.MockTransport(answer), retries=0)


def error(status: int, kind: str = "t") -> dict[str, Any]:
    return {"type": kind, "title": "T", "status": status, "detail": "D"}


OF_OTHERS = error(403, "/planner/errors/agent-of-others")
"""Of a service below a root path."""


def test_a_lost_answer_to_a_new_run_is_retried_under_the_same_key(pauses: list[float]) -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise httpx.ReadError("cut off")
        return httpx.Response(503 if len(keys) == 2 else 202, json=RUN if len(keys) == 3 else error(503))

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


@pytest.mark.parametrize("answer", [error(404), error(410), OF_OTHERS])
def test_a_call_of_an_unknown_agent_raises_agent_gone(answer: dict[str, Any]) -> None:
    """So does a replaced token: the agent then registers again with the new one."""
    client = answering(answer["status"], answer)
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
        answering(422, error(422)).heartbeat("a", {})
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


SOON = Retries(count=2, first=0.0, longest=0.0, longest_retry_after=1.0)


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        problem(503),
        problem(429),
        httpx.Response(502, text="a proxy's"),
        httpx.Response(504, text="a proxy's"),
    ],
)
def test_transient_errors_are_retried(answering: Answering, trouble: Given) -> None:
    client, requests = answering(trouble, trouble, found())
    assert client.search("a").state == "queued"
    assert len(requests) == 3


def test_the_last_error_is_raised_after_the_retries(answering: Answering) -> None:
    client, requests = answering(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable, match="refused"):
        client.search("a")
    assert len(requests) == 3
    for status, kind in ((503, ServiceFailed), (429, Overloaded)):
        client, _ = answering(*[problem(status)] * 3)
        with pytest.raises(kind):
            client.search("a")


def told(value: str) -> httpx.Response:
    return httpx.Response(503, headers={"Retry-After": value})


def test_retry_after_may_be_seconds_or_a_date() -> None:
    retries = Retries(count=9, first=0.1, longest=0.2)
    pauses = {RetryState(retries, "x").after_response(told("7")) for _ in range(9)}
    assert all(pause is not None and 7 < pause <= 7.1 for pause in pauses)
    assert len(pauses) > 1, "clients that got the same Retry-After must not come back together"
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    pause = RetryState(retries, "x").after_response(told(moment))
    assert pause is not None
    assert 25 < pause <= 30.1
    for nonsense in ("", "soon", "-1", "Sun, 06 Nov 1994 08:49:37 GMT"):
        pause = RetryState(retries, "x").after_response(told(nonsense))
        assert pause is not None
        assert 0.05 <= pause <= 0.1
    assert RetryState(retries, "x").after_response(told("61")) is None


def test_pauses_double_up_to_a_limit_with_jitter() -> None:
    pauses = [[0.0] * 4 for _ in range(20)]
    for row in pauses:
        attempts = RetryState(Retries(count=4, first=1.0, longest=4.0), "x")
        row[:] = [attempts.after_error(httpx.ReadError("cut")) for _ in row]
    for index, limit in enumerate((1, 2, 4, 4)):
        column = [row[index] for row in pauses]
        assert limit / 2 <= min(column) < max(column) <= limit


def test_a_negative_number_of_retries_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Client("http://zbv", retries=-1)


def operation(request: httpx.Request) -> dict[str, Any] | None:
    """The operation of the API that a request is for."""
    for path, item in json.loads(OPENAPI.read_text())["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), request.url.path):
            found: dict[str, Any] | None = item.get(request.method.lower())
            return found
    return None


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.searches(5, state="done", kind="plan"),
        lambda client: client.events("a"),
        lambda client: client.simulation("a", "5%", scenarios=9, seed=1),
        lambda client: client.plan_document("a"),
        lambda client: client.rank("a", 0),
        lambda client: client.export("a", "torch-csv"),
        lambda client: client.runs(5),
        lambda client: client.run_events("a", 7),
        lambda client: client.run_trace("a", 1),
        lambda client: client.rank_log("a", 0, 1),
        lambda client: client.agents(),
        lambda client: client.next_work("a", 1.5),
    ],
)
def test_what_a_client_asks_is_an_operation_of_the_api(ask: Callable[[AgentClient], Any]) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(404, json={"type": "/errors/not-found", "title": "No", "detail": "none"})

    transport = httpx.MockTransport(answer)
    with AgentClient("http://zbv", transport=transport) as client, pytest.raises((NotFound, AgentGone)):
        for _ in ask(client):
            pass
    (request,) = seen
    found = operation(request)
    assert found is not None
    known = {each["name"] for each in found.get("parameters", ()) if each["in"] == "query"}
    assert set(request.url.params) <= known
