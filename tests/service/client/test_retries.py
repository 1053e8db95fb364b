"""Which requests a client repeats, how often, and after which pause."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from support.client_answers import Answering, Given, found, problem
from zbv_service.client import Client, Overloaded, Retries, ServiceFailed, ServiceUnreachable
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
