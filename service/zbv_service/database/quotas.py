"""Counts what a token has stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, cast, false, func, literal, select

from zbv_service.database.engine import BaseTable
from zbv_service.database.models import AgentRow, PlanRow, RunRow, SearchRow, TokenRow
from zbv_service.records.agents import AGENT_ENDED


@dataclass(frozen=True)
class Owner:
    """A token, by the values under which tables name it."""

    name: str | None
    """Its name; None if the service requires no token."""
    token: str
    """The owner of its agents; see :attr:`zbv_service.security.grants.Grant.owner`."""
    token_id: str | None
    local_id: str | None
    """The parent of its sessions."""


@dataclass
class Stored:
    """What a token has stored: the bytes of its searches with their plans, of its imported plans, runs and
    agents; and the number of rows by kind."""

    size: int
    rows: dict[str, int]


class QuotaTable(BaseTable):
    """What the tokens of one database have stored."""

    async def stored(self, owner: Owner) -> Stored:
        """What a token has stored now."""
        theirs = _is(SearchRow.created_by, owner.name)
        imported: ColumnElement[bool]
        found: ColumnElement[bool]
        if owner.name is None:  # plans of searches are nobody's, too
            imported, found = PlanRow.created_by.is_(None), false()
        else:
            imported = PlanRow.created_by == owner.name
            found = PlanRow.plan_id.in_(select(SearchRow.plan_id).where(theirs))
        agents = AgentRow.owner == owner.token
        is_child = (
            TokenRow.parent_id == owner.token_id if owner.token_id else TokenRow.local_id == owner.local_id
        )
        searches = (SearchRow.problem, SearchRow.incumbent, SearchRow.answer)
        runs = (RunRow.model, RunRow.script, RunRow.options, RunRow.search_options)
        said = (AgentRow.devices, AgentRow.versions, AgentRow.allowed_models, AgentRow.allowed_scripts)
        counts: dict[str, Select[Any]] = {
            "searches": _counted(theirs, _bytes(*searches)),
            "plans": _counted(imported, _bytes(PlanRow.document)),
            "plans of searches": _counted(found, _bytes(PlanRow.document)),
            "runs": _counted(
                _is(RunRow.created_by, owner.name), _bytes(*(cast(each, Text) for each in runs))
            ),
            "all agents": _counted(agents, _bytes(*(cast(each, Text) for each in said))),
            "agents": _counted(agents & AgentRow.state.not_in(sorted(AGENT_ENDED))),
            "sessions": _counted(is_child & (TokenRow.kind != "token")),
        }
        stored = Stored(0, {})
        async with self._database.reading() as session:
            for kind, query in counts.items():
                count, size = (await session.execute(query)).one()
                stored.rows[kind] = count
                stored.size += int(size or 0)
        return stored


def _bytes(*columns: Any) -> ColumnElement[int]:
    """The bytes of a row's columns; databases know the length of a blob without reading it."""
    size: ColumnElement[int] = func.coalesce(func.length(columns[0]), 0)
    for column in columns[1:]:
        size = size + func.coalesce(func.length(column), 0)
    return size


def _is(column: Any, name: str | None) -> ColumnElement[bool]:
    found: ColumnElement[bool] = column.is_(None) if name is None else column == name
    return found


def _counted(where: ColumnElement[bool], size: ColumnElement[int] | None = None) -> Select[Any]:
    total: Any = func.sum(literal(0) if size is None else size)
    return select(func.count(), total).where(where)
