"""Tokens, as they enter and leave the database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

TokenKind = Literal["token", "session", "link"]


@dataclass(frozen=True)
class NewToken:
    """A token as it is stored."""

    id: str
    kind: TokenKind
    """A token of a user, a browser's session, or a link that becomes a session once."""
    name: str
    """Recorded with its searches and runs. The names of valid tokens are unique."""
    secret_hash: str
    scopes: tuple[str, ...]
    created_at: datetime
    parent_id: str | None = None
    """The token that created a session or link; None if a local token did."""
    local_id: str | None = None
    """The local token that created a session or link; None if a stored token did."""
    max_searches: int | None = None
    """The limit of its unfinished searches; None for the service's default."""
    expires_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRecord(NewToken):
    """A stored token. A link's ``used_at`` is when it became a session."""

    revoked_at: datetime | None
    used_at: datetime | None

    def is_live(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)
