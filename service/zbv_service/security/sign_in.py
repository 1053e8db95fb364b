"""Sign-in of browsers: a token or a one-time link starts a session."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, Field

from zbv_service.errors import INSUFFICIENT_SCOPE, ApiError
from zbv_service.security.access import Access
from zbv_service.security.quotas import Quotas
from zbv_service.security.tokens import Grant, Token, TokenKind, TokenTable, TokenText

LINK_SECONDS = 24 * 3600.0


class SignInLink(BaseModel):
    """A link that signs one browser in."""

    url: str = Field(description="Works once.")
    expires_at: datetime


class LinkUnusable(Exception):
    """A link that cannot start a session; the message says why."""


class SessionCreatesNothing(ApiError):
    """403: a browser session requested another credential."""

    def __init__(self) -> None:
        super().__init__(
            INSUFFICIENT_SCOPE,
            "A browser session cannot create a link or another session, which could outlive it. Use a token "
            "of zbv-service token create, or zbv-service token link on the service's machine.",
        )


class SignIn:
    """Starts and ends sessions."""

    def __init__(self, table: TokenTable, access: Access, session_seconds: float, quotas: Quotas):
        self._table = table
        self._quotas = quotas
        self._access = access
        self.session_seconds = session_seconds

    async def new_link(self, grant: Grant) -> str:
        """A token that starts one session with the same grant, if it is used within a day.

        Raises
        ------
        SessionCreatesNothing
            The grant belongs to a session.
        """
        return await self._add("link", grant, LINK_SECONDS)

    async def follow_link(self, text: str) -> str:
        """Start a session with a link; raises :class:`LinkUnusable`."""
        token = TokenText.parse(text)
        stored = None if token is None else await self._table.get(token.id)
        if token is None or stored is None or stored.kind != "link":
            raise LinkUnusable("Unknown or expired link.")
        if not hmac.compare_digest(token.hash, stored.secret_hash):
            raise LinkUnusable("Unknown or expired link.")
        if await self._table.live(token.id, self._access.local_id) is None:
            raise LinkUnusable("This link has expired, or its token was revoked.")
        if not await self._table.redeem(token.id):
            raise LinkUnusable("This link was already used; a link works once.")
        return await self.begin(Grant.of(stored))

    async def begin(self, grant: Grant) -> str:
        """Start a session with a grant; it ends with the token of the grant at the latest.

        Raises
        ------
        SessionCreatesNothing
            The grant belongs to a session.
        """
        return await self._add("session", grant, self.session_seconds)

    async def end(self, text: str) -> None:
        """End a session at once."""
        token = TokenText.parse(text)
        if token is not None:
            await self._table.remove(token.id)
            self._access.forget(token.id)

    async def _add(self, kind: TokenKind, grant: Grant, seconds: float) -> str:
        if grant.means == "session":
            raise SessionCreatesNothing
        await self._quotas.require_room(grant, "sessions", 0)
        text, now = TokenText.new(), datetime.now(UTC)
        await self._table.add(
            Token(
                id=text.id,
                kind=kind,
                name=str(grant.name),
                secret_hash=text.hash,
                scopes=tuple(sorted(grant.scopes)),
                created_at=now,
                parent_id=grant.token_id,
                local_id=grant.local_id,
                max_searches=grant.max_searches,
                expires_at=now + timedelta(seconds=seconds),
            )
        )
        return str(text)
