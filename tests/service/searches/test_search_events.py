"""Following a search over HTTP: events are typed and durable, and equal in a stream and in a list."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import PROBLEM, Service, Serving, until
from support.tokens import add
from zbv_service.database import events as hub
from zbv_service.records.searches import SearchEventDocument
from zbv_service.security import access
from zbv_service.security.tokens import TokenTable

STREAM = {"accept": "text/event-stream"}
JSON = {"accept": "application/json"}


@dataclass(frozen=True)
class Told:
    """One event of a stream."""

    id: int
    kind: str
    data: dict[str, Any]


def events_of(text: str) -> list[Told]:
    """The events of a stream that has ended, without comments."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            found.append(Told(int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def following(service: Service, search_id: str, **headers: str) -> asyncio.Task[httpx.Response]:
    """Follow a search to its end."""
    address = f"/v1/searches/{search_id}/events"
    return asyncio.create_task(service.http.get(address, headers={**STREAM, **headers}))


def kinds(events: list[Told]) -> list[tuple[str, Any]]:
    """The kind of each event, and the value that distinguishes it from others of this kind."""
    telling = {"state": "reason", "improvement": "objective", "bound": "lower_bound", "end": "state"}
    return [(event.kind, event.data[telling[event.kind]]) for event in events]


async def a_search(service: Service, directory: Path, **options: Any) -> tuple[str, list[Told]]:
    """A search that improved once and then ended, and its events so far."""
    search_id = (await service.submit(**options)).json()["id"]
    stream = following(service, search_id)
    await service.until(search_id, lambda found: found["objective"] is not None)
    (directory / "release").touch()
    answer = await stream
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("retry: ")
    return search_id, events_of(answer.text)


async def test_a_stream_has_the_events_of_a_search_from_start_to_end(held: Service, directory: Path) -> None:
    search_id, events = await a_search(held, directory)
    ended = await held.search(search_id)
    assert kinds(events) == [
        ("state", "submitted"),
        ("state", "started"),
        ("improvement", 9),
        ("improvement", 8),
        ("end", "done"),
    ]
    assert [event.id for event in events] == [1, 2, 3, 4, 5]
    assert all(event.data["id"] == event.id and event.data["event"] == event.kind for event in events)
    first, last = events[2].data, events[-1].data
    assert (first["lower_bound"], first["gap"], first["method"]) == (4, 1.25, "held")
    assert first["seconds"] >= 0
    same = ("state", "objective", "lower_bound", "gap", "method", "plan_id", "error")
    assert {name: last[name] for name in same} == {name: ended[name] for name in same}
    for event in events:
        SearchEventDocument.model_validate({**event.data, "search_id": search_id})


async def test_polling_gives_the_same_events(held: Service, directory: Path) -> None:
    search_id, events = await a_search(held, directory)
    address = f"/v1/searches/{search_id}/events"
    whole = await held.http.get(address, headers=JSON)
    assert whole.json()["events"] == [event.data for event in events]
    assert (whole.json()["last_id"], whole.json()["is_over"]) == (5, True)
    rest = (await held.http.get(address, params={"after": 3})).json()  # JSON is the default
    assert rest["events"] == whole.json()["events"][3:]
    none = (await held.http.get(address, params={"after": 5})).json()
    assert (none["events"], none["last_id"], none["is_over"]) == ([], 5, True)
    late = (await held.http.get(address, params={"after": 77})).json()
    assert (late["events"], late["last_id"], late["is_over"]) == ([], 77, True)
    over = await following(held, search_id, **{"last-event-id": "5"})
    assert (over.status_code, over.content) == (204, b"")  # browsers then do not reconnect
    assert {whole.headers["vary"], (await following(held, search_id)).headers["vary"]} == {"Accept"}


async def test_a_search_that_is_discarded_ends_its_streams(held: Service, directory: Path) -> None:
    search_id = await held.begun()
    stream = following(held, search_id)
    await until(lambda: held.app.state.application.events.readers == 1, "it follows")
    assert (await held.http.delete(f"/v1/searches/{search_id}")).status_code == 204
    events = events_of((await stream).text)
    assert kinds(events)[-1] == ("end", "discarded")
    SearchEventDocument.model_validate({**events[-1].data, "search_id": search_id})
    assert (await following(held, search_id)).status_code == 404


async def test_a_stream_ends_when_its_token_is_revoked(
    serving: Serving, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(access, "FRESH_SECONDS", 0.0)
    async with serving("held", auth="tokens") as service:
        owner = await add(service, "search", "read", name="owner")
        submitted = await service.http.post("/v1/searches", json={"problem": PROBLEM}, headers=owner)
        search_id = submitted.json()["id"]
        reader = await add(service, "read", name="reader")
        stream, other = (following(service, search_id, **fields) for fields in (reader, owner))
        await until(lambda: service.app.state.application.events.readers == 2, "both follow")
        await asyncio.sleep(0.2)
        assert not stream.done()
        await TokenTable(service.app.state.application.database).revoke("reader")
        answer = await stream
        assert (answer.status_code, [event.kind for event in events_of(answer.text)][-1:]) != (200, ["end"])
        assert (await following(service, search_id, **reader)).status_code == 401
        assert not other.done()
        (directory / "release").touch()
        assert events_of((await other).text)[-1].kind == "end"


async def test_a_wrong_position_is_refused(service: Service) -> None:
    search_id = (await service.submit()).json()["id"]
    address = f"/v1/searches/{search_id}/events"
    for wrong in ("x", "-1", "1.5", "99999999999", ""):
        asked = await service.http.get(address, params={"after": wrong})
        assert asked.status_code == 422, wrong
        assert asked.json()["errors"][0]["parameter"] == "after"
        resumed = await following(service, search_id, **{"last-event-id": wrong})
        assert resumed.status_code == 422, wrong
        assert resumed.json()["errors"][0]["parameter"] == "Last-Event-ID"
