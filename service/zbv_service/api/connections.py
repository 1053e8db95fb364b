"""Limits on connections before the application sees a request.

uvicorn reads request heads of any size for any time: an attacker could fill its memory, or hold all
connections open by sending a byte now and then. It also sends its errors as plain text. It has no settings
for this, so this module subclasses its protocol.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zbv_service.errors import HEADERS_TOO_LARGE, MALFORMED_REQUEST, MEDIA_TYPE, Kind, error_document

CROWDED = "zbv.is_crowded"
"""Marks the scopes of connections beyond the limit; :class:`zbv_service.api.limits.Limited` refuses them."""

LINGER_SECONDS = 5.0
"""Seconds for which a refused connection is still read; see :func:`limited`."""
LINGER_BYTES = 8 * 1024 * 1024
"""Bytes that are discarded from a refused client before the connection is closed."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and of all connections."""

    head_seconds: float
    """Longest time for the head of a request to arrive."""
    head_bytes: int
    """Largest head, or trailer of a body, in bytes; up to 256 KiB more may be buffered."""
    connections: int
    """Most connections at the same time."""


def limited(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits.

    A client that is refused while it is still sending would often not see the answer: a socket closed with
    unread input is reset, and the reset overtakes the answer (RFC 9112, section 9.6). So the server closes
    its side of the stream after the answer, and discards further input for a while.
    """

    class LimitedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _linger_timer: asyncio.TimerHandle | None = None
        _bytes_of_no_body = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.app = _crowded(cast("ASGIApp", self.app))
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            if self._linger_timer is not None:
                self._linger_timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._bytes_of_no_body += len(data)
            if self._linger_timer is not None:
                if self._bytes_of_no_body > LINGER_BYTES:
                    self.transport.abort()
                return
            super().data_received(data)
            if self._bytes_of_no_body > limits.head_bytes:
                self._refuse(HEADERS_TOO_LARGE, f"They exceed {limits.head_bytes} bytes; send less.")
            self._watch_head()

        def on_message_begin(self) -> None:
            self._bytes_of_no_body = 0
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._bytes_of_no_body = 0
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:  # called by uvicorn
            self._refuse(MALFORMED_REQUEST, "The request is not HTTP/1.1. Check the scheme of the address.")

        def _refuse(self, kind: Kind, detail: str) -> None:
            if self._linger_timer is not None or self.transport.is_closing():
                return
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
            self._stop_watching()
            if self._stop_response():
                self.transport.close()
                return
            self.transport.write(_answer(kind, detail))
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.flow.resume_reading()

        def _stop_response(self) -> bool:
            """Stop the current response, if there is one; whether a part of it was already sent."""
            if self.cycle is None or self.cycle.response_complete:
                return False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            return self.cycle.response_started

        def _watch_head(self) -> None:
            is_waiting = self.cycle is None or self.cycle.response_complete
            if not is_waiting or self._linger_timer is not None:
                self._stop_watching()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self._give_up)

        def _stop_watching(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol


def _crowded(app: ASGIApp) -> Any:
    """The application for a connection above the limit: it refuses, so that metrics and logs include it."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CROWDED: True}, receive, send)

    return marked


def _answer(kind: Kind, detail: str) -> bytes:
    """A complete response with an error document, which closes the connection."""
    body = json.dumps(error_document(kind, detail)).encode()
    lines = (
        f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}",
        f"Content-Type: {MEDIA_TYPE}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body
