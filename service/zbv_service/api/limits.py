"""Refuses addresses with NUL, and sends large responses in slices."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.errors import NOT_FOUND, ApiError, response_to

SLICE = 128 * 1024
"""Bytes of a response that are passed to the server at a time."""


class Limited:
    """Sends large bodies in slices, each after the client has received the previous ones.

    The server's transport buffers a copy of everything that the client does not read at once: a hundred slow
    clients would hold a hundred copies of a plan. A client that reads fast must not delay others, so these
    get their turn between two slices.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if "\0" in scope.get("path", ""):  # PostgreSQL refuses it as a value
            refusal = ApiError(NOT_FOUND, "The address contains NUL; no resource has such a name.")
            await response_to(refusal)(scope, receive, send)
            return

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

        await self._app(scope, receive, slicing)
