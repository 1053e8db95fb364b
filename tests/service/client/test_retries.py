"""Which requests a client repeats, how often, and after which pause."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from support.client_answers import Answering, Given, found, problem
from zbv_service.client import (
    Client,
    InvalidRequest,
    Overloaded,
    Retries,
    ServiceFailed,
    ServiceUnreachable,
)
from zbv_service.client.retries import RetryState

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


def test_a_conflict_with_retry_after_is_retried_under_the_same_key(
    answering: Answering, pauses: list[float]
) -> None:
    """The first try got no answer, and the service has not finished with it."""
    kind = {"type": "/errors/idempotency-key-in-use"}
    in_use = httpx.Response(409, json={**problem(409).json(), **kind}, headers={"Retry-After": "0.0"})
    later = httpx.Response(409, json=problem(409).json(), headers={"Retry-After": "1"})
    client, requests = answering(httpx.ReadTimeout("slow"), later, found(), retries=SOON)
    assert client.submit({}).id == "a"
    assert len({request.headers["idempotency-key"] for request in requests}) == 1
    assert pauses == [0.0, 1.0]
    for final in (in_use, problem(409)):  # nothing says when to come back
        client, requests = answering(final)
        with pytest.raises(InvalidRequest):
            client.submit({})
        assert len(requests) == 1


def test_the_last_error_is_raised_after_the_retries(answering: Answering) -> None:
    client, requests = answering(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable, match="refused"):
        client.search("a")
    assert len(requests) == 3
    for status, kind in ((503, ServiceFailed), (429, Overloaded)):
        client, _ = answering(*[problem(status)] * 3)
        with pytest.raises(kind):
            client.search("a")


def test_a_retried_submission_keeps_its_key(answering: Answering) -> None:
    client, requests = answering(httpx.ReadError("cut"), found(), found())
    client.submit({})
    client.submit({})
    keys = [request.headers["idempotency-key"] for request in requests]
    assert keys[0] == keys[1] != keys[2]


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
