"""What a request may do, and in whose name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastapi import Request

from zbv_service.security.scopes import SCOPES

Means = Literal["token", "session", "local", "open"]


@dataclass(frozen=True)
class Grant:
    """What a request may do.

    Attributes
    ----------
    name
        Of the token; None where nobody has to say who they are.
    means
        A token, a browser's session, the token of this machine's user, or none where none is asked for.
    token_id
        The stored token behind it; None for the last two means and for sessions begun with a local token.
    local_id
        The local token behind it; None for all others.
    max_searches
        Unfinished searches it may have; None leaves it to the service.
    """

    name: str | None
    scopes: frozenset[str]
    means: Means
    token_id: str | None = None
    local_id: str | None = None
    max_searches: int | None = None

    @property
    def owner(self) -> str:
        """Who owns what a request creates: a token, with all its sessions; or ``local`` or ``open``."""
        return self.token_id or ("open" if self.means == "open" else "local")


OPEN = Grant(None, frozenset(SCOPES), "open")
"""Everybody's grant in a service that asks for no token."""


def grant_of(request: Request) -> Grant:
    """What a request may do; raises RuntimeError in a route that declares no scope, where nobody asked."""
    found = getattr(request.state, "grant", None)
    if not isinstance(found, Grant):
        raise RuntimeError(f"{request.url.path} asks who calls, and declares no scope.")
    return found


def caller(request: Request) -> str | None:
    """Name of the token that a request came with; None where nobody has to say who they are."""
    return grant_of(request).name
