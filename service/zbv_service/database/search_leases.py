"""Searches from the runner's side: leased, followed and ended.

A running search has a lease: an owner, a time at which it expires unless renewed, and a fence that grows
with every claim. A runner can write only with the current fence, so an owner that was wrongly presumed dead
does no harm. Every change locks the search's row and adds an event. Times come from the database's clock, so
services do not depend on each other's clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import undefer
from zbv_solver.errors import ContradictedBound
from zbv_solver.plans.plan import gap_of

from zbv_service.database.engine import BaseTable, Database, columns_of
from zbv_service.database.events import add_event, times_since_found
from zbv_service.database.models import SearchPlanRow, SearchRow
from zbv_service.database.plans import insert_plan
from zbv_service.documents.problems import finite_or_none, supported_bound, unpack
from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Claim, Outcome, SearchState, Update

_CLAIM = columns_of(Claim, SearchRow)
_CALLER = func.coalesce(SearchRow.created_by, "")
"""Who submitted a search; all without a token count as one caller."""
_CLAIM_LOCK = 7_321_009
"""The advisory lock of claims that count running searches on PostgreSQL; the number is arbitrary."""


class SearchLeases(BaseTable):
    """The searches of one database, for runners.

    Parameters
    ----------
    changed
        Called with the id of each search that this object has changed.
    """

    def __init__(self, database: Database, changed: Callable[[str], None] = lambda _: None):
        super().__init__(database)
        self._changed = changed

    async def claim(
        self,
        owner: str,
        lease_seconds: float,
        *,
        cancelled_only: bool = False,
        share: int | None = None,
        full: Collection[str | None] = (),
        most: int | None = None,
    ) -> Claim | None:
        """Lease the queued search with the earliest turn, None if the queue is empty.

        Parameters
        ----------
        cancelled_only
            Only lease a cancelled search with an incumbent; making its plan is quick.
        share
            A caller with this many running searches, in all services, waits while others have queued ones.
        full
            Callers that wait even so, because a slot is kept for others.
        most
            A caller with this many running searches, in all services, also does.
        """
        queued = select(SearchRow).where(SearchRow.state == "queued")
        if cancelled_only:
            queued = queued.where(SearchRow.cancel_requested)
        if full:
            queued = queued.where(_CALLER.not_in([caller or "" for caller in full]))
        # Reading blocks nobody, so the write lock is taken only if the queue is not empty.
        if not await self._database.rows(queued.with_only_columns(SearchRow.id).limit(1)):
            return None
        first = queued.order_by(SearchRow.turn, SearchRow.created_at, SearchRow.id).limit(1)
        first = first.options(*map(undefer, (SearchRow.problem, SearchRow.incumbent, SearchRow.jitter)))
        first = first.with_for_update(skip_locked=True)
        async with self._database.writing() as session:
            if most is not None:
                await _alone(session)
                first = first.where(_of_callers_below(most))
            row = None if share is None else await session.scalar(first.where(_of_callers_below(share)))
            row = row or await session.scalar(first)
            if row is None:
                return None
            now = await self._database.now(session)  # the lease begins once the lock is held
            row.state = "running"
            row.lease_owner, row.leased_until = owner, now + timedelta(seconds=lease_seconds)
            row.fence += 1
            row.attempts += 1
            row.started_at = row.started_at or now
            row.updated_at = now
            await add_event(session, row, now, "state", "started")
            claim = Claim(**{column.key: getattr(row, column.key) for column in _CLAIM})
        self._changed(claim.id)
        return claim

    async def renew(self, owner: str, fences: Mapping[str, int], lease_seconds: float) -> set[str]:
        """Renew leases; returns the ids of the searches that the owner still holds."""
        if not fences:
            return set()
        async with self._database.writing() as session:
            query = select(SearchRow).where(SearchRow.id.in_(fences), SearchRow.state == "running")
            held = await session.scalars(query.where(SearchRow.lease_owner == owner).with_for_update())
            kept = [row for row in held if row.fence == fences[row.id]]
            until = await self._database.now(session) + timedelta(seconds=lease_seconds)
            for row in kept:
                row.leased_until = until
            return {row.id for row in kept}

    async def unwanted(self, fences: Mapping[str, int]) -> set[str]:
        """Which of these running searches should stop: they were cancelled, discarded or lost."""
        if not fences:
            return set()
        query = select(SearchRow.id, SearchRow.fence).where(SearchRow.id.in_(fences))
        query = query.where(SearchRow.state == "running", SearchRow.cancel_requested.is_(False))
        found = await self._database.rows(query)
        return set(fences) - {search_id for search_id, fence in found if fence == fences[search_id]}

    async def requeue_lost(self, owners: Collection[str] | None = None) -> int:
        """Requeue the running searches with an expired lease, or of dead owners; returns their number."""
        is_lost = SearchRow.leased_until < self._database.clock
        if owners is not None:
            is_lost = SearchRow.lease_owner.in_(owners)
        condition = (SearchRow.state == "running", is_lost)
        if not await self._database.rows(select(SearchRow.id).where(*condition).limit(1)):
            return 0
        async with self._database.writing() as session:
            query = select(SearchRow).where(*condition).with_for_update(skip_locked=True)
            rows, now = list(await session.scalars(query)), await self._database.now(session)
            for row in rows:
                row.updated_at = now
                await _queue(session, row, now, "service-lost")
        for row in rows:
            self._changed(row.id)
        return len(rows)

    async def owners(self) -> set[str]:
        """The owners of running searches."""
        query = select(SearchRow.lease_owner).where(SearchRow.state == "running").distinct()
        return {owner for (owner,) in await self._database.rows(query) if owner is not None}

    async def progressed(self, search_id: str, fence: int, found: Update) -> bool:
        """Store a better plan or bound; False if the caller no longer holds the search.

        Stored results never get worse: an attempt that starts behind an earlier one changes nothing until it
        is ahead. Only an incumbent that does not fit its problem is removed.

        Raises
        ------
        ContradictedBound
            A plan undercuts a bound of this attempt or an earlier one. Nothing was stored.
        """
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            await _absorb(*held, found)
        return True

    async def requeue(
        self,
        search_id: str,
        fence: int,
        found: Update | None,
        reason: str = "service-stopped",
        most: int | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> bool:
        """Requeue a search with its incumbent, for another runner to finish.

        Parameters
        ----------
        most, error
            Fail the search with this error after so many times. ``process-died`` counts every time, any other
            reason the times since the search's last progress.
        """
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            session, row, now = held
            if found is not None:
                await _absorb(session, row, now, found)
            if error is not None and most is not None and await _times(session, row, reason) >= most:
                await _fail(session, row, now, error)
            else:
                await _queue(session, row, now, reason)
        return True

    async def finished(
        self, search_id: str, fence: int, found: Outcome, without_plan: Mapping[str, Any] | None = None
    ) -> bool:
        """Store a search's plans and end the search: as done, or as cancelled if that was requested.

        Plans, end and event are one transaction: either all of them are stored, or the search runs again.

        Parameters
        ----------
        without_plan
            Fail a search that has no plan with this error, unless it was cancelled.

        Raises
        ------
        ContradictedBound
            As in :meth:`progressed`.
        """
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            session, row, now = held
            if found.refusal is not None:
                await _forget_refused(session, row, found.refusal)
            before = row.objective
            if found.objective is not None:
                row.objective = found.objective
            await _set_bound(session, row, found.lower_bound)
            plans = {plan.summary.plan_id: plan for plan in found.plans}
            for plan_id in sorted(plans):  # in this order everywhere, so that no two wait for each other
                await insert_plan(session, plans[plan_id], now)
                if found.answer is not None:
                    session.add(SearchPlanRow(search_id=row.id, plan_id=plan_id))
            row.answer, row.progress = found.answer, found.progress
            if found.plans:
                best = found.plans[0].summary
                row.plan_id, row.method, row.incumbent = best.plan_id, best.method, None
            if found.objective is not None and (before is None or found.objective < before):
                await add_event(session, row, now, "improvement")
            if without_plan is not None and not found.plans and not row.cancel_requested:
                await _fail(session, row, now, without_plan)
            else:
                await _end(session, row, now, "cancelled" if row.cancel_requested else "done")
        return True

    async def ended(self, search_id: str, fence: int, state: SearchState, error: Mapping[str, Any]) -> bool:
        """End a search without a plan. A failed one gives up its request key, an infeasible one keeps it."""
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            session, row, now = held
            if state == "failed":
                await _fail(session, row, now, error)
            else:
                row.error = dict(error)
                _forget_progress(row)
                await _end(session, row, now, state)
        return True

    async def killed(self, search_id: str, fence: int, error: Mapping[str, Any]) -> bool:
        """End a search whose process was ended, without a plan: as cancelled if that was requested."""
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            session, row, now = held
            _forget_progress(row)
            if row.cancel_requested:
                await _end(session, row, now, "cancelled")
            else:
                await _fail(session, row, now, error)
        return True

    async def contradicted(self, search_id: str, fence: int, error: Mapping[str, Any]) -> bool:
        """Fail a search in which a plan undercut a bound, and remove its results, one of which is wrong.

        The problem stays, as evidence.
        """
        async with self._held(search_id, fence) as held:
            if held is None:
                return False
            session, row, now = held
            _forget_found(row)
            await _fail(session, row, now, error)
        return True

    @asynccontextmanager
    async def _held(self, search_id: str, fence: int) -> AsyncIterator[_Held | None]:
        """Within the block, change a locked search; None if the caller no longer holds it."""
        running = select(SearchRow).where(SearchRow.id == search_id, SearchRow.state == "running")
        async with self._database.writing() as session:
            row = await session.scalar(running.where(SearchRow.fence == fence).with_for_update())
            if row is None:
                yield None
                return
            now = await self._database.now(session)
            row.updated_at = now
            yield session, row, now
        self._changed(search_id)


_Held = tuple[AsyncSession, SearchRow, datetime]
"""A transaction, a search that it has locked, and the time."""


async def _absorb(session: AsyncSession, row: SearchRow, now: datetime, found: Update) -> None:
    """Store the parts of an update that are better than the stored ones."""
    if found.refusal is not None:
        await _forget_refused(session, row, found.refusal)
    before, known = row.objective, row.lower_bound
    if found.objective is not None and (before is None or found.objective < before):
        row.objective, row.method, row.incumbent = found.objective, found.method, found.incumbent
    await _set_bound(session, row, found.lower_bound)
    row.progress = found.progress
    if row.objective != before:
        await add_event(session, row, now, "improvement")
    elif found.progress is not None:
        await add_event(session, row, now, "progress")
    elif row.lower_bound != known:
        await add_event(session, row, now, "bound")


async def _set_bound(session: AsyncSession, row: SearchRow, bound: float) -> None:
    """Store the larger of a new bound and the stored one, with the gap; raises :class:`ContradictedBound`."""
    source = "this attempt's bound"
    if row.objective is None:
        row.lower_bound = bound
        return
    if row.lower_bound is not None and row.lower_bound > bound:
        bound, source = row.lower_bound, "the bound of an earlier report"
    try:
        row.lower_bound = supported_bound(row.objective, bound, source)
    except ContradictedBound as error:
        packed = (await session.execute(select(SearchRow.problem).where(SearchRow.id == row.id))).scalar_one()
        raise ContradictedBound(unpack(packed), error.objective, error.bound, source) from None
    row.gap = finite_or_none(gap_of(row.objective, row.lower_bound))


async def _forget_refused(session: AsyncSession, row: SearchRow, refusal: Refusal) -> None:
    """Remove a stored incumbent that an attempt refused, with its objective and bound."""
    stored = await session.scalar(select(SearchRow.incumbent).where(SearchRow.id == row.id))
    if stored is not None and hashlib.sha256(stored).hexdigest() == refusal.digest:
        _forget_found(row)


def _forget_progress(row: SearchRow) -> None:
    """Remove what a search has found that cannot continue from an incumbent, as its end does not keep it."""
    if row.progress is not None:
        _forget_found(row)


def _forget_found(row: SearchRow) -> None:
    row.objective = row.lower_bound = row.gap = row.method = row.incumbent = row.progress = None


async def _alone(session: AsyncSession) -> None:
    """Until the transaction ends, no other one passes here, so that none counts too few running searches."""
    if session.get_bind().dialect.name == "postgresql":  # SQLite has one writer at a time
        await session.execute(select(func.pg_advisory_xact_lock(_CLAIM_LOCK)))


def _of_callers_below(most: int) -> ColumnElement[bool]:
    """Searches of callers with fewer running searches than this."""
    running = select(_CALLER).where(SearchRow.state == "running").group_by(_CALLER)
    return _CALLER.not_in(running.having(func.count() >= most))


async def _times(session: AsyncSession, row: SearchRow, reason: str) -> int:
    """How often a search is queued for this reason, this time included."""
    if reason == "process-died":
        row.crashes += 1
        return row.crashes
    return 1 + await times_since_found(session, row, reason)


async def _queue(session: AsyncSession, row: SearchRow, now: datetime, reason: str) -> None:
    row.state, row.lease_owner, row.leased_until = "queued", None, None
    _forget_progress(row)  # it starts again, perhaps with another version's estimates
    await add_event(session, row, now, "state", reason)


async def _fail(session: AsyncSession, row: SearchRow, now: datetime, error: Mapping[str, Any]) -> None:
    """Fail a search; from now on the same request starts a new search."""
    row.error, row.request_key = dict(error), None
    await _end(session, row, now, "failed")


async def _end(session: AsyncSession, row: SearchRow, now: datetime, state: SearchState) -> None:
    row.state, row.finished_at, row.lease_owner, row.leased_until = state, now, None, None
    await add_event(session, row, now, "end")
