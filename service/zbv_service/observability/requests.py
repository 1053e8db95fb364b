"""Around every request: its id, its metrics and its log line; plain ASGI, some microseconds each.

It is the outermost layer, so that it also sees what the framework answers by itself. It adds what HTTP asks
of a server for every resource: HEAD wherever there is GET.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.observability.context import REQUEST_ID, ROOT_PATH, request_id_of
from zbv_service.observability.metrics import Metrics

UNKNOWN = "unknown"
"""Route of addresses that are none of ours, and method of methods that HTTP does not know: what strangers
make up must not become metrics."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

logger = logging.getLogger(__name__)


class Observed:
    """An application whose requests are counted, logged and given ids."""

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
        answer = _Answer(send, request_id.encode(), scope["method"] == "HEAD", self._metrics)
        # A copy: the server looks at the method to know that HEAD has no body.
        inner = dict(scope, method="GET") if answer.is_head else scope
        started = time.perf_counter()
        try:
            await self._app(inner, answer.receiving(receive), answer.send)
        finally:
            self._note(scope["method"], inner, answer, started)
            REQUEST_ID.reset(token)

    def _note(self, method: str, scope: Scope, answer: _Answer, started: float) -> None:
        answer.close()
        now = time.perf_counter()
        seconds = (answer.started_at or now) - started if answer.is_stream else now - started
        route = _route(scope)
        known = method if method in _METHODS else UNKNOWN
        self._metrics.answered(known, route, answer.status, seconds)
        level = logging.DEBUG if method in ("GET", "HEAD") and answer.status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            # Never the query: it may hold a token.
            extra = {"route": route, "status": answer.status, "milliseconds": round(1000 * seconds, 3)}
            logger.log(level, "%s %s %d", method, _printable(scope["path"]), answer.status, extra=extra)


class _Answer:
    """Watches the messages of one answer on their way out."""

    def __init__(self, send: Send, request_id: bytes, is_head: bool, metrics: Metrics):
        self._send = send
        self._metrics = metrics
        self._header = (b"x-request-id", request_id)
        self._head_done = asyncio.Event() if is_head else None
        self.is_head = is_head
        self.status = 500
        self.started_at: float | None = None
        self.is_stream = False
        self.is_complete = False

    async def send(self, message: Message) -> None:
        if self.is_head and self.is_complete:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], self._header]
            self._begin(headers)
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            if self._head_done is not None:
                message = {"type": "http.response.body", "body": b""}
                self._head_done.set()
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    def receiving(self, receive: Receive) -> Receive:
        """What the application receives from; after the head of an endless stream, its end."""
        if self._head_done is None:
            return receive
        done, first = self._head_done, True

        async def headless() -> Message:
            nonlocal first
            if first:
                first = False
                return await receive()
            await done.wait()
            return {"type": "http.disconnect"}

        return headless

    def close(self) -> None:
        """The answer is over, however it ended."""
        if self.is_stream:
            self._metrics.event_streams.dec()

    def _begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name == b"content-type":
                if value.startswith(b"text/event-stream"):
                    self.is_stream = True
                    self.started_at = time.perf_counter()
                    self._metrics.event_streams.inc()
                return


def _route(scope: Scope) -> str:
    """The template of the route that answered, such as ``/v1/plans/{plan_id}``."""
    route: Any = scope.get("route")
    path = getattr(route, "path_format", None) or getattr(route, "path", None)
    return path or UNKNOWN


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)
