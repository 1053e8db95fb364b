"""Deciding about a request: who sent it, and whether they may do what it asks for.

As RFC 6750 (bearer tokens) says: 401 without a token or with a wrong one, 403 with one that lacks the scope.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext

from fastapi import Request

from zbv_service.database import DatabaseAway
from zbv_service.errors import (
    INSUFFICIENT_SCOPE,
    OTHER_ORIGIN,
    TOO_MANY_ATTEMPTS,
    UNAUTHENTICATED,
    ProblemError,
)
from zbv_service.security import attempts
from zbv_service.security.attempts import Attempts, WrongSecret
from zbv_service.security.cookies import session_of
from zbv_service.security.grants import OPEN, Grant
from zbv_service.security.origins import SAFE_METHODS, is_from_elsewhere, is_same_origin
from zbv_service.security.scopes import allows
from zbv_service.security.tokens import Tokens

_REALM = 'Bearer realm="zbv"'
_HOW = "send it as Authorization: Bearer …; commands take it from ZBV_TOKEN or --token-file"


class Unauthenticated(WrongSecret, ProblemError):
    """401: the request says not, or wrongly, who sends it."""

    def __init__(self, detail: str, *, is_wrong: bool):
        error = ', error="invalid_token"' if is_wrong else ""
        super().__init__(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": _REALM + error})


class InsufficientScope(ProblemError):
    """403: the token does not allow what the request asks for."""

    def __init__(self, grant: Grant, needed: Sequence[str]):
        held, wanted = ", ".join(sorted(grant.scopes)), " or ".join(needed)
        super().__init__(
            INSUFFICIENT_SCOPE,
            f"found scope {held} of token {grant.name}; this needs {wanted}. Use another token, or have one "
            f"made: zbv-service token create --scope {needed[0]} …",
            headers={"WWW-Authenticate": f'{_REALM}, error="insufficient_scope", scope="{" ".join(needed)}"'},
        )


class TooManyAttempts(ProblemError):
    """429: one wrong token came from one address too often."""

    def __init__(self, address: str, wait: int):
        super().__init__(
            TOO_MANY_ATTEMPTS,
            f"This wrong token came from {address} too often; wait {wait} s before it is sent again, or "
            f"send one that works.",
            headers={"Retry-After": str(wait)},
        )


class Access:
    """Finds out who sends a request."""

    def __init__(self, tokens: Tokens, *, is_open: bool):
        self.tokens = tokens
        self.is_open = is_open
        self._attempts = Attempts()
        self._turn = asyncio.Lock()

    async def require(self, request: Request, needed: Sequence[str]) -> Grant:
        """The grant of a request that may do what needs one of these scopes.

        Raises
        ------
        Unauthenticated, InsufficientScope
        ProblemError
            When another site's page sent it, or a wrong token came from there too often.
        """
        grant = await self.identify(request)
        if not allows(grant.scopes, needed):
            raise InsufficientScope(grant, needed)
        return grant

    async def identify(self, request: Request) -> Grant:
        """Who sends a request, by its Authorization field or else its cookie."""
        if self.is_open:
            # Nothing but the sender's word tells a command from another site's page in a browser here.
            if request.method not in SAFE_METHODS and is_from_elsewhere(request):
                raise _other_origin()
            return OPEN
        text = _bearer(request)
        if text is not None:
            return await self.check(request, text)
        text = session_of(request)
        if text is None:
            raise Unauthenticated(
                f"This service asks who you are, and no token came; {_HOW}.", is_wrong=False
            )
        grant = await self.check(request, text)
        if request.method not in SAFE_METHODS:
            require_same_origin(request)
        return grant

    async def is_still_allowed(self, request: Request, needed: Sequence[str]) -> bool:
        """Whether a request that was let in, and is still being answered, would be let in again.

        A database that does not answer revokes nothing.
        """
        if self.is_open:
            return True
        text = _bearer(request) or session_of(request)
        try:
            grant = None if text is None else await self.tokens.grant(text)
        except DatabaseAway:
            return True
        return grant is not None and allows(grant.scopes, needed)

    async def check(self, request: Request, text: str) -> Grant:
        """The grant of a token or session; raises :class:`ProblemError` 401 or 429."""
        async with self.guarded(request, text, is_known=self.tokens.is_known(text)):
            grant = await self.tokens.grant(text)
            if grant is None:
                raise Unauthenticated(
                    "The token is unknown to this service, expired or revoked. Create a new one: zbv-service "
                    "token create.",
                    is_wrong=True,
                )
        return grant

    @asynccontextmanager
    async def guarded(self, request: Request, text: str, *, is_known: bool = False) -> AsyncIterator[None]:
        """Look a token or link up inside the block, which raises :class:`WrongSecret` when it is wrong.

        Parameters
        ----------
        is_known
            Whether it worked a short while ago. Others wait for their turn while many wrong ones come.

        Raises
        ------
        TooManyAttempts
            When this very one was wrong too often.
        """
        address = _address(request)
        wait = 0 if is_known else self._attempts.wait_seconds(address, text)
        if wait:
            raise TooManyAttempts(address, wait)
        is_slowed = not is_known and self._attempts.is_slowed(address)
        try:
            async with self._turn if is_slowed else nullcontext():
                yield
        except WrongSecret:
            self._attempts.failed(address, text)
            if is_slowed:
                await asyncio.sleep(attempts.DELAY_SECONDS)
            raise


def require_same_origin(request: Request) -> None:
    """Refuse what another site's page has a browser send."""
    if not is_same_origin(request):
        raise _other_origin()


def _other_origin() -> ProblemError:
    return ProblemError(
        OTHER_ORIGIN,
        "A browser changes things only from this service's own pages, and this request comes from elsewhere "
        "(Origin or Sec-Fetch-Site). Scripts send a token in Authorization instead.",
    )


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _bearer(request: Request) -> str | None:
    """The token in the Authorization field; None when there is none, or other credentials: a proxy's own."""
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None
