"""Bodies of any kind and size get a regular response, within limits on the memory for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send
from support.serving import PROBLEM, Service, Serving
from support.tokens import kind_of
from support.worst_bodies import ID, Sizes, Worst, worst
from zbv_service.api.bodies import FREE, SMALL, BodyMemory
from zbv_service.api.requests import SLICE, Requests
from zbv_service.documents.parsing import MEDIUM_VALUES, parse_medium
from zbv_service.errors import ApiError
from zbv_service.observability.context import CALLER
from zbv_service.observability.metrics import Metrics
from zbv_solver.errors import MOST_ISSUES, InvalidInput


def hold(memory: BodyMemory, stack: ExitStack, caller: str, size: int) -> None:
    CALLER.set(caller)
    stack.enter_context(memory.reserved(FREE + size))


async def test_bodies_in_memory_are_limited_in_total_and_per_caller() -> None:
    memory = BodyMemory(most=100, most_each=60)
    with ExitStack() as stack:
        hold(memory, stack, "a", 60)
        for caller, size in (("a", 1), ("b", 41)):
            with pytest.raises(ApiError) as caught:
                hold(memory, stack, caller, size)
            assert caught.value.kind.status == 503
            assert int(caught.value.headers["Retry-After"]) > 0
        hold(memory, stack, "b", 40)
        hold(memory, stack, "c", 0)  # small bodies are not counted
        hold(memory, stack, "c", -FREE)
    with ExitStack() as stack:
        hold(memory, stack, "a", 1000)  # a single body may be as large as the operator allows


async def test_a_body_counts_while_it_is_used_and_one_beyond_the_limit_is_refused(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Content-Type": "application/json"}

    async def nothing(*_: Any) -> None:
        pass

    async def put(*_: Any) -> None:
        answer = await service.http.post("/v1/problems/check", content=content, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
        assert (await service.submit()).status_code in (200, 202)  # a small body

    async with serving("honest", max_body_bytes=10**6) as service:
        service.app.state.body_memory = BodyMemory(most=FREE, most_each=FREE)
        content = json.dumps({"problem": PROBLEM}) + " " * 2 * FREE
        parts, agent = service.app.state.application.parts, await service.register("a")
        monkeypatch.setattr(parts, "require_owner", nothing)
        for kind in ("log", "events"):
            monkeypatch.setattr(parts, f"put_{kind}", put)
            address = f"/v1/agents/{agent}/runs/r/generations/0/ranks/0/{kind}"
            answer = await service.http.put(address, content=b" " * 3 * FREE, headers=headers)
            assert answer.status_code == 204, answer.text
        answer = await service.http.post("/v1/problems/check", content=content, headers=headers)
        assert (answer.status_code, answer.json()["is_valid"]) == (200, True)


async def test_many_mistakes_are_collected_in_another_process(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistakes in a body of one megabyte take a quarter of a second."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("checked in the process that serves all requests")

    body = {f"key {number}": number for number in range(5000)}
    assert len(json.dumps(body)) > SMALL
    async with serving("honest", max_body_bytes=10**6) as service:
        monkeypatch.setattr(BaseModel, "model_validate", refuse)
        of_agent = (f"/v1/agents/{ID}/{part}" for part in ("heartbeat", "ended"))
        for path in ("/v1/runs", f"/v1/runs/{ID}/plan", "/v1/agents", *of_agent):
            answer = await service.http.post(path, json=body)
            found = answer.status_code, len(answer.json()["errors"])
            assert found == (422, MOST_ISSUES), (path, answer.text[:300])


def test_a_document_with_too_many_values_is_refused_but_not_a_text_with_commas() -> None:
    values = b"[" + b"0," * MEDIUM_VALUES + b"0]"
    with pytest.raises(InvalidInput, match="values"):
        parse_medium(values)
    assert parse_medium(b'["' + b"," * 2 * MEDIUM_VALUES + b'"]') == ["," * 2 * MEDIUM_VALUES]


@pytest.mark.parametrize("size", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
async def test_a_large_response_is_sent_in_slices(size: int) -> None:
    content = bytes(index % 251 for index in range(size))

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "scheme": "http", "path": "/", "headers": []}
    await Requests(app, Metrics())(scope, receive, send)
    bodies = sent[1:]
    assert b"".join(message.get("body", b"") for message in bodies) == content
    assert all(len(message["body"]) <= SLICE for message in bodies)
    assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]


async def test_a_compressed_body_is_refused_where_only_plain_ones_are_read(service: Service) -> None:
    for path in ("/v1/searches", "/v1/plans", "/v1/runs", "/v1/agents", "/v1/problems/check"):
        for encoding in ("br", "gzip", "identity, gzip"):
            fields = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            refused = await service.http.post(path, content=b"{}", headers=fields)
            assert (refused.status_code, kind_of(refused)) == (415, "unsupported-media-type"), path
            assert refused.headers["accept-encoding"] == "identity"
    plain = {"Content-Encoding": "identity"}
    answer = await service.http.post("/v1/searches", json={"problem": PROBLEM}, headers=plain)
    assert answer.status_code == 202


SIZES = Sizes(body=90_000, plan=180_000, trace=180_000)
TRACE = f"/v1/agents/{ID}/runs/{ID}/generations/0/ranks/0/trace"
REGULAR = {200, 201, 202, 204, 303, 400, 404, 409, 410, 413, 415, 422, 503}


READ_ALIKE = ("/v1/problems/check", "/v1/problems/estimate", "/v1/problems/compare", "/v1/runs")


def chosen() -> Iterator[Worst]:
    """The requests: each problem for a search, and for one address that reads it alike."""
    problems: list[str] = []
    for request in worst(TRACE, SIZES):
        name = request.name.removeprefix("run of ")
        if request.path == "/v1/searches":
            problems.append(name)
        elif name in problems and READ_ALIKE[problems.index(name) % len(READ_ALIKE)] != request.path:
            continue
        yield request


async def test_every_worst_body_gets_a_regular_response(serving: Serving) -> None:
    async with serving("immediate", max_searches_per_token=10_000) as service:
        for request in chosen():
            assert request.make is not None
            headers = {"Content-Type": request.media_type}
            if request.encoding:
                headers["Content-Encoding"] = request.encoding
            answer = await service.http.request(
                request.method, request.path, content=request.make(), headers=headers
            )
            assert answer.status_code in REGULAR, (request.name, request.path, answer.text[:500])
            if answer.status_code >= 400 and request.path.startswith("/v1/"):
                assert answer.headers["content-type"] == "application/problem+json", request
                assert len(answer.content) < 64 * 1024, request
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) > 0
        assert (await service.http.get("/healthz")).status_code == 200
