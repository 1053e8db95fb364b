"""A generator of HTTP load that is cheaper than the measured service: keep-alive sockets and prepared bytes.

It only understands the responses of our service, HTTP/1.1 with Content-Length. Use a client for everything
else.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

DEADLINE = 60.0


@dataclass(frozen=True)
class Load:
    """The result of a load."""

    seconds: float
    """Time from the first request to the last response."""
    latencies: list[float]
    """Seconds per request. At a fixed rate, they count from the time when the request was due, so that a
    pause of the service is not hidden by the pause that it causes in the generator."""
    statuses: Counter[int]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies) / self.seconds


class _Connection(asyncio.Protocol):
    """A keep-alive connection: a request, its response, the next request."""

    def __init__(self) -> None:
        self._buffer = b""
        self._missing = 0
        self._answer: asyncio.Future[int] | None = None
        self._status = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the service closed the connection."))

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """Send a request; the future is the status of the response."""
        if self._transport is None:
            raise ConnectionError("not connected.")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._buffer += data
            head, separator, body = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            self._status = int(head[9:12])
            self._missing = _length(head) - len(body)
            self._buffer = b""
        if self._missing == 0 and self._answer is not None:
            self._answer.set_result(self._status)


def _length(head: bytes) -> int:
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return 0 if found is None else int(found[1])


def get(address: str, path: str, token: str | None = None) -> bytes:
    """Return the bytes of a GET request."""
    return head("GET", address, path, token)


def post(address: str, path: str, body: bytes, token: str | None = None) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    fields = (f"Content-Length: {len(body)}", "Content-Type: application/json")
    return head("POST", address, path, token, *fields) + body


def head(method: str, address: str, path: str, token: str | None, *fields: str) -> bytes:
    """Return the head of a request, with further header fields."""
    authorization = (f"Authorization: Bearer {token}",) if token else ()
    lines = (f"{method} {path} HTTP/1.1", f"Host: {urlsplit(address).netloc}", *authorization, *fields)
    return "\r\n".join((*lines, "", "")).encode()


async def offer(
    address: str, requests: Sequence[bytes], connections: int, seconds: float, rate: float
) -> Load:
    """Send requests at a fixed rate, independent of the responses; the connections take turns."""
    made = await _connect(address, connections)
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    began = time.perf_counter()

    async def drive(connection: _Connection, first: int) -> None:
        for number in range(first, int(rate * seconds), connections):
            due = began + number / rate
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            status = await asyncio.wait_for(connection.ask(requests[number % len(requests)]), DEADLINE)
            latencies.append(time.perf_counter() - due)
            statuses[status] += 1

    await asyncio.gather(*(drive(connection, index) for index, connection in enumerate(made)))
    took = time.perf_counter() - began
    for connection in made:
        connection.close()
    return Load(took, latencies, statuses)


async def _connect(address: str, count: int) -> list[_Connection]:
    parts = urlsplit(address)
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(count):
        opened = loop.create_connection(_Connection, parts.hostname or "127.0.0.1", parts.port or 80)
        _, connection = await asyncio.wait_for(opened, DEADLINE)
        made.append(connection)
    return made
