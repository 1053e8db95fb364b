"""What every answer keeps browsers and caches from doing; plain ASGI, so that streams stay streams."""

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
"""Of answers that are no pages: whatever a browser takes them for, they load and run nothing."""
NOT_KEPT = (b"cache-control", b"no-store")
"""Of answers that do not say how long they may be kept: left to themselves, caches would guess."""
CHECKED = (b"cache-control", b"no-cache")
"""Of those that can be asked whether they are still the same: files, which change with the version."""
OVER_TLS = (b"strict-transport-security", b"max-age=31536000")


class SecurityHeaders:
    """An application whose every answer carries them."""

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
