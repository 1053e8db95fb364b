"""Security headers of every response, as plain ASGI middleware, which does not buffer streams."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class SecurityHeaders:
    """Adds the headers to every response of an application."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with(message["headers"], scope["scheme"] == "https")}
            await send(message)

        await self._app(scope, receive, sending)


def _with(headers: list[tuple[bytes, bytes]], is_over_tls: bool) -> list[tuple[bytes, bytes]]:
    found, names = [*headers, *ALWAYS], {name for name, _ in headers}
    if NO_PAGE[0] not in names:
        found.append(NO_PAGE)
    if NOT_KEPT[0] not in names:
        found.append(CHECKED if b"etag" in names else NOT_KEPT)
    if is_over_tls:
        found.append(OVER_TLS)
    return found
