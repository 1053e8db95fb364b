"""The thin client, blocking and asynchronous: errors that tell cases apart, and bounded repetition."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clients import AT_ONCE, KINDS, Driver
from zbv_service.client import (
    AsyncClient,
    Client,
    ClientError,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    Retries,
    SearchEnded,
    SearchTimeout,
    ServiceFailed,
    ServiceUnreachable,
    cache,
    streams,
)
from zbv_service.client.retries import RetryState

SEARCH: dict[str, Any] = {
    "id": "a",
    "state": "queued",
    "objective": None,
    "lower_bound": None,
    "gap": None,
    "plan_id": None,
    "error": None,
    "method": None,
    "attempts": 0,
    "options": {},
    "created_at": "2026-01-02T03:04:05Z",
}
ROOT = Path(__file__).resolve().parents[3]
SOON = Retries(count=2, first=0.0, longest=0.0, longest_retry_after=1.0)
Given = httpx.Response | Exception
Answering = Callable[..., tuple[Driver, list[httpx.Request]]]


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Makes clients of either kind whose requests a function answers."""
    with asyncio.Runner() as runner:

        def make(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> Driver:
            kind = Client if request.param == "sync" else AsyncClient
            options = {"retries": AT_ONCE, "transport": httpx.MockTransport(answer), **options}
            return Driver(kind("http://zbv", **options), runner)

        yield make


@pytest.fixture
def answering(connect: Callable[..., Driver]) -> Answering:
    """A client whose requests get these answers one after the other, and the requests it made."""

    def make(*answers: Given, **options: Any) -> tuple[Driver, list[httpx.Request]]:
        left, requests = iter(answers), []

        def answer(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            given = next(left)
            if isinstance(given, Exception):
                raise given
            # A copy, because a response can be read once; a stream, because the network sends one.
            return httpx.Response(given.status_code, headers=given.headers, stream=Chunks([given.content]))

        return connect(answer, **options), requests

    return make


def problem(status: int, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"type": "t", "title": "T", "status": status, "detail": "D", **more})


def found(**changes: Any) -> httpx.Response:
    return httpx.Response(200, json={**SEARCH, **changes})


def stream(*events: tuple[str, str, dict[str, Any]], cut: str = "") -> httpx.Response:
    """An event stream of (id, kind, data); ``cut`` is what there is of one more."""
    text = "".join(f"id: {id_}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for id_, kind, data in events)
    return httpx.Response(200, text=text + cut, headers={"Content-Type": "text/event-stream; charset=utf-8"})


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in chunks, for clients of both kinds."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def streaming(chunks: Iterable[bytes]) -> httpx.Response:
    """An event stream of these chunks."""
    return httpx.Response(200, stream=Chunks(chunks), headers={"Content-Type": "text/event-stream"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, NotFound), (409, InvalidRequest), (422, InvalidRequest), (500, ServiceFailed)],
)
def test_each_problem_is_its_own_error(answering: Answering, status: int, kind: type[ClientError]) -> None:
    client, requests = answering(problem(status, request_id="r"))
    with pytest.raises(kind) as caught:
        client.do(lambda made: made.search("a"))
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
def test_an_answer_of_something_else_is_recognised(answering: Answering, answer: httpx.Response) -> None:
    client, requests = answering(answer)
    with pytest.raises(InvalidAnswer):
        client.do(lambda made: made.search("a"))
    assert len(requests) == 1


def test_broken_rules_come_with_their_pointers(answering: Answering) -> None:
    client, _ = answering(problem(422, errors=[{"pointer": "/problem/costs", "detail": "wrong"}]))
    with pytest.raises(InvalidRequest) as caught:
        client.do(lambda made: made.submit({}))
    assert [str(issue) for issue in caught.value.issues] == ["/problem/costs: wrong"]


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
def test_passing_trouble_is_tried_again(answering: Answering, trouble: Given) -> None:
    client, requests = answering(trouble, trouble, found())
    assert client.do(lambda made: made.search("a")).state == "queued"
    assert len(requests) == 3


def test_a_request_that_is_still_being_answered_is_asked_again(answering: Answering) -> None:
    """The first try got no answer, and the service has not finished with it."""
    kind = {"type": "/problems/idempotency-key-in-use"}
    in_use = httpx.Response(409, json={**problem(409).json(), **kind}, headers={"Retry-After": "0.0"})
    later = httpx.Response(409, json=problem(409).json(), headers={"Retry-After": "1"})
    client, requests = answering(httpx.ReadTimeout("slow"), later, found(), retries=SOON)
    assert client.do(lambda made: made.submit({})).id == "a"
    assert len({request.headers["idempotency-key"] for request in requests}) == 1
    assert len(requests) == 3
    for final in (in_use, problem(409)):  # nothing says when to come back
        client, requests = answering(final)
        with pytest.raises(InvalidRequest):
            client.do(lambda made: made.submit({}))
        assert len(requests) == 1


def test_lasting_trouble_is_reported_in_the_end(answering: Answering) -> None:
    client, requests = answering(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable, match="refused"):
        client.do(lambda made: made.search("a"))
    assert len(requests) == 3
    for status, kind in ((503, ServiceFailed), (429, Overloaded)):
        client, _ = answering(*[problem(status)] * 3)
        with pytest.raises(kind):
            client.do(lambda made: made.search("a"))


def test_a_repeated_submission_is_one_request(answering: Answering) -> None:
    client, requests = answering(httpx.ReadError("cut"), found(), found())
    client.do(lambda made: made.submit({}))
    client.do(lambda made: made.submit({}))
    keys = [request.headers["idempotency-key"] for request in requests]
    assert keys[0] == keys[1] != keys[2]


def test_a_token_is_sent_with_every_request(answering: Answering) -> None:
    client, requests = answering(found(), token="secret")
    client.do(lambda made: made.search("a"))
    assert requests[0].headers["authorization"] == "Bearer secret"
    client, requests = answering(found())
    client.do(lambda made: made.search("a"))
    assert "authorization" not in requests[0].headers


def test_an_id_stays_one_part_of_the_address(answering: Answering) -> None:
    client, requests = answering(found(), found())
    client.do(lambda made: made.search("../plans/x?y#z"))
    client.do(lambda made: made.search(".."))
    assert [request.url.raw_path for request in requests] == [
        b"/v1/searches/..%2Fplans%2Fx%3Fy%23z",
        b"/v1/searches/%2E%2E",
    ]


@pytest.mark.parametrize("following", ["https://evil.example/v1/", "//evil.example", 7, "v1/searches"])
def test_no_next_page_leads_elsewhere(answering: Answering, following: Any) -> None:
    """The token would go along."""
    client, requests = answering(httpx.Response(200, json={"searches": [], "next": following}))
    with pytest.raises(InvalidAnswer):
        client.do(lambda made: made.all_searches())
    assert len(requests) == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"status": "abc"},
        {"errors": "x"},
        {"errors": [7, {"pointer": None}]},
        {"request_id": 7, "type": None, "title": None},
    ],
)
def test_a_problem_document_of_odd_members_is_an_error_as_any(
    answering: Answering, odd: dict[str, Any]
) -> None:
    client, _ = answering(httpx.Response(422, json={"detail": "D", **odd}))
    with pytest.raises(InvalidRequest) as caught:
        client.do(lambda made: made.search("a"))
    assert caught.value.status == 422
    assert all(isinstance(str(issue), str) for issue in caught.value.issues)


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        members = {name: made for name, made in vars(kind).items() if not name.startswith("_")}
        return {
            name: [*inspect.signature(made).parameters] if callable(made) else []
            for name, made in members.items()
        }

    assert calls(Client) == calls(AsyncClient)


def test_an_address_that_is_none_is_not_tried_twice() -> None:
    with pytest.raises(ServiceUnreachable, match="http://127"):
        Client("nonsense").search("a")


def test_all_searches_go_through_every_page(answering: Answering) -> None:
    first = {"searches": [{**SEARCH, "id": "a"}, {**SEARCH, "id": "b"}], "next": "/v1/searches?after=b"}
    last = {"searches": [{**SEARCH, "id": "c"}], "next": None}
    client, requests = answering(httpx.Response(200, json=first), httpx.Response(200, json=last))
    listed = client.do(lambda made: made.all_searches(2, state="done"))
    assert [search.id for search in listed] == ["a", "b", "c"]
    assert [request.url.query for request in requests] == [b"limit=2&state=done", b"after=b"]


def test_events_are_followed_over_a_broken_connection(answering: Answering) -> None:
    client, requests = answering(
        stream(("1", "state", {"state": "running"}), cut='id: 2\nevent: bound\ndata: {"lower'),
        stream(("2", "bound", {"lower_bound": 1.0}), ("3", "end", {"state": "done"})),
    )
    events = client.do(lambda made: made.events("a"))
    assert [(event.id, event.kind) for event in events] == [("1", "state"), ("2", "bound"), ("3", "end")]
    assert [request.headers.get("last-event-id") for request in requests] == [None, "1"]


def test_a_service_that_says_to_come_back_is_asked_for_events_again(answering: Answering) -> None:
    client, requests = answering(
        stream(("1", "state", {"state": "running"})), problem(503), stream(("2", "end", {"state": "done"}))
    )
    assert [event.id for event in client.do(lambda made: made.events("a"))] == ["1", "2"]
    assert [request.headers.get("last-event-id") for request in requests] == [None, "1", "1"]
    client, requests = answering(*[problem(503)] * 3)
    with pytest.raises(ServiceFailed):
        client.do(lambda made: made.events("a"))
    assert len(requests) == 3


def test_connections_that_lasted_do_not_count_against_a_stream(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may be silent for hours, and something between may cut every connection after a minute."""
    silence = httpx.Response(200, text=": still here\n\n", headers={"Content-Type": "text/event-stream"})
    cut = [silence] * 5
    client, _ = answering(*cut, stream(("1", "end", {"state": "done"})))
    with pytest.raises(ServiceUnreachable, match="ended before"):
        client.do(lambda made: made.events("a"))
    monkeypatch.setattr(streams, "STEADY_SECONDS", -1.0)
    client, _ = answering(*cut, stream(("1", "end", {"state": "done"})))
    assert [event.kind for event in client.do(lambda made: made.events("a"))] == ["end"]


def test_events_that_cannot_be_had_are_an_error(answering: Answering) -> None:
    client, _ = answering(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable):
        client.do(lambda made: made.events("a"))
    client, _ = answering(problem(404))
    with pytest.raises(NotFound):
        client.do(lambda made: made.events("a"))


def test_waiting_follows_the_events_and_ends_with_the_plan(answering: Answering) -> None:
    better = {"objective": 9.0, "lower_bound": 4.0, "gap": 1.25}
    client, requests = answering(
        found(),
        stream(("1", "state", {"state": "running"}), ("2", "improvement", better), ("3", "end", {})),
        found(state="done", plan_id="p", objective=8.0),
    )
    seen: list[tuple[str, float | None]] = []
    ended = client.do(
        lambda made: made.wait("a", lambda search: seen.append((search.state, search.objective)))
    )
    assert (ended.plan_id, ended.objective) == ("p", 8.0)
    assert seen == [("queued", None), ("running", None), ("running", 9.0), ("done", 8.0)]
    assert [request.url.path.rpartition("/")[2] for request in requests] == ["a", "events", "a"]


def test_what_is_known_already_is_not_told_again_as_if_it_were_new(answering: Answering) -> None:
    client, _ = answering(
        found(state="running", attempts=1),
        stream(
            ("1", "state", {"state": "queued", "attempts": 0}),
            ("2", "state", {"state": "running", "attempts": 1}),
            ("3", "state", {"state": "queued", "attempts": 1}),
            ("4", "end", {}),
        ),
        found(state="done", plan_id="p", attempts=1),
    )
    seen: list[str] = []
    client.do(lambda made: made.wait("a", lambda search: seen.append(search.state)))
    assert seen == ["running", "queued", "done"], "its process died, and it waits again"


def test_waiting_looks_again_and_again_where_there_are_no_events(answering: Answering) -> None:
    client, _ = answering(found(), problem(406), found(state="running"), found(state="done", plan_id="p"))
    seen: list[str] = []
    assert client.do(lambda made: made.wait("a", lambda search: seen.append(search.state))).plan_id == "p"
    assert seen == ["queued", "running", "done"]


def test_a_search_that_ends_without_a_plan_is_an_error_with_the_reason(answering: Answering) -> None:
    client, _ = answering(found(state="infeasible", error={"detail": "too tight"}))
    with pytest.raises(SearchEnded, match="too tight") as caught:
        client.do(lambda made: made.wait("a"))
    assert caught.value.search.state == "infeasible"


def test_a_cancelled_search_with_a_plan_is_an_answer(answering: Answering) -> None:
    client, _ = answering(found(state="cancelled", plan_id="p"))
    assert client.do(lambda made: made.wait("a")).state == "cancelled"


def test_waiting_ends_when_the_caller_says(answering: Answering) -> None:
    client, _ = answering(found(state="running"))
    with pytest.raises(SearchTimeout, match="running"):
        client.do(lambda made: made.wait("a", timeout=0.0))


def test_waiting_ends_in_time_although_comments_keep_the_stream_alive(
    connect: Callable[..., Driver],
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return found(state="running")
        return streaming(_comments())

    with pytest.raises(SearchTimeout):
        connect(answer).do(lambda made: made.wait("a", timeout=0.05))


def _comments() -> Iterator[bytes]:
    for _ in range(1000):
        time.sleep(0.01)
        yield b": still here\n\n"
    raise AssertionError("the client still reads after its deadline")


def test_waiting_on_a_silent_stream_ends_when_the_caller_says(connect: Callable[..., Driver]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return found(state="running")
        seconds = request.extensions["timeout"]["read"]
        time.sleep(seconds)
        raise httpx.ReadTimeout("silent", request=request)

    with pytest.raises(SearchTimeout):
        connect(answer).do(lambda made: made.wait("a", timeout=0.05))


_RANK: dict[str, Any] = {
    "plan_id": "p",
    "rank": 0,
    "pp_degree": 2,
    "microbatches": 1,
    "placement": "v",
    "chunks": 2,
    "stages": [0, 3],
    "actions": ["0F0"],
    "peers": [1],
    "channels": [],
}


def test_a_rank_that_is_known_is_not_sent_again(answering: Answering) -> None:
    client, requests = answering(
        httpx.Response(200, json=_RANK, headers={"ETag": '"p-0"'}), httpx.Response(304)
    )
    first = client.do(lambda made: made.rank("p", 0))
    assert client.do(lambda made: made.rank("p", 0)) == first
    assert [request.headers.get("if-none-match") for request in requests] == [None, '"p-0"']


def _fetch_rank(rank: int, client: Client | AsyncClient) -> Any:
    return client.rank("p", rank)


def test_only_so_many_ranks_are_known(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CAPACITY", 2)
    answers = [httpx.Response(200, json=_RANK, headers={"ETag": '"p"'})] * 4
    client, requests = answering(*answers)
    for rank in (0, 1, 2, 0):
        client.do(partial(_fetch_rank, rank))
    assert [request.headers.get("if-none-match") for request in requests] == [None] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"actions": ["0X0"]},
        {"channels": [{"peer": 1, "direction": "send", "kind": "rumour", "transfers": []}]},
        {"channels": [{"peer": 1, "direction": "send", "kind": "gradient", "transfers": ["x"]}]},
        {"channels": [{"peer": 1}]},
        {"rank": "zero"},
    ],
)
def test_a_rank_that_cannot_be_read_is_refused(answering: Answering, change: dict[str, Any]) -> None:
    client, _ = answering(httpx.Response(200, json={**_RANK, **change}))
    with pytest.raises(InvalidAnswer):
        client.do(lambda made: made.rank("p", 0))


def test_a_plan_that_is_not_the_one_asked_for_is_refused(answering: Answering) -> None:
    client, _ = answering(httpx.Response(200, json={"problem": {}, "ranks": []}))
    with pytest.raises(InvalidAnswer):
        client.do(lambda made: made.plan("p"))


def told(value: str) -> httpx.Response:
    return httpx.Response(503, headers={"Retry-After": value})


def test_the_service_says_when_to_come_back_in_seconds_or_as_a_moment() -> None:
    retries = Retries(count=9, first=0.1, longest=0.2)
    pauses = {RetryState(retries, "x").after_response(told("7")) for _ in range(9)}
    assert all(pause is not None and 7 < pause <= 7.1 for pause in pauses)
    assert len(pauses) > 1, "they were told together, and do not come back together"
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    pause = RetryState(retries, "x").after_response(told(moment))
    assert pause is not None
    assert 25 < pause <= 30.1
    for nonsense in ("", "soon", "-1", "Sun, 06 Nov 1994 08:49:37 GMT"):
        pause = RetryState(retries, "x").after_response(told(nonsense))
        assert pause is not None
        assert 0.05 <= pause <= 0.1
    assert RetryState(retries, "x").after_response(told("61")) is None


def test_pauses_double_up_to_a_limit_and_are_spread() -> None:
    pauses = [[0.0] * 4 for _ in range(20)]
    for row in pauses:
        attempts = RetryState(Retries(count=4, first=1.0, longest=4.0), "x")
        row[:] = [attempts.after_error(httpx.ReadError("cut")) for _ in row]
    for index, limit in enumerate((1, 2, 4, 4)):
        column = [row[index] for row in pauses]
        assert limit / 2 <= min(column) < max(column) <= limit


def test_retries_are_not_negative() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Client("http://zbv", retries=-1)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_the_network_splits_them(connect: Callable[..., Driver], size: int) -> None:
    text = (
        ': awake\r\nid: 1\r\nevent: bound\r\ndata: {"method":\r\ndata: "é\u2028"}\r\n\r\nevent: empty\n\n'
        'retry: 5\ndata:{"x": 1}\n\nid: 2\nevent: end\ndata: {}\n\n'
    ).encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    client = connect(lambda _request: streaming(chunks))
    assert [(event.id, event.kind, event.data) for event in client.do(lambda made: made.events("a"))] == [
        ("1", "bound", {"method": "é\u2028"}),
        ("1", "message", {"x": 1}),
        ("2", "end", {}),
    ]


@pytest.mark.parametrize("data", ["{", "[1]"])
def test_an_event_that_is_not_a_json_object_is_refused(answering: Answering, data: str) -> None:
    headers = {"Content-Type": "text/event-stream"}
    client, _ = answering(httpx.Response(200, text=f"data: {data}\n\n", headers=headers))
    with pytest.raises(InvalidAnswer):
        client.do(lambda made: made.events("a"))


def test_the_generated_blocking_client_is_current() -> None:
    script = ROOT / "service" / "make_synchronous_client.py"
    made = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (made.returncode, made.stdout) == (0, ""), "run: make client"
