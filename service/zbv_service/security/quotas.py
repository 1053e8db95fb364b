"""Limits what a token may store, so that no token fills the disk: a route declares what it adds.

This module has no postponed annotations, because FastAPI reads those of a dependency that is an object
and cannot resolve them as text.
"""

import asyncio
from typing import Literal, cast

from fastapi import Depends, Request, params

from zbv_service.compute.cache import Cache
from zbv_service.database.quotas import Owner, QuotaTable, Stored
from zbv_service.errors import TOO_MUCH_STORED, ApiError
from zbv_service.security.grants import Grant, grant_of
from zbv_service.settings import Settings

Stores = Literal["searches", "plans", "runs", "agents", "sessions"]

FRESH_SECONDS = (20.0, 1.0)
"""Seconds for which a count is used again, and for which it may refuse a request. What this process adds
meanwhile is added to the count."""
CACHED = 1024
_WAYS: dict[str, str] = {
    "searches": "Discard some (DELETE /v1/searches/ID)",
    "plans": "Plans that nobody uses are removed after --keep-plan-days",
    "runs": "Ended runs are removed after --keep-plan-days",
    "agents": "Deregister some (DELETE /v1/agents/ID)",
    "sessions": "Sign out of some, or revoke the token (zbv-service token revoke)",
}
"""How a token gets rid of each kind."""


class Quotas:
    """Counts what tokens have stored."""

    def __init__(self, table: QuotaTable, settings: Settings):
        self._table = table
        self._bytes = settings.max_stored_bytes_per_token
        rows = settings.max_stored_rows_per_token
        self._rows = {**dict.fromkeys(_WAYS, rows), "agents": settings.max_agents_per_token}
        self._known: Cache[Stored] = Cache(CACHED)

    async def require_room(self, grant: Grant, kind: str, size: int) -> None:
        """Refuse a request that stores ``size`` bytes in a row of this kind if the token has no room left.

        Raises
        ------
        ApiError
            429: the token has stored too much.
        """
        owner = Owner(grant.name, grant.owner, grant.token_id, grant.local_id)
        refusal: ApiError | None = None
        for seconds in FRESH_SECONDS:
            period = int(asyncio.get_running_loop().time() / seconds)
            key = f"{owner} {seconds} {period}"
            stored = await self._known.get(key, lambda: self._table.stored(owner))
            refusal = self._refusal(grant, stored, kind, size)
            if refusal is None:
                break
        if refusal is not None:
            raise refusal
        stored.rows[kind] += 1
        stored.size += size

    def _refusal(self, grant: Grant, stored: Stored, kind: str, size: int) -> ApiError | None:
        if stored.rows[kind] >= self._rows[kind]:
            setting = "--max-agents-per-token" if kind == "agents" else "--max-stored-rows-per-token"
            return _refused(grant, f"{stored.rows[kind]} {kind}", setting, self._rows[kind], _WAYS[kind])
        if kind != "sessions" and stored.size + size > self._bytes:
            return _refused(
                grant,
                f"{stored.size} bytes of searches, plans, runs and agents",
                "--max-stored-bytes-per-token",
                self._bytes,
                f"{_WAYS['searches']}. {_WAYS['plans']}",
            )
        return None


def _refused(grant: Grant, found: str, setting: str, most: int, way: str) -> ApiError:
    whose = f"Token {grant.name}" if grant.name else "This service"
    return ApiError(
        TOO_MUCH_STORED,
        f"{whose} has stored {found}; the limit is {most} ({setting}). {way}, or have the operator raise "
        f"the limit.",
    )


def _stores(kind: Stores) -> params.Depends:
    async def require_room(request: Request) -> None:
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        quotas: Quotas = request.app.state.application.quotas
        await quotas.require_room(grant_of(request), kind, size)

    return cast("params.Depends", Depends(require_room))


STORES: dict[Stores, params.Depends] = {
    kind: _stores(kind) for kind in ("searches", "plans", "runs", "agents")
}
"""The declaration of a route that stores something: ``dependencies=[needs("search"), STORES["plans"]]``."""
