"""Authenticates and authorizes requests.

It follows RFC 6750 (bearer tokens): 401 without a valid token, 403 for a token without the scope.
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
    ApiError,
)
from zbv_service.security import attempts
from zbv_service.security.attempts import Attempts, WrongSecret
from zbv_service.security.browsers import SAFE_METHODS, is_from_elsewhere, is_same_origin, session_of
from zbv_service.security.grants import OPEN, Grant
from zbv_service.security.scopes import allows
from zbv_service.security.tokens import Tokens

_REALM = 'Bearer realm="zbv"'
_HOW = "send it as Authorization: Bearer …; commands take it from ZBV_TOKEN or --token-file"


class Unauthenticated(WrongSecret, ApiError):
    """401: the request has no valid token."""

    def __init__(self, detail: str, *, is_wrong: bool):
        error = ', error="invalid_token"' if is_wrong else ""
        super().__init__(UNAUTHENTICATED, detail, headers={"WWW-Authenticate": _REALM + error})


class InsufficientScope(ApiError):
    """403: the token lacks the required scope."""

    def __init__(self, grant: Grant, needed: Sequence[str]):
        held, wanted = ", ".join(sorted(grant.scopes)), " or ".join(needed)
        super().__init__(
            INSUFFICIENT_SCOPE,
            f"found scope {held} of token {grant.name}; this needs {wanted}. Use another token, or create "
            f"one: zbv-service token create --scope {needed[0]} …",
            headers={"WWW-Authenticate": f'{_REALM}, error="insufficient_scope", scope="{" ".join(needed)}"'},
        )


class TooManyAttempts(ApiError):
    """429: the same wrong token came from one address too often."""

    def __init__(self, address: str, wait: int):
        super().__init__(
            TOO_MANY_ATTEMPTS,
            f"This invalid token came from {address} too often; wait {wait} s before you send it again, or "
            f"send a valid one.",
            headers={"Retry-After": str(wait)},
        )


class Access:
    """Authenticates requests."""

    def __init__(self, tokens: Tokens, *, is_open: bool):
        self.tokens = tokens
        self.is_open = is_open
        self._attempts = Attempts()
        self._turn = asyncio.Lock()

    async def require(self, request: Request, needed: Sequence[str]) -> Grant:
        """The grant of a request with one of these scopes.

        Raises
        ------
        Unauthenticated, InsufficientScope
        ApiError
            A page of another site sent the request, or a wrong token came from its address too often.
        """
        grant = await self.identify(request)
        if not allows(grant.scopes, needed):
            raise InsufficientScope(grant, needed)
        return grant

    async def identify(self, request: Request) -> Grant:
        """The grant of a request, by its Authorization header or its cookie."""
        if self.is_open:
            # Without tokens, only these headers distinguish a command from a page of another site.
            if request.method not in SAFE_METHODS and is_from_elsewhere(request):
                raise _other_origin()
            return OPEN
        text = _bearer(request)
        if text is not None:
            return await self.check(request, text)
        text = session_of(request)
        if text is None:
            raise Unauthenticated(
                f"This service requires a token, and the request has none; {_HOW}.", is_wrong=False
            )
        grant = await self.check(request, text)
        if request.method not in SAFE_METHODS:
            require_same_origin(request)
        return grant

    async def is_still_allowed(self, request: Request, needed: Sequence[str]) -> bool:
        """Whether a request that is still being answered would still be authorized.

        True while the database is away.
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
        """The grant of a token or session; raises :class:`ApiError` 401 or 429."""
        async with self.guarded(request, text, is_known=self.tokens.is_known(text)):
            grant = await self.tokens.grant(text)
            if grant is None:
                raise Unauthenticated(
                    "Unknown, expired or revoked token. Create a new one: zbv-service token create.",
                    is_wrong=True,
                )
        return grant

    @asynccontextmanager
    async def guarded(self, request: Request, text: str, *, is_known: bool = False) -> AsyncIterator[None]:
        """Count failures of a block, which raises :class:`WrongSecret` for an invalid token or link.

        Parameters
        ----------
        is_known
            Whether it was valid a moment ago. Others queue while many wrong ones arrive.

        Raises
        ------
        TooManyAttempts
            The same wrong one came too often.
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
    """Refuse requests that a page of another site sends through a browser."""
    if not is_same_origin(request):
        raise _other_origin()


def _other_origin() -> ApiError:
    return ApiError(
        OTHER_ORIGIN,
        "A browser may change things only from this service's own pages, and this request has another origin "
        "(Origin or Sec-Fetch-Site). Scripts send a token in Authorization instead.",
    )


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _bearer(request: Request) -> str | None:
    """The token in the Authorization header; None without one, or with credentials of another kind."""
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None
