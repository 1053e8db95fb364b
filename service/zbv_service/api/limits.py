"""Refuses requests with a long address or long headers, and requests above the limit of connections."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.api.connections import CROWDED
from zbv_service.errors import (
    ADDRESS_TOO_LONG,
    HEADERS_TOO_LARGE,
    NOT_FOUND,
    TOO_MANY_CONNECTIONS,
    ApiError,
    response_to,
)

MAX_ADDRESS = 8192
"""Bytes of path and query; real ones are far shorter."""
MAX_HEADERS = 32 * 1024
"""Bytes of all header fields together."""
SLICE = 128 * 1024
"""Bytes of a response that are passed to the server at a time."""


class Limited:
    """An application behind limits on addresses, header fields and connections."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        refusal = _refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, _in_slices(send))
        else:
            await response_to(refusal)(scope, receive, send)


def _in_slices(send: Send) -> Send:
    """Send large bodies in slices, each after the client has received the previous ones.

    The server's transport buffers a copy of everything that the client does not read at once: a hundred slow
    clients would hold a hundred copies of a plan. A client that reads fast must not delay others, so these
    get their turn between two slices.
    """

    async def slicing(message: Message) -> None:
        body = message.get("body", b"") if message["type"] == "http.response.body" else b""
        if len(body) <= SLICE:
            await send(message)
            return
        view, has_more = memoryview(body), message.get("more_body", False)
        for begin in range(0, len(body), SLICE):
            is_last = begin + SLICE >= len(body)
            part = bytes(view[begin : begin + SLICE])
            await send({"type": message["type"], "body": part, "more_body": has_more or not is_last})
            await asyncio.sleep(0)

    return slicing


def _refusal(scope: Scope) -> ApiError | None:
    if scope.get(CROWDED):
        return ApiError(
            TOO_MANY_CONNECTIONS,
            "The service has reached its limit of connections; try again in a moment.",
            headers={"Retry-After": "1", "Connection": "close"},
        )
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_ADDRESS:
        return ApiError(
            ADDRESS_TOO_LONG, f"The address is longer than {MAX_ADDRESS} bytes; send a shorter one."
        )
    if "\0" in scope.get("path", ""):  # PostgreSQL refuses it as a value
        return ApiError(NOT_FOUND, "The address contains NUL; no resource has such a name.")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
        return ApiError(HEADERS_TOO_LARGE, f"The header fields exceed {MAX_HEADERS} bytes; send less.")
    return None
