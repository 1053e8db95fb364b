"""Refuses requests for host names that do not belong to the service.

A service that listens only on this machine is reached by local names. A page of another site can let
its own name point to this machine, and a browser would then treat the service as part of that site ("DNS
rebinding"). The name reveals this.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from zbv_service.errors import MALFORMED_REQUEST, UNKNOWN_HOST, ApiError, response_to
from zbv_service.settings import Settings

_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def host_names(settings: Settings) -> frozenset[str] | None:
    """The names of a service; None accepts any name."""
    if "*" in settings.allowed_hosts or not (settings.allowed_hosts or settings.is_local):
        return None
    own = f"[{settings.host}]" if ":" in settings.host else settings.host
    return frozenset(name.lower() for name in (*settings.allowed_hosts, own)) | _LOCAL


class KnownHosts:
    """Answers only requests for the service's own names."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None):
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        if len(hosts) > 1:  # a proxy may have checked another one
            detail = f"found {len(hosts)} Host fields; send one."
            await response_to(ApiError(MALFORMED_REQUEST, detail))(scope, receive, send)
            return
        if self._names is None:
            await self._app(scope, receive, send)
            return
        name = (hosts[0] if hosts else b"").decode("latin-1")
        if _without_port(name) in self._names:
            await self._app(scope, receive, send)
            return
        detail = (
            f"found host {name[:100]!r}; this service is known as {', '.join(sorted(self._names))}. Use "
            f"one of these, or add it to ZBV_ALLOWED_HOSTS."
        )
        await response_to(ApiError(UNKNOWN_HOST, detail))(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
