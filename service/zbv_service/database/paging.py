"""Keyset pagination of lists that are sorted by creation, newest first.

A page starts after the last row of the previous page and not at an offset. So new rows neither repeat nor
hide others, and a late page costs as much as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Select, or_, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from zbv_service.database.models import AgentRow, PlanRow, RunRow, SearchRow
from zbv_service.records.agents import AgentDocument
from zbv_service.records.lists import Page, PageQuery, PlanListQuery, Position, SearchListQuery, TimedQuery
from zbv_service.records.runs import RunDocument
from zbv_service.records.searches import SearchRecord

MOST_CHARACTERS = 4 * 1024**2
"""About the most characters on a page. A page of larger rows has fewer of them, and the next one goes on."""
PORTION = 50
"""Rows that are read at a time."""


L = TypeVar("L", SearchRecord, RunDocument, AgentDocument)


def read_page(
    session: Session,
    query: Select[str],
    row: type[SearchRow | RunRow | AgentRow],
    wanted: PageQuery,
    after: Position | None,
    load: Callable[[Sequence[str]], Iterable[L]],
) -> Page[L]:
    """One page of rows that may be large; call it in a thread.

    Parameters
    ----------
    query
        For the ids of all rows of the list.
    load
        Reads the records of some ids, in any order.
    """
    limit = wanted.limit
    ids = list(session.scalars(page_after(query, row.created_at, row.id, limit, after)))
    found: list[L] = []
    characters = 0
    for begin in range(0, len(ids[:limit]), PORTION):
        portion = ids[begin : min(begin + PORTION, limit)]
        records = {record.id: record for record in load(portion)}
        for name in portion:
            characters += weight(records[name])
            if found and characters > MOST_CHARACTERS:
                return Page(tuple(found), _place(found[-1]))
            found.append(records[name])
    return Page(tuple(found), _place(found[-1]) if len(ids) > limit else None)


def _place(record: SearchRecord | RunDocument | AgentDocument) -> Position:
    return Position(record.created_at, record.id)


def weight(value: Any) -> int:
    """About how many characters a value has as JSON."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + weight(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return sum(map(weight, value))
    if isinstance(value, BaseModel) or is_dataclass(value):
        return weight(vars(value))
    return 8


def page_after(
    query: Select[Any],
    created_at: InstrumentedAttribute[datetime],
    key: InstrumentedAttribute[str],
    limit: int,
    after: Position | None,
) -> Select[Any]:
    """The query for one page and one more row, which tells whether another page exists."""
    if after is not None:
        query = query.where(tuple_(created_at, key) < tuple_(after.created_at, after.id))
    return query.order_by(created_at.desc(), key.desc()).limit(limit + 1)


def begins(
    text: str | None, *ids: InstrumentedAttribute[Any], parts_of: Iterable[Any] = ()
) -> list[ColumnElement[bool]]:
    """The condition that one of these ids begins with a text, or that a column of ``parts_of`` contains it.

    There is no condition without a text.
    """
    if not text:
        return []
    starts = (column.startswith(text.lower(), autoescape=True) for column in ids)
    return [or_(*starts, *(column.icontains(text, autoescape=True) for column in parts_of))]


def created_between(
    wanted: TimedQuery, row: type[PlanRow] | type[SearchRow] | type[RunRow]
) -> list[ColumnElement[bool]]:
    """The conditions of a filter on the time of creation."""
    found: list[ColumnElement[bool]] = []
    if wanted.created_after is not None:
        found.append(row.created_at > wanted.created_after)
    if wanted.created_before is not None:
        found.append(row.created_at < wanted.created_before)
    return found


def of_shape(
    wanted: SearchListQuery | PlanListQuery,
    row: type[PlanRow] | type[SearchRow],
    objective: InstrumentedAttribute[Any],
) -> list[ColumnElement[bool]]:
    """The conditions of a filter on the problem of a plan or search, and on the time of its creation."""
    equal: tuple[tuple[InstrumentedAttribute[Any], Any], ...] = (
        (row.pp_degree, wanted.pp_degree),
        (row.microbatches, wanted.microbatches),
        (row.placement, wanted.placement),
        (objective, wanted.objective),
    )
    found = [column == value for column, value in equal if value is not None]
    return found + created_between(wanted, row)
