"""What every response has: security headers, and a body in slices. Addresses with NUL are refused.

It is plain ASGI middleware, which does not buffer streams.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zbv_service.errors import NOT_FOUND, ApiError, response_to

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


class Responses:
    """Adds the headers to every response of an application, and sends large bodies in slices.

    The server's transport buffers a copy of everything that the client does not read at once: a hundred slow
    clients would hold a hundred copies of a plan. So each slice waits until the client has received the
    previous ones. A client that reads fast must not delay others, so these get their turn between two slices.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers, names = [*message["headers"], *ALWAYS], {name for name, _ in message["headers"]}
                if NO_PAGE[0] not in names:
                    headers.append(NO_PAGE)
                if NOT_KEPT[0] not in names:
                    headers.append(CHECKED if b"etag" in names else NOT_KEPT)
                if scope["scheme"] == "https":
                    headers.append(OVER_TLS)
                message = {**message, "headers": headers}
            elif len(message.get("body", b"")) > SLICE:
                await _in_slices(message, send)
                return
            await send(message)

        if "\0" in scope["path"]:  # PostgreSQL refuses it as a value
            refusal = ApiError(NOT_FOUND, "The address contains NUL; no resource has such a name.")
            await response_to(refusal)(scope, receive, sending)
        else:
            await self._app(scope, receive, sending)


async def _in_slices(message: Message, send: Send) -> None:
    view, has_more = memoryview(message["body"]), message.get("more_body", False)
    for begin in range(0, len(view), SLICE):
        is_last = begin + SLICE >= len(view)
        part = bytes(view[begin : begin + SLICE])
        await send({"type": message["type"], "body": part, "more_body": has_more or not is_last})
        await asyncio.sleep(0)
