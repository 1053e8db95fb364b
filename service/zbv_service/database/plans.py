"""Reads and writes plans. A plan never changes: its id is the hash of its content."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.engine import BaseTable, columns_of
from zbv_service.database.models import PlanRow, SearchRow
from zbv_service.database.paging import begins, of_shape, page_after
from zbv_service.records.lists import Page, PlanListQuery, Position
from zbv_service.records.plans import NewPlan, PlanSummaryDocument


class PlanTable(BaseTable):
    """The plans of one database."""

    async def add(self, plan: NewPlan, created_by: str | None = None) -> bool:
        """Store an imported plan; returns False if it was already stored."""
        async with self._database.writing() as session:
            return await insert_plan(session, plan, await self._database.now(session), created_by)

    async def document(self, plan_id: str) -> bytes | None:
        """The whole document of a plan, packed."""
        found = await self._database.rows(select(PlanRow.document).where(PlanRow.plan_id == plan_id))
        return found[0].document if found else None

    async def pp_degree(self, plan_id: str) -> int | None:
        """The number of ranks of a plan."""
        found = await self._database.rows(select(PlanRow.pp_degree).where(PlanRow.plan_id == plan_id))
        return found[0].pp_degree if found else None

    async def summary(self, plan_id: str) -> PlanSummaryDocument | None:
        """A plan without its actions."""
        found = await self._database.rows(select(*_SUMMARY).where(PlanRow.plan_id == plan_id))
        return PlanSummaryDocument(**found[0]._mapping) if found else None

    async def newest(self, limit: int) -> list[PlanSummaryDocument]:
        """The newest plans, newest first."""
        return list((await self.page(PlanListQuery(limit=limit))).items)

    async def page(self, wanted: PlanListQuery, after: Position | None = None) -> Page[PlanSummaryDocument]:
        """One page of plans, newest first, starting at a position."""
        conditions = of_shape(wanted, PlanRow, PlanRow.objective)
        if wanted.status is not None:
            conditions.append(PlanRow.status == wanted.status)
        conditions += begins(wanted.q, PlanRow.plan_id, parts_of=(_NAME,))
        query = page_after(
            select(*_SUMMARY).where(*conditions), PlanRow.created_at, PlanRow.plan_id, wanted.limit, after
        )
        found = [PlanSummaryDocument(**row._mapping) for row in await self._database.rows(query)]
        items = tuple(found[: wanted.limit])
        last = items[-1] if len(found) > wanted.limit else None
        return Page(items, None if last is None else Position(last.created_at, last.plan_id))

    async def best(self, problem_key: str) -> PlanSummaryDocument | None:
        """The best plan of a problem; ties go to the oldest."""
        return (await self.best_of([problem_key])).get(problem_key)

    async def best_of(self, problem_keys: Collection[str]) -> dict[str, PlanSummaryDocument]:
        """The best plan of each of these problems, by problem key; problems without a plan are left out."""
        order = (PlanRow.value, PlanRow.created_at)
        place = func.row_number().over(partition_by=PlanRow.problem_key, order_by=order)
        ranked = select(PlanRow.plan_id, place.label("place")).where(PlanRow.problem_key.in_(problem_keys))
        found = ranked.subquery()
        query = select(PlanRow.problem_key, *_SUMMARY).join(found, PlanRow.plan_id == found.c.plan_id)
        rows = await self._database.rows(query.where(found.c.place == 1))
        return {row.problem_key: PlanSummaryDocument(**row._mapping) for row in rows}


_named = SearchRow.plan_id == PlanRow.plan_id, SearchRow.name.is_not(None)
_NAME = (
    select(SearchRow.name)
    .where(*_named)
    .order_by(SearchRow.created_at.desc())
    .limit(1)
    .correlate(PlanRow)
    .scalar_subquery()
)
_SUMMARY = (*columns_of(PlanSummaryDocument, PlanRow), _NAME.label("name"))


async def insert_plan(
    session: AsyncSession, plan: NewPlan, now: datetime, created_by: str | None = None
) -> bool:
    """Store a plan in an open transaction; False if it was already stored, which counts as a use."""
    try:
        async with session.begin_nested():
            row = PlanRow(
                **plan.summary.model_dump(exclude={"name"}),
                document=plan.document,
                problem_key=plan.problem_key,
                created_by=created_by,
            )
            session.add(row)
    except IntegrityError:
        known = await session.get(PlanRow, plan.summary.plan_id, with_for_update=True)
        if known is None:
            raise
        known.used_at = now
        return False
    return True
