"""Event streams over connections that break, and waiting for the end of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from support.client_answers import Answering, found, problem, stream, streaming
from zbv_service.client import (
    Client,
    InvalidAnswer,
    NotFound,
    SearchEnded,
    SearchTimeout,
    ServiceFailed,
    ServiceUnreachable,
    connection,
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_the_network_splits_them(connect: Callable[..., Client], size: int) -> None:
    text = (
        ': awake\r\nid: 1\r\nevent: bound\r\ndata: {"method":\r\ndata: "é\u2028"}\r\n\r\nevent: empty\n\n'
        'retry: 5\ndata:{"x": 1}\n\nid: 2\nevent: end\ndata: {}\n\n'
    ).encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    client = connect(lambda _request: streaming(chunks))
    assert [(event.id, event.kind, event.data) for event in list(client.events("a"))] == [
        ("1", "bound", {"method": "é\u2028"}),
        ("1", "message", {"x": 1}),
        ("2", "end", {}),
    ]


@pytest.mark.parametrize("data", ["{", "[1]"])
def test_an_event_that_is_not_a_json_object_is_refused(answering: Answering, data: str) -> None:
    headers = {"Content-Type": "text/event-stream"}
    client, _ = answering(httpx.Response(200, text=f"data: {data}\n\n", headers=headers))
    with pytest.raises(InvalidAnswer):
        list(client.events("a"))


def test_events_continue_after_a_broken_connection(answering: Answering) -> None:
    client, requests = answering(
        stream(("1", "state", {"state": "running"}), cut='id: 2\nevent: bound\ndata: {"lower'),
        stream(("2", "bound", {"lower_bound": 1.0}), ("3", "end", {"state": "done"})),
    )
    events = list(client.events("a"))
    assert [(event.id, event.kind) for event in events] == [("1", "state"), ("2", "bound"), ("3", "end")]
    assert [request.headers.get("last-event-id") for request in requests] == [None, "1"]
    client, requests = answering(
        stream(("7", "starting", {"id": 7, "kind": "starting"})),
        stream(("9", "succeeded", {"id": 9, "kind": "succeeded"}), ("9", "end", {"state": "succeeded"})),
    )
    of_run = client.follow_run("r")
    assert [event.kind for event in of_run] == ["starting", "succeeded", "end"]
    assert [request.headers.get("last-event-id") for request in requests] == [None, "7"]
    assert {request.url.path for request in requests} == {"/v1/runs/r/events"}


def test_a_stream_that_is_unavailable_for_now_is_requested_again(answering: Answering) -> None:
    client, requests = answering(
        stream(("1", "state", {"state": "running"})), problem(503), stream(("2", "end", {"state": "done"}))
    )
    assert [event.id for event in list(client.events("a"))] == ["1", "2"]
    assert [request.headers.get("last-event-id") for request in requests] == [None, "1", "1"]
    for trouble, error in (
        ([problem(503)] * 3, ServiceFailed),
        ([httpx.ConnectError("refused")] * 3, ServiceUnreachable),
        ([problem(404)], NotFound),
    ):
        client, requests = answering(*trouble)
        with pytest.raises(error):
            list(client.events("a"))
        assert len(requests) == len(trouble)


def test_a_lasting_connection_resets_retries(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search may be silent for hours, and a proxy may cut every connection after a minute."""
    silence = httpx.Response(200, text=": still here\n\n", headers={"Content-Type": "text/event-stream"})
    cut = [silence] * 5
    client, _ = answering(*cut, stream(("1", "end", {"state": "done"})))
    with pytest.raises(ServiceUnreachable, match="ended before"):
        list(client.events("a"))
    monkeypatch.setattr(connection, "STEADY_SECONDS", -1.0)
    client, _ = answering(*cut, stream(("1", "end", {"state": "done"})))
    assert [event.kind for event in list(client.events("a"))] == ["end"]


def test_wait_ignores_events_of_an_earlier_attempt(answering: Answering) -> None:
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
    client.wait("a", lambda search: seen.append(search.state))
    assert seen == ["running", "queued", "done"], "its process died, and it waits again"


def test_wait_polls_when_events_are_unavailable(answering: Answering) -> None:
    client, _ = answering(found(), problem(406), found(state="running"), found(state="done", plan_id="p"))
    seen: list[str] = []
    client.wait("a", lambda search: seen.append(search.state))
    assert seen == ["queued", "running", "done"]


def test_wait_raises_the_reason_when_a_search_ends_without_a_plan(answering: Answering) -> None:
    client, _ = answering(found(state="infeasible", error={"detail": "too tight"}))
    with pytest.raises(SearchEnded, match="too tight") as caught:
        client.wait("a")
    assert caught.value.search.state == "infeasible"
    client, _ = answering(found(state="cancelled", plan_id="p"), found(state="running"))
    assert client.wait("a").state == "cancelled"
    with pytest.raises(SearchTimeout, match="running"):
        client.wait("a", timeout=0.0)


@pytest.mark.parametrize("is_silent", [False, True])
def test_wait_raises_in_time_while_a_stream_is_open(connect: Callable[..., Client], is_silent: bool) -> None:
    """Comments keep it alive, or nothing comes."""

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return found(state="running")
        if not is_silent:
            return streaming(_comments())
        time.sleep(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("silent", request=request)

    with pytest.raises(SearchTimeout):
        connect(answer).wait("a", timeout=0.05)


def _comments() -> Iterator[bytes]:
    for _ in range(1000):
        time.sleep(0.01)
        yield b": still here\n\n"
    raise AssertionError("the client still reads after its deadline")
