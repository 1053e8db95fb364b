"""The client: requests, which of them it repeats, results, and typed errors."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from support.client_answers import SEARCH, Answering, Given, found, problem
from zbv_service.client import (
    AgentClient,
    AgentGone,
    Client,
    ClientError,
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


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(404), NotFound),
        (problem(409), InvalidRequest),
        (problem(422), InvalidRequest),
        (problem(500), ServiceFailed),
        # Answers that break the API.
        (httpx.Response(404, text="nginx"), InvalidAnswer),
        (httpx.Response(200, text="<html>"), InvalidAnswer),
        (httpx.Response(200, json=[1]), InvalidAnswer),
        (httpx.Response(200, json={"id": "a"}), InvalidAnswer),
        (httpx.Response(200, json={**SEARCH, "created_at": "yesterday"}), InvalidAnswer),
        (httpx.Response(304), InvalidAnswer),
    ],
)
def test_each_answer_is_its_own_error_and_is_not_asked_for_again(
    answering: Answering, answer: httpx.Response, kind: type[ClientError]
) -> None:
    client, requests = answering(answer)
    with pytest.raises(kind) as caught:
        client.search("a")
    assert (type(caught.value), len(requests)) == (kind, 1)


def test_an_odd_error_document_is_the_error_that_its_status_says(answering: Answering) -> None:
    for odd in ({"status": "abc"}, {"errors": "x"}, {"errors": [7, {"pointer": None}]}, {"request_id": 7}):
        client, _ = answering(httpx.Response(422, json={"detail": "D", **odd}))
        with pytest.raises(InvalidRequest) as caught:
            client.search("a")
        assert caught.value.status == 422


def test_a_request_has_the_token_and_its_id_stays_one_segment_of_the_path(answering: Answering) -> None:
    for options, sent in (({"token": "secret"}, "Bearer secret"), ({}, None)):
        client, requests = answering(found(), found(), **options)
        client.search("../plans/x?y#z")
        client.search("..")
        assert [request.headers.get("authorization") for request in requests] == [sent] * 2
        paths = [request.url.raw_path for request in requests]
        assert paths == [b"/v1/searches/..%2Fplans%2Fx%3Fy%23z", b"/v1/searches/%2E%2E"]


def test_an_invalid_address_is_an_error_with_an_example() -> None:
    with pytest.raises(ServiceUnreachable, match="http://127"):
        Client("nonsense").search("a")


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


def test_a_malformed_document_is_an_invalid_answer(answering: Answering) -> None:
    wrong: list[dict[str, Any]] = [
        {"actions": ["0X0"]},
        {"channels": [{"peer": 1, "direction": "both", "transfers": []}]},
        {"channels": [{"peer": 1, "direction": "send", "transfers": ["0:0"]}]},
        {"channels": [{"peer": 1}]},
        {"rank": "zero"},
        {"partition": ["a"]},
        {"partition": [[1]]},
        {"recompute": [1]},
        {"recompute": True},
    ]
    calls: list[tuple[Callable[[AgentClient], object], list[dict[str, Any]]]] = [
        (lambda client: client.rank("p", 0), [{**_RANK, **change} for change in wrong]),
        (lambda client: client.plan("p"), [{"problem": {}, "ranks": []}]),  # another one than requested
        (lambda client: client.next_work("a", 1), [{"run_id": "r", "generation": 0}]),
    ]
    for call, documents in calls:
        for document in documents:
            with pytest.raises(InvalidAnswer):
                call(answering(httpx.Response(200, json=document))[0])


RUN: dict[str, Any] = {"id": "r", "state": "running", "plan_id": "p", "error": None}
NODE = NodeWork("r", 2, 1, 2, 1, "h:1", "p", "a:b", {})


def test_a_lost_answer_to_a_new_run_is_retried_under_the_same_key(answering: Answering) -> None:
    client, requests = answering(httpx.ReadError("cut off"), problem(503), httpx.Response(202, json=RUN))
    client.submit_run("p", {"factory": "a.b:c"}, nodes=1, steps=1)
    keys = [request.headers["idempotency-key"] for request in requests]
    assert (len(keys), len(set(keys))) == (3, 1)


@pytest.mark.parametrize(
    "answer", [problem(404), problem(410), problem(403, type="/planner/errors/agent-of-others")]
)
def test_a_call_of_an_unknown_agent_raises_agent_gone(
    connect: Callable[..., AgentClient], answer: httpx.Response
) -> None:
    """So does a replaced token: the agent then registers again with the new one."""
    client = connect(lambda _request: answer)
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
    with pytest.raises(InvalidRequest) as refused:
        connect(lambda _request: problem(422)).heartbeat("a", {})
    assert not isinstance(refused.value, AgentGone)


def test_wait_run_ends_with_the_run_or_raises_after_its_timeout(answering: Answering) -> None:
    failed = {**RUN, "state": "failed", "error": {"detail": "d", "failures": [{"rank": 1}]}}
    client, _ = answering(*(httpx.Response(200, json=run) for run in (failed, RUN)))
    ended = client.wait_run("r", 5)
    assert (ended.is_finished, ended.failures) == (True, [{"rank": 1}])
    with pytest.raises(RunTimeout, match="still running"):
        client.wait_run("r", 0)


def test_what_an_agent_sends_is_compressed(answering: Answering) -> None:
    client, requests = answering(httpx.Response(204))
    client.put_log("a", NODE, 4, b"the end")
    (sent,) = requests
    assert (sent.headers["content-encoding"], gzip.decompress(sent.content)) == ("gzip", b"the end")


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
    assert 5 < (RetryState(retries, "x").after_response(told(moment)) or 0) <= 30.1
    for nonsense in ("", "soon", "-1", "Sun, 06 Nov 1994 08:49:37 GMT"):
        assert 0.05 <= (RetryState(retries, "x").after_response(told(nonsense)) or 0) <= 0.1
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
