"""Lists by pages: sorted by creation, the newest first, gone through by key.

A page begins after the last row of the one before, never at a count of rows, so that rows which come in
meanwhile neither repeat nor hide one, and a late page costs no more than the first.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from zbv_service.records import Position, Shape


def page_after(
    query: Select[Any],
    created_at: InstrumentedAttribute[datetime],
    key: InstrumentedAttribute[str],
    limit: int,
    after: Position | None,
) -> Select[Any]:
    """The query for one page, and one row more: whether there is a next page."""
    if after is not None:
        query = query.where(tuple_(created_at, key) < tuple_(after.created_at, after.id))
    return query.order_by(created_at.desc(), key.desc()).limit(limit + 1)


def of_shape(
    shape: Shape,
    *,
    pp_degree: InstrumentedAttribute[int],
    microbatches: InstrumentedAttribute[int],
    placement: InstrumentedAttribute[str],
    objective: InstrumentedAttribute[str],
    created_at: InstrumentedAttribute[datetime],
) -> list[ColumnElement[bool]]:
    """The conditions of a filter, on the columns that it is about."""
    found: list[ColumnElement[bool]] = []
    if shape.pp_degree is not None:
        found.append(pp_degree == shape.pp_degree)
    if shape.microbatches is not None:
        found.append(microbatches == shape.microbatches)
    if shape.placement is not None:
        found.append(placement == shape.placement)
    if shape.objective is not None:
        found.append(objective == shape.objective)
    if shape.created_after is not None:
        found.append(created_at > shape.created_after)
    if shape.created_before is not None:
        found.append(created_at < shape.created_before)
    return found
