"""Connections that are refused before there is a request: too many, with too large heads, or without HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support import fake_searches
from support.live import Live, listening
from support.serving import DEADLINE
from zbv_service.app import create_app
from zbv_service.commands.serving import MAX_HEAD_BYTES
from zbv_service.settings import Settings

MOST = 3
PIECE = b"x" * 50_000
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    database = f"sqlite:///{tmp_path_factory.mktemp('connections')}/zbv.db"
    settings = Settings(auth="none", database=database, searches=1, max_connections=MOST)
    with listening(create_app(settings, search=fake_searches.immediate)) as found:
        yield found


def connected(live: Live) -> socket.socket:
    port = int(live.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


def answer_to(live: Live, *pieces: bytes) -> tuple[str, dict[str, str], Any]:
    """The status line, headers and document of a response that closes the connection."""
    with connected(live) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        while part := connection.recv(65_536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    assert int(fields["content-length"]) == len(body)
    assert fields["content-type"] == "application/problem+json"
    assert (fields["connection"], fields["cache-control"]) == ("close", "no-store")
    return status, fields, json.loads(body)


def test_input_that_is_not_http_gets_a_problem_document(live: Live) -> None:
    client_hello = bytes.fromhex("16030100c8010000c40303") + bytes(100)
    for nonsense in (client_hello, b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        status, _, body = answer_to(live, nonsense)
        assert (status, body["type"]) == ("HTTP/1.1 400 Bad Request", "/errors/malformed-request")


@pytest.mark.parametrize(
    "beginning",
    [GET + b"X-Large: ", b"GET /", GET + b"X-A: 1\r\n" * 2_000],
    ids=["in a field", "in the address", "in many fields"],
)
def test_an_endless_request_head_is_refused(live: Live, beginning: bytes) -> None:
    pieces = [PIECE] * (2 + 2 * MAX_HEAD_BYTES // len(PIECE))
    status, _, body = answer_to(live, beginning, *pieces)
    assert status == "HTTP/1.1 431 Request Header Fields Too Large"
    assert body["type"] == "/errors/headers-too-large"


def test_an_endless_trailer_is_refused(live: Live) -> None:
    with connected(live) as connection:
        connection.sendall(POST + b"0\r\nX-Large: ")
        with pytest.raises(ConnectionError):
            connection.sendall(PIECE * 1000)


def test_a_large_body_does_not_count_as_head(live: Live) -> None:
    with httpx.Client(base_url=live.address, timeout=DEADLINE) as http:
        body = b'{"problem": "' + 40 * PIECE + b'"}'
        for content in (body, (part for part in (body[:-5], body[-5:]))):
            answer = http.post("/v1/searches", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422


def test_a_connection_above_the_limit_is_refused_with_retry_after(live: Live) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connected(live)) for _ in range(MOST)]
        for connection in held:  # after one response each, the service has counted them all
            connection.sendall(GET + b"\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        status, fields, body = answer_to(live, GET + b"\r\n")
        assert (status, body["type"]) == (
            "HTTP/1.1 503 Service Unavailable",
            "/errors/too-many-connections",
        )
        assert int(fields["retry-after"]) >= 1
        assert body["request_id"] == fields["x-request-id"]
        held[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        metrics = b""
        while part := held[0].recv(65_536):
            metrics += part
        assert b'status="503"} 1.0' in metrics
    with httpx.Client(base_url=live.address, timeout=DEADLINE) as http:
        assert http.get("/healthz").status_code == 200
