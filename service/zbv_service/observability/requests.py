"""The outermost middleware: gives every request an id, metrics and a log line, and answers HEAD.

It is outermost so that it also covers the responses of the framework. HTTP demands HEAD for every resource
that has GET. It is plain ASGI, because every request passes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.observability.context import CLIENT, REQUEST_ID, ROOT_PATH, Client, request_id_of
from zbv_service.observability.metrics import Metrics

UNKNOWN = "unknown"
"""The label of unknown addresses and methods: text that strangers choose must not become a label."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

logger = logging.getLogger(__name__)


class Observed:
    """Gives ids to the requests of an application, counts and logs them."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        ROOT_PATH.set(str(scope.get("root_path", "")).rstrip("/"))
        token = REQUEST_ID.set(request_id)
        is_head = scope["method"] == "HEAD"
        has_body = any(
            (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
            for name, value in scope["headers"]
        )
        client = Client(receive, has_body)
        waiting = CLIENT.set(client)
        answer = _Answer(send, request_id.encode(), is_head, self._metrics, client)
        # A copy, because the server must still see that the method is HEAD.
        inner = dict(scope, method="GET") if is_head else scope
        started = time.perf_counter()
        try:
            receiving = answer.headless(client.receive) if is_head else client.receive
            await self._app(inner, receiving, answer.send)
        finally:
            self._note(scope["method"], inner, answer, started)
            CLIENT.reset(waiting)
            REQUEST_ID.reset(token)

    def _note(self, method: str, scope: Scope, answer: _Answer, started: float) -> None:
        if answer.stream_began_at is not None:
            self._metrics.event_streams.dec()
        seconds = (answer.stream_began_at or time.perf_counter()) - started
        matched: Any = scope.get("route")
        # The template of the route that answered, such as `/v1/plans/{plan_id}`.
        route = getattr(matched, "path_format", None) or getattr(matched, "path", None) or UNKNOWN
        known = method if method in _METHODS else UNKNOWN
        self._metrics.answered(known, route, answer.status, seconds)
        level = logging.DEBUG if method in ("GET", "HEAD") and answer.status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            # Without the query, which may contain a token.
            extra = {"route": route, "status": answer.status, "milliseconds": round(1000 * seconds, 3)}
            logger.log(level, "%s %s %d", method, _printable(scope["path"]), answer.status, extra=extra)


class _Answer:
    """Observes the messages of one answer, and drops its body for HEAD."""

    def __init__(self, send: Send, request_id: bytes, is_head: bool, metrics: Metrics, client: Client):
        self._send = send
        self._client = client
        self._metrics = metrics
        self._header = (b"x-request-id", request_id)
        self._head_done = asyncio.Event() if is_head else None
        self.status = 500
        self.stream_began_at: float | None = None

    async def send(self, message: Message) -> None:
        if self._head_done is not None and self._head_done.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._client.is_answered = True
            headers = [*message["headers"], self._header]
            content_type = next((value for name, value in headers if name == b"content-type"), b"")
            if content_type.startswith(b"text/event-stream"):
                self.stream_began_at = time.perf_counter()
                self._metrics.event_streams.inc()
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and self._head_done is not None:
            message = {"type": "http.response.body", "body": b""}
            self._head_done.set()
        await self._send(message)

    def headless(self, receive: Receive) -> Receive:
        """The application's ``receive`` for HEAD: the client seems to disconnect once the body begins."""
        done, first = self._head_done or asyncio.Event(), True

        async def receiving() -> Message:
            nonlocal first
            if first:
                first = False
                return await receive()
            await done.wait()
            return {"type": "http.disconnect"}

        return receiving


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)
