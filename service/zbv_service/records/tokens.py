"""Tokens as plain frozen records: what goes into the database and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

TokenKind = Literal["token", "session", "link"]


@dataclass(frozen=True)
class NewToken:
    """A token as it is stored.

    Attributes
    ----------
    kind
        A token that somebody holds; a browser's session; or a link that becomes a session, once.
    name
        Under which its searches and runs are noted. Of the tokens that work, no two have the same.
    parent_id
        The token that a session or link was made with; None when that was a local token.
    local_id
        The local token that a session or link was made with; None when that was a stored token.
    max_searches
        Unfinished searches it may have; None leaves it to the service.
    """

    id: str
    kind: TokenKind
    name: str
    secret_hash: str
    scopes: tuple[str, ...]
    created_at: datetime
    parent_id: str | None = None
    local_id: str | None = None
    max_searches: int | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRecord(NewToken):
    """A stored token. A link's ``used_at`` is when it became a session."""

    revoked_at: datetime | None
    used_at: datetime | None

    def is_live(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)
