"""The outermost middleware: what every request and every response has.

A request gets an id, metrics and a log line, and HEAD works like GET without the body, because HTTP demands
HEAD for every resource that has GET. A response gets security headers, and its body goes out in slices. It is
plain ASGI, because every request passes it, and outermost, so that it also covers responses of the framework.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.compute.waiting import CLIENT, Client
from zbv_service.errors import NOT_FOUND, ApiError, response_to
from zbv_service.observability.context import REQUEST_ID, ROOT_PATH
from zbv_service.observability.metrics import Metrics

UNKNOWN = "unknown"
"""The label of unknown addresses and methods: text that strangers choose must not become a label."""
ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    # Not "no-referrer": browsers would then send forms of our own pages with an Origin of null.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
NO_PAGE = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
"""For responses that are not pages: even if a browser renders them, they load and run nothing."""
NOT_KEPT = (b"cache-control", b"no-store")
"""For responses without their own value; otherwise caches would guess."""
CHECKED = (b"cache-control", b"no-cache")
"""For responses that can be revalidated: files, which change with the version."""
OVER_TLS = (b"strict-transport-security", b"max-age=31536000")
SLICE = 128 * 1024
"""Bytes of a response that are passed to the server at a time."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SANE = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
"""Ids that callers may choose. The characters are harmless in headers, log lines and pages."""

logger = logging.getLogger(__name__)


class Requests:
    """Serves the requests of an application, counts and logs them."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        has_body = False
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _SANE.fullmatch(value):
                request_id = value.decode()
            elif (name == b"content-length" and value != b"0") or name == b"transfer-encoding":
                has_body = True
        ROOT_PATH.set(str(scope.get("root_path", "")).rstrip("/"))
        client = Client(receive, has_body)
        before = REQUEST_ID.set(request_id), CLIENT.set(client)
        answer = _Answer(scope, send, request_id.encode(), client, self._metrics)
        # A copy, because the server must still see that the method is HEAD.
        inner = dict(scope, method="GET") if answer.is_head else scope
        started = time.perf_counter()
        try:
            if "\0" in scope["path"]:  # PostgreSQL refuses it as a value
                refusal = ApiError(NOT_FOUND, "The address contains NUL; no resource has such a name.")
                await response_to(refusal)(inner, receive, answer.send)
            else:
                receiving = answer.headless(client.receive) if answer.is_head else client.receive
                await self._app(inner, receiving, answer.send)
        finally:
            self._note(scope, inner, answer, started)
            REQUEST_ID.reset(before[0])
            CLIENT.reset(before[1])

    def _note(self, scope: Scope, inner: Scope, answer: _Answer, started: float) -> None:
        """Count and log an answered request."""
        if answer.stream_began_at is not None:
            self._metrics.event_streams.dec()
        seconds = (answer.stream_began_at or time.perf_counter()) - started
        # The template of the route that answered, such as `/v1/plans/{plan_id}`.
        route = getattr(inner.get("route"), "path_format", None) or getattr(
            inner.get("route"), "path", UNKNOWN
        )
        method = scope["method"] if scope["method"] in _METHODS else UNKNOWN
        self._metrics.requests.labels(method, route, answer.status).inc()
        self._metrics.request_seconds.labels(method, route).observe(seconds)
        level = logging.DEBUG if method in ("GET", "HEAD") and answer.status < 400 else logging.INFO
        if logger.isEnabledFor(level):
            # Without the query, which may contain a token.
            path = scope["path"] if scope["path"].isprintable() else ascii(scope["path"])
            extra = {"route": route, "status": answer.status, "milliseconds": round(1000 * seconds, 3)}
            logger.log(level, "%s %s %d", scope["method"], path, answer.status, extra=extra)


class _Answer:
    """The messages of one response: adds its headers, and drops its body for HEAD.

    The server's transport buffers a copy of everything that the client does not read at once: a hundred slow
    clients would hold a hundred copies of a plan. So a large body is sent in slices, each of which waits
    until the client has received the previous ones. A client that reads fast must not delay others, so these
    get their turn between two slices.
    """

    def __init__(self, scope: Scope, send: Send, request_id: bytes, client: Client, metrics: Metrics):
        self.is_head = scope["method"] == "HEAD"
        self.status = 500
        self.stream_began_at: float | None = None
        self._scope = scope
        self._send = send
        self._request_id = (b"x-request-id", request_id)
        self._client = client
        self._metrics = metrics
        self._head_done = asyncio.Event() if self.is_head else None

    async def send(self, message: Message) -> None:
        """The ASGI function for the application."""
        if self._head_done is not None and self._head_done.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._client.is_answered = True
            values = dict(message["headers"])
            headers = [*message["headers"], *ALWAYS, self._request_id]
            if NO_PAGE[0] not in values:
                headers.append(NO_PAGE)
            if NOT_KEPT[0] not in values:
                headers.append(CHECKED if b"etag" in values else NOT_KEPT)
            if self._scope["scheme"] == "https":
                headers.append(OVER_TLS)
            if values.get(b"content-type", b"").startswith(b"text/event-stream"):
                self.stream_began_at = time.perf_counter()
                self._metrics.event_streams.inc()
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and self._head_done is not None:
            message = {"type": "http.response.body", "body": b""}
            self._head_done.set()
        elif len(message.get("body", b"")) > SLICE:
            view, has_more = memoryview(message["body"]), message.get("more_body", False)
            for begin in range(0, len(view), SLICE):
                is_last = begin + SLICE >= len(view)
                piece = bytes(view[begin : begin + SLICE])
                await self._send({**message, "body": piece, "more_body": has_more or not is_last})
                await asyncio.sleep(0)
            return
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
