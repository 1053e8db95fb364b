"""Tokens: their text, what they allow, and the table of those that exist.

The text of a token is ``zbv_<id>_<secret>``. The id names its row in the database and may be shown. The
secret has 256 random bits, so the database stores its SHA-256: it cannot be guessed, and a slow hash, which
protects passwords that people choose, would only slow down every request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast, get_args

from fastapi import Request
from sqlalchemy import ColumnElement, CursorResult, and_, delete, or_, select, update
from sqlalchemy.orm import aliased

from zbv_service.database.engine import BaseTable, columns_of, record_of
from zbv_service.database.models import TokenRow

Scope = Literal["read", "search", "agent", "launch", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""What a token may do.

``read``: see searches, plans, runs, agents, traces, logs and metrics. ``search``: start, cancel and discard
searches, and import plans. ``agent``: act as an agent: register a node, take its work, send measurements of
its ranks; fetch plans. ``launch``: start, change and cancel runs, which execute code on agents; import plans.
``admin``: everything.
"""


def allows(granted: Iterable[str], needed: Iterable[str]) -> bool:
    """Whether these scopes include one of the needed ones."""
    scopes = frozenset(granted)
    return "admin" in scopes or not scopes.isdisjoint(needed)


TokenKind = Literal["token", "session", "link"]
PREFIX = "zbv"
_FORM = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})", re.ASCII)


@dataclass(frozen=True)
class TokenText:
    """A parsed token."""

    id: str
    secret: str

    @classmethod
    def new(cls) -> TokenText:
        """A new random token."""
        return cls(secrets.token_hex(6), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> TokenText | None:
        """Parse a token; None if the text is not a token."""
        found = _FORM.fullmatch(text)
        return None if found is None else cls(found[1], found[2])

    @property
    def hash(self) -> str:
        """The hash to store."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    def __repr__(self) -> str:
        return f"TokenText({self.id!r}, …)"  # tracebacks and logs show it


@dataclass(frozen=True)
class Token:
    """A token, session or link as it is stored."""

    id: str
    kind: TokenKind
    """A token of a user, a browser's session, or a link that becomes a session once."""
    name: str
    """Recorded with its searches and runs. The names of valid tokens are unique."""
    secret_hash: str
    scopes: Iterable[str]
    created_at: datetime
    parent_id: str | None = None
    """The token that created a session or link; None if a local token did."""
    local_id: str | None = None
    """The local token that created a session or link; None if a stored token did."""
    max_searches: int | None = None
    """The limit of its unfinished searches; None for the service's default."""
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    used_at: datetime | None = None
    """Its last use; of a link, when it became a session."""

    def is_live(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class Grant:
    """What a request may do, and on whose behalf."""

    name: str | None
    """Name of the token; None if the service requires no token."""
    scopes: frozenset[str]
    means: Literal["token", "session", "local", "open"]
    """A token, a browser session, the local token of this machine's user, or none if none is required."""
    token_id: str | None = None
    """The stored token; None for the last two means and for sessions of a local token."""
    local_id: str | None = None
    """The local token; None for all others."""
    max_searches: int | None = None
    """Limit of unfinished searches; None for the service's default."""

    @classmethod
    def of(cls, token: Token) -> Grant:
        """The grant of a stored token; a session or link belongs to the token that created it."""
        return cls(
            token.name,
            frozenset(token.scopes),
            "session" if token.kind == "session" else "token",
            token_id=token.id if token.kind == "token" else token.parent_id,
            local_id=token.local_id,
            max_searches=token.max_searches,
        )

    @property
    def owner(self) -> str:
        """The owner of created resources: a token with all its sessions, ``local`` or ``open``."""
        return self.token_id or ("open" if self.means == "open" else "local")


OPEN = Grant(None, frozenset(SCOPES), "open")
"""The grant of every request to a service that requires no token."""


def grant_of(request: Request) -> Grant:
    """The grant of a request; raises RuntimeError in a route that declares no scope."""
    grant = getattr(request.state, "grant", None)
    if not isinstance(grant, Grant):
        raise RuntimeError(f"{request.url.path} needs the caller, but declares no scope.")
    return grant


class TokenNameTaken(Exception):
    """A valid token already has this name."""


class TokenTable(BaseTable):
    """The tokens, browser sessions and sign-in links of one database."""

    async def add(self, new: Token) -> None:
        """Store a token, session or link, and remove expired sessions and links.

        Raises
        ------
        TokenNameTaken
            A valid token already has this name.
        """
        row = TokenRow(**{**asdict(new), "scopes": list(new.scopes)})
        now = datetime.now(UTC)
        async with self._database.writing() as session:
            await session.execute(
                delete(TokenRow).where(TokenRow.kind != "token", TokenRow.expires_at <= now)
            )
            named = select(TokenRow.id).where(TokenRow.kind == "token", TokenRow.name == new.name, _live(now))
            if new.kind == "token" and await session.scalar(named.limit(1)) is not None:
                raise TokenNameTaken(new.name)
            session.add(row)

    async def live(self, token_id: str, local_id: str | None = None) -> Token | None:
        """A valid token, None otherwise; a session or link needs a valid parent.

        Parameters
        ----------
        local_id
            The local token of this service: a session or link of another one is not valid here.
        """
        parent = aliased(TokenRow)
        now = datetime.now(UTC)
        query = select(*_TOKEN).outerjoin(parent, TokenRow.parent_id == parent.id)
        has_parent = _live(now, parent)
        is_rooted = or_(
            TokenRow.kind == "token", TokenRow.parent_id.is_not(None), TokenRow.local_id == (local_id or "")
        )
        rows = await self._database.rows(
            query.where(TokenRow.id == token_id, _live(now), has_parent, is_rooted)
        )
        return Token(*rows[0]) if rows else None

    async def get(self, token_id: str) -> Token | None:
        """A token by id, valid or not."""
        rows = await self._database.rows(select(*_TOKEN).where(TokenRow.id == token_id))
        return Token(*rows[0]) if rows else None

    async def tokens(self) -> list[Token]:
        """All tokens without sessions and links, oldest first."""
        query = select(*_TOKEN).where(TokenRow.kind == "token").order_by(TokenRow.created_at, TokenRow.id)
        return [Token(*row) for row in await self._database.rows(query)]

    async def has_any(self) -> bool:
        """Whether a valid token exists."""
        query = select(TokenRow.id).where(TokenRow.kind == "token", _live(datetime.now(UTC))).limit(1)
        return bool(await self._database.rows(query))

    async def revoke(self, name_or_id: str) -> list[Token]:
        """Revoke the valid tokens with this name or id, together with their sessions and links."""
        now = datetime.now(UTC)
        either = or_(TokenRow.id == name_or_id, TokenRow.name == name_or_id)
        query = select(TokenRow).where(TokenRow.kind == "token", either, _live(now))
        async with self._database.writing() as session:
            rows = list(await session.scalars(query))
            for row in rows:
                row.revoked_at = now
        return [record_of(Token, row) for row in rows]

    async def remove(self, token_id: str) -> None:
        """Remove a session or link."""
        statement = delete(TokenRow).where(TokenRow.id == token_id, TokenRow.kind != "token")
        async with self._database.writing() as session:
            await session.execute(statement)

    async def redeem(self, link_id: str) -> bool:
        """Use a link; False if it was already used."""
        unused = and_(TokenRow.id == link_id, TokenRow.kind == "link", TokenRow.used_at.is_(None))
        statement = update(TokenRow).where(unused).values(used_at=datetime.now(UTC))
        async with self._database.writing() as session:
            return cast("CursorResult[Any]", await session.execute(statement)).rowcount == 1

    async def used(self, token_id: str) -> None:
        """Record that a token was used."""
        statement = update(TokenRow).where(TokenRow.id == token_id).values(used_at=datetime.now(UTC))
        async with self._database.writing() as session:
            await session.execute(statement)


_TOKEN = columns_of(Token, TokenRow)


def _live(now: datetime, token: type[TokenRow] = TokenRow) -> ColumnElement[bool]:
    unexpired = or_(token.expires_at.is_(None), token.expires_at > now)
    return and_(token.revoked_at.is_(None), unexpired)
