"""Connections beyond the limit are refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from support import fake_searches
from support.fake_kinds import kinds
from support.live import Live, listening
from support.serving import DEADLINE
from zbv_service.app import create_app
from zbv_service.settings import Settings

MOST = 3
"""The first number of connections that is refused."""
GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    database = f"sqlite:///{tmp_path_factory.mktemp('connections')}/zbv.db"
    settings = Settings(auth="none", database=database, searches=1, max_connections=MOST)
    with listening(create_app(settings, kinds=kinds(fake_searches.immediate))) as found:
        yield found


def connected(live: Live) -> socket.socket:
    port = int(live.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


def test_a_connection_above_the_limit_is_refused(live: Live) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connected(live)) for _ in range(MOST - 1)]
        for connection in held:  # after one response each, the service has counted them all
            connection.sendall(GET + b"\r\n")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        with connected(live) as another:
            another.sendall(GET + b"\r\n")
            assert another.recv(65_536).startswith(b"HTTP/1.1 503 ")
    with httpx.Client(base_url=live.address, timeout=DEADLINE) as http:
        assert http.get("/healthz").status_code == 200
