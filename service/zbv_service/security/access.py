"""Authenticates and authorizes requests; a route declares its scope: ``dependencies=[needs("search")]``.

It follows RFC 6750 (bearer tokens): 401 without a valid token, 403 for a token without the scope. Browsers
send the cookie of a session instead. They add it to requests of any page, so requests that change something
must prove that a page of this service sent them.

This module has no postponed annotations, because FastAPI reads those of a dependency that is an object
and cannot resolve them as text.
"""

import asyncio
import hmac
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request, Response, Security, params
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase

from zbv_service.database import DatabaseAway
from zbv_service.errors import INSUFFICIENT_SCOPE, OTHER_ORIGIN, UNAUTHENTICATED, ApiError
from zbv_service.observability.context import CALLER
from zbv_service.security.tokens import OPEN, SCOPES, Grant, Scope, TokenTable, TokenText, allows

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SCHEME = "token"
FRESH_SECONDS = 1.0
"""Seconds for which a token is cached, and the longest time that a revoked token still works."""
STALE_SECONDS = 60.0
"""The same while the database is away, when tokens cannot be revoked either."""
REMEMBERED = 4096
USED_SECONDS = 60.0
"""Seconds between updates of a token's last use."""
_REALM = 'Bearer realm="zbv"'
_HOW = "send it as Authorization: Bearer …; commands take it from ZBV_TOKEN or --token-file"

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class _Known:
    """A valid token, as looked up at the time ``at``."""

    hash: str
    grant: Grant
    at: float


class Access:
    """Authenticates requests; caches tokens briefly, because thousands of ranks fetch plans at once.

    Parameters
    ----------
    local
        The token for commands on this machine, which has all scopes and is not in the database.
    is_open
        Whether the service requires no token.
    """

    def __init__(
        self,
        table: TokenTable,
        local: TokenText | None = None,
        *,
        is_open: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.is_open = is_open
        self._table = table
        self._clock = clock
        self.local_id = None if local is None else local.id
        self._local: _Known | None = None
        if local is not None:
            grant = Grant("local", frozenset(SCOPES), "local", local_id=local.id)
            self._local = _Known(local.hash, grant, math.inf)  # it is never looked up
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._looks: dict[str, asyncio.Task[_Known | None]] = {}
        self._notes: set[asyncio.Task[None]] = set()

    @property
    def local_grant(self) -> Grant | None:
        """The grant of the local token; None without one."""
        return None if self._local is None else self._local.grant

    async def require(self, request: Request, needed: Sequence[str]) -> Grant:
        """The grant of a request with one of these scopes, by its Authorization header or its cookie.

        Raises
        ------
        Unauthenticated, InsufficientScope
        ApiError
            A page of another site sent the request.
        DatabaseAway
            The token is not cached, and the database does not answer.
        """
        is_safe = request.method in SAFE_METHODS
        if self.is_open:
            # Without tokens, only these headers distinguish a command from a page of another site.
            if not is_safe and is_from_elsewhere(request):
                raise _other_origin()
            return OPEN
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        session = None if is_bearer else session_of(request)
        if not is_bearer and session is None:
            raise Unauthenticated(
                f"This service requires a token, and the request has none; {_HOW}.", is_wrong=False
            )
        grant = await self.check(text.strip() if session is None else session)
        if not is_bearer and not is_safe:
            require_same_origin(request)
        if not allows(grant.scopes, needed):
            raise InsufficientScope(grant, needed)
        return grant

    async def is_still_allowed(self, request: Request, needed: Sequence[str]) -> bool:
        """Whether a request that is still being answered would still be authorized.

        True while the database is away.
        """
        try:
            await self.require(request, needed)
        except DatabaseAway:
            return True
        except ApiError:
            return False
        return True

    async def check(self, text: str) -> Grant:
        """The grant of a token or session; raises :class:`Unauthenticated`.

        A secret has 256 random bits, so guesses need no limit.
        """
        token, known = TokenText.parse(text), None
        if token is not None:
            known = self._local if token.id == self.local_id else self._known.get(token.id)
            if known is None or self._clock() - known.at > FRESH_SECONDS:
                look = self._looks.get(token.id)  # concurrent requests share one query
                if look is None:
                    look = self._looks[token.id] = asyncio.create_task(self._look(token.id))
                known = await asyncio.shield(look)
        if token is None or known is None or not hmac.compare_digest(token.hash, known.hash):
            raise Unauthenticated(
                "Unknown, expired or revoked token. Create a new one: zbv-service token create.",
                is_wrong=True,
            )
        return known.grant

    def forget(self, token_id: str) -> None:
        """Drop a token from the cache."""
        self._known.pop(token_id, None)

    async def close(self) -> None:
        """Wait for queries and updates in progress."""
        await asyncio.gather(*self._looks.values(), *self._notes, return_exceptions=True)

    async def _look(self, token_id: str) -> _Known | None:
        """Look up a token in the database."""
        try:
            token = await self._table.live(token_id, self.local_id)
        except DatabaseAway:
            known = self._known.get(token_id)
            if known is None or self._clock() - known.at > STALE_SECONDS:
                raise
            return known
        finally:
            del self._looks[token_id]
        if token is None or token.kind == "link":
            self.forget(token_id)
            return None
        if token.used_at is None or datetime.now(UTC) - token.used_at >= timedelta(seconds=USED_SECONDS):
            note = asyncio.create_task(self._note_use(token_id))
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)
        known = self._known[token_id] = _Known(token.secret_hash, Grant.of(token), self._clock())
        self._known.move_to_end(token_id)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known

    async def _note_use(self, token_id: str) -> None:
        try:
            await self._table.used(token_id)
        except DatabaseAway as error:
            logger.warning("%s The last use of token %s was not stored.", error, token_id)


def cookie_name(request: Request) -> str:
    """The name of the session cookie.

    With TLS, the name makes browsers accept the cookie from this host only. Without TLS it contains the
    port, because cookies are shared by all ports of a host.
    """
    if request.url.scheme == "https":
        return "__Host-zbv-session"
    return f"zbv-session-{request.url.port or 80}"


def session_of(request: Request) -> str | None:
    """The token in the session cookie."""
    return request.cookies.get(cookie_name(request))


def set_session(response: Response, request: Request, text: str, max_age: int) -> None:
    """Set the session cookie. Scripts cannot read it, and browsers do not send it from other sites.

    An empty text and ``max_age`` 0 delete the cookie.
    """
    response.set_cookie(
        cookie_name(request),
        text,
        max_age=max_age,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def is_same_origin(request: Request) -> bool:
    """Whether the browser declares that the request comes from a page of this service or from no page.

    Every browser does so in one of two headers; a request without either is rejected.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = urlsplit(request.headers.get("origin", ""))
    return origin.netloc == request.headers.get("host", "") and origin.scheme in ("http", "https")


def is_from_elsewhere(request: Request) -> bool:
    """Whether the browser declares that a page of another site sent the request; commands declare nothing."""
    is_browser = "sec-fetch-site" in request.headers or "origin" in request.headers
    return is_browser and not is_same_origin(request)


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


class _TokenScheme(SecurityBase):
    """Checks that each request of a route has one of its declared scopes."""

    def __init__(self) -> None:
        self.scheme_name = SCHEME
        self.model = HTTPBearer(
            bearerFormat="zbv_<id>_<secret>",
            description="A token of `zbv-service token create`. A session cookie is accepted too.",
        )

    async def __call__(self, request: Request, scopes: SecurityScopes) -> None:
        """Store the grant in ``request.state``; raises the errors of :meth:`Access.require`."""
        access: Access = request.app.state.application.access
        request.state.grant = grant = await access.require(request, scopes.scopes)
        CALLER.set(grant.name or (request.client.host if request.client else None))


_scheme = _TokenScheme()


async def _anybody() -> None:
    """Declares that a route needs no token."""


def needs(*scopes: Scope) -> params.Security:
    """A dependency that requires one of these scopes."""
    return cast("params.Security", Security(_scheme, scopes=list(scopes)))


READ_SCOPES: tuple[Scope, ...] = ("read",)
READ = needs(*READ_SCOPES)
ANY_TOKEN = needs(*SCOPES)
ANYBODY = cast("params.Depends", Depends(_anybody))
"""The declaration of a route that needs no token."""


def scopes_of(route: APIRoute) -> list[str] | None:
    """The scopes of a route, which needs one of them: [] for none, None if it declares nothing."""
    for dependency in route.dependant.dependencies:
        if dependency.call is _scheme:
            return list(dependency.own_oauth_scopes or [])
        if dependency.call is _anybody:
            return []
    return None


def require_declared(router: APIRouter) -> None:
    """Raise RuntimeError if a route declares neither a scope nor that it needs no token."""
    for route in router.routes:
        if not isinstance(route, APIRoute) or scopes_of(route) is None:
            raise RuntimeError(f"{route} declares no scope; give it dependencies=[needs(…)] or [ANYBODY].")
