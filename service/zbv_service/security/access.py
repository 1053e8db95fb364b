"""Authenticates and authorizes requests.

It follows RFC 6750 (bearer tokens): 401 without a valid token, 403 for a token without the scope.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from zbv_service.database import DatabaseAway
from zbv_service.errors import (
    INSUFFICIENT_SCOPE,
    OTHER_ORIGIN,
    UNAUTHENTICATED,
    ApiError,
)
from zbv_service.security.browsers import SAFE_METHODS, is_from_elsewhere, is_same_origin, session_of
from zbv_service.security.grants import OPEN, Grant
from zbv_service.security.scopes import allows
from zbv_service.security.tokens import Tokens

_REALM = 'Bearer realm="zbv"'
_HOW = "send it as Authorization: Bearer …; commands take it from ZBV_TOKEN or --token-file"


class Unauthenticated(ApiError):
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


class Access:
    """Authenticates requests."""

    def __init__(self, tokens: Tokens, *, is_open: bool):
        self.tokens = tokens
        self.is_open = is_open

    async def require(self, request: Request, needed: Sequence[str]) -> Grant:
        """The grant of a request with one of these scopes.

        Raises
        ------
        Unauthenticated, InsufficientScope
        ApiError
            A page of another site sent the request.
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
            return await self.check(text)
        text = session_of(request)
        if text is None:
            raise Unauthenticated(
                f"This service requires a token, and the request has none; {_HOW}.", is_wrong=False
            )
        grant = await self.check(text)
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

    async def check(self, text: str) -> Grant:
        """The grant of a token or session; raises :class:`Unauthenticated`.

        A secret has 256 random bits, so guesses need no limit.
        """
        grant = await self.tokens.grant(text)
        if grant is None:
            raise Unauthenticated(
                "Unknown, expired or revoked token. Create a new one: zbv-service token create.",
                is_wrong=True,
            )
        return grant


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


def _bearer(request: Request) -> str | None:
    """The token in the Authorization header; None without one, or with credentials of another kind."""
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None
