"""Grants: what a request may do, and on whose behalf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastapi import Request

from zbv_service.records.tokens import TokenRecord
from zbv_service.security.scopes import SCOPES

Means = Literal["token", "session", "local", "open"]


@dataclass(frozen=True)
class Grant:
    """What a request may do, and on whose behalf."""

    name: str | None
    """Name of the token; None if the service requires no token."""
    scopes: frozenset[str]
    means: Means
    """A token, a browser session, the local token of this machine's user, or none if none is required."""
    token_id: str | None = None
    """The stored token; None for the last two means and for sessions of a local token."""
    local_id: str | None = None
    """The local token; None for all others."""
    max_searches: int | None = None
    """Limit of unfinished searches; None for the service's default."""

    @property
    def owner(self) -> str:
        """The owner of created resources: a token with all its sessions, ``local`` or ``open``."""
        return self.token_id or ("open" if self.means == "open" else "local")


OPEN = Grant(None, frozenset(SCOPES), "open")
"""The grant of every request to a service that requires no token."""


def grant_of_token(record: TokenRecord) -> Grant:
    """The grant of a stored token, or of a session or link, which belong to the token that created them."""
    return Grant(
        record.name,
        frozenset(record.scopes),
        "session" if record.kind == "session" else "token",
        token_id=record.id if record.kind == "token" else record.parent_id,
        local_id=record.local_id,
        max_searches=record.max_searches,
    )


def grant_of(request: Request) -> Grant:
    """The grant of a request; raises RuntimeError in a route that declares no scope."""
    found = getattr(request.state, "grant", None)
    if not isinstance(found, Grant):
        raise RuntimeError(f"{request.url.path} needs the caller, but declares no scope.")
    return found
