"""Refuses requests for names that are not the service's.

A service that listens on this machine alone is reached by its names there. A page of another site can have
its own name point to this machine, and a browser would then take the service for a part of that site ("DNS
rebinding"): what gives it away is the name.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from zbv_service.errors import UNKNOWN_HOST, ProblemError, response_to
from zbv_service.settings import Settings

_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def host_names(settings: Settings) -> frozenset[str] | None:
    """The names under which a service is reached; None is any."""
    if "*" in settings.allowed_hosts or not (settings.allowed_hosts or settings.is_local):
        return None
    own = f"[{settings.host}]" if ":" in settings.host else settings.host
    return frozenset(name.lower() for name in (*settings.allowed_hosts, own)) | _LOCAL


class KnownHosts:
    """An application that answers to its own names only."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None):
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or self._names is None:
            await self._app(scope, receive, send)
            return
        name = next((value for key, value in scope["headers"] if key == b"host"), b"").decode("latin-1")
        if _without_port(name) in self._names:
            await self._app(scope, receive, send)
            return
        detail = (
            f"found host {name[:100]!r}; this service is reached as {', '.join(sorted(self._names))}. Use "
            f"one of these, or have ZBV_ALLOWED_HOSTS name it."
        )
        await response_to(ProblemError(UNKNOWN_HOST, detail))(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
