"""Reading and writing searches.

A running search is leased: it has an owner, a time at which the lease ends unless renewed, and a fence
that grows with every claim. Whoever runs it writes only while its fence is the current one, so an owner
that was presumed dead and is not can do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import CursorResult, and_, func, select, update
from sqlalchemy import Update as UpdateStatement
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.engine import Database
from zbv_service.database.models import SearchRow
from zbv_service.database.plans import insert_plan
from zbv_service.records import Claim, NewPlan, NewSearch, SearchRecord, SearchState, Update


class SearchTable:
    """The searches of one database."""

    def __init__(self, database: Database):
        self._database = database

    async def add(self, new: NewSearch) -> tuple[SearchRecord, bool]:
        """Queue a search, or find the one that asks the same; and whether it was added."""
        for _ in range(3):
            existing = await self.by_request_key(new.request_key)
            if existing is not None:
                return existing, False
            row = _new_row(new)
            try:
                async with self._database.writing() as session:
                    session.add(row)
            except IntegrityError:
                continue  # somebody else added it between the look and the insert
            return _record(row), True
        raise RuntimeError(f"search {new.request_key} is added and given up faster than it can be read.")

    async def get(self, search_id: str) -> SearchRecord | None:
        """A search by id."""
        async with self._database.reading() as session:
            row = await session.get(SearchRow, search_id)
            return None if row is None else _record(row)

    async def problem(self, search_id: str) -> bytes | None:
        """The packed problem document of a search."""
        async with self._database.reading() as session:
            return await session.scalar(select(SearchRow.problem).where(SearchRow.id == search_id))

    async def by_request_key(self, request_key: str) -> SearchRecord | None:
        """The live or answered search of a request."""
        async with self._database.reading() as session:
            row = await session.scalar(select(SearchRow).where(SearchRow.request_key == request_key))
            return None if row is None else _record(row)

    async def newest(self, limit: int) -> list[SearchRecord]:
        """The newest searches first."""
        query = select(SearchRow).order_by(SearchRow.created_at.desc(), SearchRow.id.desc()).limit(limit)
        async with self._database.reading() as session:
            return [_record(row) for row in await session.scalars(query)]

    async def request_cancel(self, search_id: str) -> SearchRecord | None:
        """Cancel a search that nobody runs and that found nothing; mark any other unfinished one.

        A queued search with an incumbent stays queued: it is claimed once more to make a plan of it.
        """
        now = datetime.now(UTC)
        unfinished = and_(SearchRow.id == search_id, SearchRow.state.in_(["queued", "running"]))
        untouched = and_(SearchRow.state == "queued", SearchRow.incumbent.is_(None))
        async with self._database.writing() as session:
            await session.execute(
                update(SearchRow)
                .where(unfinished)
                .values(cancel_requested=True, request_key=None, updated_at=now)
            )
            await session.execute(
                update(SearchRow).where(unfinished, untouched).values(state="cancelled", finished_at=now)
            )
        return await self.get(search_id)

    async def claim(self, owner: str, lease_seconds: float) -> Claim | None:
        """Lease the oldest queued search, if there is one."""
        now = datetime.now(UTC)
        queued = select(SearchRow.id).where(SearchRow.state == "queued").limit(1)
        oldest = queued.order_by(SearchRow.created_at, SearchRow.id).with_for_update(skip_locked=True)
        async with self._database.reading() as session:
            # A look costs readers nothing; only a queue with something in it is worth a write lock.
            if await session.scalar(queued) is None:
                return None
        async with self._database.writing() as session:
            search_id = await session.scalar(oldest)
            if search_id is None:
                return None
            await session.execute(
                update(SearchRow)
                .where(SearchRow.id == search_id)
                .values(
                    state="running",
                    lease_owner=owner,
                    leased_until=now + timedelta(seconds=lease_seconds),
                    fence=SearchRow.fence + 1,
                    attempts=SearchRow.attempts + 1,
                    started_at=func.coalesce(SearchRow.started_at, now),
                    updated_at=now,
                )
            )
            columns = [getattr(SearchRow, field.name) for field in fields(Claim)]
            found = (await session.execute(select(*columns).where(SearchRow.id == search_id))).one()
            return Claim(*found)

    async def renew(
        self, owner: str, fences: Mapping[str, int], lease_seconds: float
    ) -> tuple[set[str], set[str]]:
        """Renew leases; returns the ids that are still the owner's, and those of them to be cancelled."""
        kept: set[str] = set()
        cancelled: set[str] = set()
        until = datetime.now(UTC) + timedelta(seconds=lease_seconds)
        async with self._database.writing() as session:
            for search_id, fence in fences.items():
                held = _held(search_id, fence)
                if await _count(
                    session, held.where(SearchRow.lease_owner == owner).values(leased_until=until)
                ):
                    kept.add(search_id)
            query = select(SearchRow.id).where(SearchRow.id.in_(kept), SearchRow.cancel_requested)
            cancelled.update(await session.scalars(query))
        return kept, cancelled

    async def requeue_expired(self) -> int:
        """Queue every running search whose lease has ended."""
        now = datetime.now(UTC)
        async with self._database.writing() as session:
            return await _count(
                session,
                _requeue().where(SearchRow.state == "running", SearchRow.leased_until < now),
            )

    async def requeue_of(self, owners: Collection[str]) -> int:
        """Queue every running search of owners that are known to be dead."""
        async with self._database.writing() as session:
            return await _count(
                session,
                _requeue().where(SearchRow.state == "running", SearchRow.lease_owner.in_(owners)),
            )

    async def owners(self) -> set[str]:
        """Owners of running searches."""
        query = select(SearchRow.lease_owner).where(SearchRow.state == "running").distinct()
        async with self._database.reading() as session:
            return {owner for owner in await session.scalars(query) if owner is not None}

    async def progressed(self, search_id: str, fence: int, found: Update) -> bool:
        """Store a better plan or bound; False when the search is no longer the caller's."""
        async with self._database.writing() as session:
            statement = _held(search_id, fence).values(**_columns(found), updated_at=datetime.now(UTC))
            return bool(await _count(session, statement))

    async def release(self, search_id: str, fence: int, found: Update | None) -> bool:
        """Queue a search again, with what it has found, for somebody else to finish."""
        values = {} if found is None else _columns(found)
        return await self._fenced(search_id, fence, **values, **_UNLEASED, state="queued")

    async def crashed(self, search_id: str, fence: int, max_crashes: int, error: Mapping[str, Any]) -> bool:
        """Queue a search again whose process died; fail it with ``error`` when that was once too often."""
        now = datetime.now(UTC)
        async with self._database.writing() as session:
            counted = await _count(
                session, _held(search_id, fence).values(crashes=SearchRow.crashes + 1, updated_at=now)
            )
            crashes = await session.scalar(select(SearchRow.crashes).where(SearchRow.id == search_id)) or 0
            values: dict[str, Any] = {"state": "queued", **_UNLEASED}
            if crashes >= max_crashes:
                values |= {"state": "failed", "error": dict(error), "request_key": None, "finished_at": now}
            await session.execute(_held(search_id, fence).values(**values))
            return bool(counted)

    async def finished(self, search_id: str, fence: int, plan: NewPlan) -> bool:
        """Store a search's plan; the search is done, or cancelled when that was asked for before."""
        async with self._database.writing() as session:
            await insert_plan(session, plan)
            now = datetime.now(UTC)
            summary = plan.summary
            cancelled = await session.scalar(
                select(SearchRow.cancel_requested).where(SearchRow.id == search_id)
            )
            statement = _held(search_id, fence).values(
                state="cancelled" if cancelled else "done",
                objective=summary.value,
                lower_bound=summary.lower_bound,
                gap=summary.gap,
                method=summary.method,
                plan_id=summary.plan_id,
                incumbent=None,
                updated_at=now,
                finished_at=now,
                **_UNLEASED,
            )
            return bool(await _count(session, statement))

    async def ended(self, search_id: str, fence: int, state: SearchState, error: Mapping[str, Any]) -> bool:
        """End a search without a plan. A failed one gives up its request key; infeasible is an answer."""
        now = datetime.now(UTC)
        values: dict[str, Any] = {"state": state, "error": dict(error), "finished_at": now, "updated_at": now}
        if state != "infeasible":
            values["request_key"] = None
        return await self._fenced(search_id, fence, **values, **_UNLEASED)

    async def _fenced(self, search_id: str, fence: int, **values: Any) -> bool:
        async with self._database.writing() as session:
            return bool(await _count(session, _held(search_id, fence).values(**values)))


_UNLEASED: dict[str, Any] = {"lease_owner": None, "leased_until": None}


def _held(search_id: str, fence: int) -> UpdateStatement:
    return update(SearchRow).where(
        SearchRow.id == search_id, SearchRow.fence == fence, SearchRow.state == "running"
    )


def _requeue() -> UpdateStatement:
    return update(SearchRow).values(state="queued", updated_at=datetime.now(UTC), **_UNLEASED)


def _columns(found: Update) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


def _new_row(new: NewSearch) -> SearchRow:
    return SearchRow(
        **{field.name: getattr(new, field.name) for field in fields(new)},
        state="queued",
        cancel_requested=False,
        attempts=0,
        crashes=0,
        fence=0,
        updated_at=new.created_at,
    )


def _record(row: SearchRow) -> SearchRecord:
    return SearchRecord(**{field.name: getattr(row, field.name) for field in fields(SearchRecord)})


async def _count(session: AsyncSession, statement: UpdateStatement) -> int:
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount
