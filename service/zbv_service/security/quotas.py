"""Limits what a token may store, so that no token fills the disk: a route declares what it adds.

This module has no postponed annotations, because FastAPI reads those of a dependency that is an object
and cannot resolve them as text.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from fastapi import Depends, Request, params
from sqlalchemy import JSON, ColumnElement, Select, Text, false, func, literal, select, union_all
from sqlalchemy import cast as as_type

from zbv_service.compute.waiting import Cache
from zbv_service.database.engine import BaseTable, Database
from zbv_service.database.models import AgentRow, PlanRow, RunRow, SearchRow, TokenRow
from zbv_service.errors import TOO_MUCH_STORED, ApiError
from zbv_service.records.agents import AGENT_ENDED
from zbv_service.security.tokens import Grant, grant_of
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


@dataclass
class Stored:
    """What a token has stored: the bytes of its searches with their plans, of its imported plans, runs and
    agents; and the number of rows by kind."""

    size: int
    rows: dict[str, int]


class Quotas(BaseTable):
    """Counts what the tokens of one database have stored."""

    def __init__(self, database: Database, settings: Settings):
        super().__init__(database)
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
        for seconds in FRESH_SECONDS:
            period = int(asyncio.get_running_loop().time() / seconds)
            key = f"{grant.owner} {grant.name} {grant.local_id} {seconds} {period}"
            stored = await self._known.get(key, partial(self.stored, grant))
            has_rows = stored.rows[kind] < self._rows[kind]
            has_bytes = kind == "sessions" or stored.size + size <= self._bytes
            if has_rows and has_bytes:
                stored.rows[kind] += 1
                stored.size += size
                return
        what, setting, most, way = f"{stored.rows[kind]} {kind}", "rows", self._rows[kind], _WAYS[kind]
        if has_rows:
            what, setting = f"{stored.size} bytes of searches, plans, runs and agents", "bytes"
            most, way = self._bytes, f"{_WAYS['searches']}. {_WAYS['plans']}"
        name = f"max-stored-{setting}"
        if kind == "agents" and not has_rows:
            name = "max-agents"
        whose = f"Token {grant.name}" if grant.name else "This service"
        raise ApiError(
            TOO_MUCH_STORED,
            f"{whose} has stored {what}; the limit is {most} (--{name}-per-token). {way}, or have the "
            f"operator raise the limit.",
        )

    async def stored(self, grant: Grant) -> Stored:
        """What a token has stored now."""
        theirs = SearchRow.created_by == grant.name
        imported: ColumnElement[bool] = PlanRow.created_by == grant.name
        # Plans of searches are nobody's, as are those that are imported without a token.
        of_searches: ColumnElement[bool] = false()
        if grant.name is not None:
            of_searches = PlanRow.plan_id.in_(select(SearchRow.plan_id).where(theirs))
        agents = AgentRow.owner == grant.owner
        is_child = (
            TokenRow.parent_id == grant.token_id if grant.token_id else TokenRow.local_id == grant.local_id
        )
        nodes = (AgentRow.devices, AgentRow.versions, AgentRow.allowed_models, AgentRow.allowed_scripts)
        runs = (RunRow.model, RunRow.script, RunRow.options, RunRow.search_options)
        counts = union_all(
            _count("searches", theirs, SearchRow.problem, SearchRow.incumbent, SearchRow.answer),
            _count("plans", imported, PlanRow.document),
            _count("plans of searches", of_searches, PlanRow.document),
            _count("runs", RunRow.created_by == grant.name, *runs),
            _count("all agents", agents, *nodes),
            _count("agents", agents & AgentRow.state.not_in(sorted(AGENT_ENDED))),
            _count("sessions", is_child & (TokenRow.kind != "token")),
        )
        rows: Sequence[Any] = await self._database.rows(select(counts.subquery()))
        return Stored(size=sum(int(row[2] or 0) for row in rows), rows={row[0]: row[1] for row in rows})


def _count(kind: str, where: ColumnElement[bool], *columns: Any) -> Select[str, int, int]:
    """The number of rows of a kind, and the bytes of these columns."""
    size: ColumnElement[int] = literal(0)
    for column in columns:  # databases know the length of a blob without reading it
        content = as_type(column, Text) if isinstance(column.type, JSON) else column
        size = size + func.coalesce(func.length(content), 0)
    return select(literal(kind).label("kind"), func.count(), func.sum(size)).where(where)


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
