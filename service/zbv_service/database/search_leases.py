"""Searches as those who run them see them: leased, followed and ended.

A running search is leased: it has an owner, a time at which the lease ends unless renewed, and a fence
that grows with every claim. Whoever runs it writes only while its fence is the current one, so an owner
that was presumed dead and is not can do no harm. Every change locks the search's row first, and tells of
itself in an event. Times are those of the database's clock: no service depends on another one's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import undefer
from zbv_solver.plans.certificate import gap_of

from zbv_service.database.engine import Database
from zbv_service.database.models import SearchRow
from zbv_service.database.plans import insert_plan
from zbv_service.database.search_events import tell_end, tell_found, tell_state, times_since_found
from zbv_service.documents.packing import contradicts, finite, supported_bound, unpack
from zbv_service.records.searches import Claim, NewPlan, Refusal, SearchState, Update


class SearchLeases:
    """The searches of one database, for those who run them."""

    def __init__(self, database: Database):
        self._database = database
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have a search's id told to a listener whenever this object has changed it."""
        self._listeners.append(listener)

    async def claim(
        self,
        owner: str,
        lease_seconds: float,
        *,
        cancelled_only: bool = False,
        share: int | None = None,
    ) -> Claim | None:
        """Lease the queued search whose turn it is, if there is one.

        Parameters
        ----------
        cancelled_only
            Only one that was cancelled and has something to make a plan of, which is quickly done.
        share
            Callers with this many running searches, in all services, wait while others have searches queued.
        """
        queued = select(SearchRow).where(SearchRow.state == "queued")
        if cancelled_only:
            queued = queued.where(SearchRow.cancel_requested)
        async with self._database.reading() as session:
            # A look costs readers nothing; only a queue with something in it is worth a write lock.
            if await session.scalar(queued.with_only_columns(SearchRow.id).limit(1)) is None:
                return None
        first = queued.order_by(SearchRow.turn, SearchRow.created_at, SearchRow.id).limit(1)
        first = first.options(undefer(SearchRow.problem), undefer(SearchRow.incumbent))
        first = first.with_for_update(skip_locked=True)
        async with self._database.writing() as session:
            row, busy = None, [] if share is None else await _callers_running(session, share)
            if busy:
                row = await session.scalar(first.where(_of_none_of(busy)))
            row = row or await session.scalar(first)
            if row is None:
                return None
            now = await self._database.now(session)  # the transaction has its lock: the lease begins here
            row.state = "running"
            row.lease_owner, row.leased_until = owner, now + timedelta(seconds=lease_seconds)
            row.fence += 1
            row.attempts += 1
            row.started_at = row.started_at or now
            row.updated_at = now
            await tell_state(session, row, now, "started")
            claim = Claim(**{field.name: getattr(row, field.name) for field in fields(Claim)})
        self._tell(claim.id)
        return claim

    async def renew(self, owner: str, fences: Mapping[str, int], lease_seconds: float) -> set[str]:
        """Renew leases; returns the ids of those that are still the owner's."""
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
        """Of the running searches with these fences those that should stop: cancelled, discarded or lost."""
        if not fences:
            return set()
        query = select(SearchRow.id, SearchRow.fence).where(SearchRow.id.in_(fences))
        query = query.where(SearchRow.state == "running", SearchRow.cancel_requested.is_(False))
        async with self._database.reading() as session:
            wanted = {
                search_id for search_id, fence in await session.execute(query) if fence == fences[search_id]
            }
        return set(fences) - wanted

    async def requeue_expired(self) -> int:
        """Queue every running search whose lease has ended."""
        async with self._database.reading() as session:
            now = await self._database.now(session)
        return await self._requeue(SearchRow.leased_until < now)

    async def requeue_of(self, owners: Collection[str]) -> int:
        """Queue every running search of owners that are known to be dead."""
        return await self._requeue(SearchRow.lease_owner.in_(owners))

    async def owners(self) -> set[str]:
        """Owners of running searches."""
        query = select(SearchRow.lease_owner).where(SearchRow.state == "running").distinct()
        async with self._database.reading() as session:
            return {owner for owner in await session.scalars(query) if owner is not None}

    async def progressed(self, search_id: str, fence: int, found: Update) -> bool:
        """Store a better plan or bound; False when the search is no longer the caller's.

        What is stored never gets worse: an attempt that begins below what the one before it had found
        changes nothing until it is ahead. Only an incumbent that does not fit its problem is forgotten.

        Raises
        ------
        ContradictedBound
            When a plan undercuts a bound, of this attempt or an earlier one. Nothing is stored then.
        """

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            await _absorb(session, row, now, found)

        return await self._change(search_id, fence, change)

    async def release(
        self, search_id: str, fence: int, found: Update | None, reason: str = "service-stopped"
    ) -> bool:
        """Queue a search again, with what it has found, for somebody else to finish."""

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            if found is not None:
                await _absorb(session, row, now, found)
            await _queue(session, row, now, reason)

        return await self._change(search_id, fence, change)

    async def crashed(
        self, search_id: str, fence: int, found: Update | None, most: int, error: Mapping[str, Any]
    ) -> bool:
        """Queue a search again whose process died; fail it with ``error`` when that was for the last time."""

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            if found is not None:
                await _absorb(session, row, now, found)
            row.crashes += 1
            await _queue_or_fail(session, row, now, "process-died", row.crashes < most, error)

        return await self._change(search_id, fence, change)

    async def evicted(
        self, search_id: str, fence: int, found: Update | None, most: int, error: Mapping[str, Any]
    ) -> bool:
        """Queue a search again whose worker was told to end; fail it when that came ``most`` times in a row.

        In a row: since it last got any further.
        """

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            if found is not None:
                await _absorb(session, row, now, found)
            times = 1 + await times_since_found(session, row, "worker-ended")
            await _queue_or_fail(session, row, now, "worker-ended", times < most, error)

        return await self._change(search_id, fence, change)

    async def finished(self, search_id: str, fence: int, plan: NewPlan) -> bool:
        """Store a search's plan; the search is done, or cancelled when that was asked for before.

        Plan, end and event are one transaction: either all of them are stored, or the search is run again.

        Raises
        ------
        ContradictedBound
            As in :meth:`progressed`.
        """

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            await _forget_refused(session, row, plan.refusal)
            summary = plan.summary
            is_better = row.objective is None or summary.value < row.objective
            # A bound that an earlier attempt proved holds, whatever this one got to.
            row.lower_bound = await _best_bound(session, row, summary.value, plan.search_bound)
            await insert_plan(session, plan, now)
            row.objective, row.method = summary.value, summary.method
            row.gap = finite(gap_of(row.objective, row.lower_bound))
            row.plan_id, row.incumbent = summary.plan_id, None
            if is_better:
                await tell_found(session, row, now, "improvement")
            await _end(session, row, now, "cancelled" if row.cancel_requested else "done")

        return await self._change(search_id, fence, change)

    async def ended(self, search_id: str, fence: int, state: SearchState, error: Mapping[str, Any]) -> bool:
        """End a search without a plan. A failed one gives up its request key; infeasible is an answer."""

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            row.error = dict(error)
            if state != "infeasible":
                row.request_key = None
            await _end(session, row, now, state)

        return await self._change(search_id, fence, change)

    async def contradicted(self, search_id: str, fence: int, error: Mapping[str, Any]) -> bool:
        """Fail a search in which a plan undercut a bound, and forget what it found: one of them is wrong.

        Its problem stays.
        """

        async def change(session: AsyncSession, row: SearchRow, now: datetime) -> None:
            _forget_found(row)
            row.error, row.request_key = dict(error), None
            await _end(session, row, now, "failed")

        return await self._change(search_id, fence, change)

    async def _change(self, search_id: str, fence: int, change: _Change) -> bool:
        """Change a search under its lock; False, and nothing, when it is no longer the caller's."""
        held = select(SearchRow).where(SearchRow.id == search_id, SearchRow.fence == fence)
        async with self._database.writing() as session:
            row = await session.scalar(held.where(SearchRow.state == "running").with_for_update())
            if row is None:
                return False
            now = await self._database.now(session)
            row.updated_at = now
            await change(session, row, now)
        self._tell(search_id)
        return True

    async def _requeue(self, lost: ColumnElement[bool]) -> int:
        condition = (SearchRow.state == "running", lost)
        async with self._database.reading() as session:
            if await session.scalar(select(SearchRow.id).where(*condition).limit(1)) is None:
                return 0
        async with self._database.writing() as session:
            query = select(SearchRow).where(*condition).with_for_update(skip_locked=True)
            rows, now = list(await session.scalars(query)), await self._database.now(session)
            for row in rows:
                row.updated_at = now
                await _queue(session, row, now, "service-lost")
        for row in rows:
            self._tell(row.id)
        return len(rows)

    def _tell(self, search_id: str) -> None:
        for listener in self._listeners:
            listener(search_id)


_Change = Callable[[AsyncSession, SearchRow, datetime], Awaitable[None]]


async def _absorb(session: AsyncSession, row: SearchRow, now: datetime, found: Update) -> None:
    """Take over what is better in an update than what is stored."""
    await _forget_refused(session, row, found.refusal)
    before, known = row.objective, row.lower_bound
    if before is None or found.objective < before:
        row.objective, row.method, row.incumbent = found.objective, found.method, found.incumbent
    objective = found.objective if row.objective is None else row.objective
    row.lower_bound = await _best_bound(session, row, objective, found.lower_bound)
    row.gap = finite(gap_of(objective, row.lower_bound))
    if row.objective != before:
        await tell_found(session, row, now, "improvement")
    elif row.lower_bound != known:
        await tell_found(session, row, now, "bound")


async def _best_bound(session: AsyncSession, row: SearchRow, objective: float, bound: float) -> float:
    """The larger of a new bound and the stored one; raises :class:`ContradictedBound`."""
    source = "this attempt's bound"
    if row.lower_bound is not None and row.lower_bound > bound:
        bound, source = row.lower_bound, "the bound of an earlier report"
    packed = b""
    if contradicts(objective, bound):
        packed = (await session.execute(select(SearchRow.problem).where(SearchRow.id == row.id))).scalar_one()
    return supported_bound(objective, bound, source, lambda: unpack(packed))


async def _forget_refused(session: AsyncSession, row: SearchRow, refusal: Refusal | None) -> None:
    """Forget a stored incumbent that an attempt refused, with its objective and its bound."""
    if refusal is None:
        return
    stored = await session.scalar(select(SearchRow.incumbent).where(SearchRow.id == row.id))
    if stored is not None and hashlib.sha256(stored).hexdigest() == refusal.digest:
        _forget_found(row)


def _forget_found(row: SearchRow) -> None:
    row.objective = row.lower_bound = row.gap = row.method = row.incumbent = None


async def _callers_running(session: AsyncSession, least: int) -> list[str | None]:
    """Callers that have at least so many running searches."""
    query = select(SearchRow.created_by).where(SearchRow.state == "running").group_by(SearchRow.created_by)
    return list(await session.scalars(query.having(func.count() >= least)))


def _of_none_of(callers: Collection[str | None]) -> ColumnElement[bool]:
    """Whether a search was asked for by somebody else; nobody (None) is a caller, too."""
    column = SearchRow.created_by
    named = [caller for caller in callers if caller is not None]
    if None in callers:
        return column.is_not(None) if not named else column.not_in(named)
    return or_(column.is_(None), column.not_in(named))


async def _queue(session: AsyncSession, row: SearchRow, now: datetime, reason: str) -> None:
    row.state, row.lease_owner, row.leased_until = "queued", None, None
    await tell_state(session, row, now, reason)


async def _queue_or_fail(
    session: AsyncSession,
    row: SearchRow,
    now: datetime,
    reason: str,
    goes_on: bool,
    error: Mapping[str, Any],
) -> None:
    if goes_on:
        await _queue(session, row, now, reason)
        return
    row.error, row.request_key = dict(error), None
    await _end(session, row, now, "failed")


async def _end(session: AsyncSession, row: SearchRow, now: datetime, state: SearchState) -> None:
    row.state, row.finished_at, row.lease_owner, row.leased_until = state, now, None, None
    await tell_end(session, row, now)
