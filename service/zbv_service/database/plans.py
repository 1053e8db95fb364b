"""Reading and writing plans. A plan never changes: its id is the hash of what it says."""

from __future__ import annotations

from dataclasses import asdict, fields

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.engine import Database
from zbv_service.database.models import PlanRow
from zbv_service.records import NewPlan, PlanSummary


class PlanTable:
    """The plans of one database."""

    def __init__(self, database: Database):
        self._database = database

    async def add(self, plan: NewPlan) -> bool:
        """Store a plan; False when it was there already."""
        async with self._database.writing() as session:
            return await insert_plan(session, plan)

    async def document(self, plan_id: str) -> bytes | None:
        """A plan's whole document, packed."""
        query = select(PlanRow.document).where(PlanRow.plan_id == plan_id)
        async with self._database.reading() as session:
            return await session.scalar(query)

    async def pp_degree(self, plan_id: str) -> int | None:
        """How many ranks a plan has."""
        query = select(PlanRow.pp_degree).where(PlanRow.plan_id == plan_id)
        async with self._database.reading() as session:
            return await session.scalar(query)

    async def newest(self, limit: int) -> list[PlanSummary]:
        """The newest plans first."""
        columns = [getattr(PlanRow, field.name) for field in fields(PlanSummary)]
        query = select(*columns).order_by(PlanRow.created_at.desc(), PlanRow.plan_id.desc()).limit(limit)
        async with self._database.reading() as session:
            return [PlanSummary(*row) for row in await session.execute(query)]


async def insert_plan(session: AsyncSession, plan: NewPlan) -> bool:
    """Store a plan in an open transaction; False when it was there already."""
    try:
        async with session.begin_nested():
            session.add(PlanRow(**asdict(plan.summary), document=plan.document))
    except IntegrityError:
        if await session.get(PlanRow, plan.summary.plan_id) is None:
            raise
        return False
    return True
