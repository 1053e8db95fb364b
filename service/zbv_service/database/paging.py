"""Keyset pagination of lists that are sorted by creation, newest first.

A page starts after the last row of the previous page and not at an offset. So new rows neither repeat nor
hide others, and a late page costs as much as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, or_, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from zbv_service.database.models import PlanRow, SearchRow
from zbv_service.database.run_models import RunRow
from zbv_service.records.runs import RunFilter
from zbv_service.records.searches import Page, Position, Shape

T = TypeVar("T")


def page_after(
    query: Select[Any],
    created_at: InstrumentedAttribute[datetime],
    key: InstrumentedAttribute[str],
    limit: int,
    after: Position | None,
) -> Select[Any]:
    """The query for one page and one more row, which tells whether another page exists; nearest first."""
    if after is not None:
        here, there = tuple_(created_at, key), tuple_(after.created_at, after.id)
        query = query.where(here > there if after.is_newer else here < there)
        if after.is_newer:
            return query.order_by(created_at, key).limit(limit + 1)
    return query.order_by(created_at.desc(), key.desc()).limit(limit + 1)


def page_of(
    found: Sequence[T], limit: int, after: Position | None, place: Callable[[T], tuple[datetime, str]]
) -> Page[T]:
    """The page made of the rows of :func:`page_after`; ``place`` returns a row's moment and key."""
    is_newer = after is not None and after.is_newer
    items = found[:limit][::-1] if is_newer else found[:limit]
    if not items:
        return Page((), None)
    has_more, has_before = len(found) > limit, after is not None
    return Page(
        tuple(items),
        next=Position(*place(items[-1])) if has_more or is_newer else None,
        previous=Position(*place(items[0]), True) if (has_more if is_newer else has_before) else None,
    )


def begins(text: str | None, *columns: InstrumentedAttribute[Any]) -> list[ColumnElement[bool]]:
    """The condition that one of these ids begins with a text; no condition without a text."""
    if not text:
        return []
    return [or_(*(column.startswith(text.lower(), autoescape=True) for column in columns))]


def created_between(
    wanted: Shape | RunFilter, row: type[PlanRow] | type[SearchRow] | type[RunRow]
) -> list[ColumnElement[bool]]:
    """The conditions of a filter on the time of creation."""
    found: list[ColumnElement[bool]] = []
    if wanted.created_after is not None:
        found.append(row.created_at > wanted.created_after)
    if wanted.created_before is not None:
        found.append(row.created_at < wanted.created_before)
    return found


def of_shape(
    wanted: Shape, row: type[PlanRow] | type[SearchRow], objective: InstrumentedAttribute[Any]
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
