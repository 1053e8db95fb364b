"""Searches from the client's side: accepted, listed, cancelled and discarded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row, Select, bindparam, case, func, select, text, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, aliased

from zbv_service.database.engine import columns_of
from zbv_service.database.events import add_event
from zbv_service.database.models import RunRow, SearchRow
from zbv_service.database.paging import begins, of_shape, read_page
from zbv_service.database.run_end import changed
from zbv_service.database.search_leases import SearchLeases
from zbv_service.records.lists import Page, Position, SearchListQuery
from zbv_service.records.searches import (
    FINISHED,
    AnySearch,
    NewSearch,
    SearchRecord,
)


class SearchInUse(Exception):
    """A run waits for the search; ``run_id`` says which."""

    def __init__(self, run_id: str):
        super().__init__(run_id)
        self.run_id = run_id


class TooManySearches(Exception):
    """The caller has reached its limit of unfinished searches."""


class SearchTable(SearchLeases):
    """The searches of one database."""

    async def add(
        self, new: NewSearch, *, most: int | None = None, for_run: bool = False
    ) -> tuple[SearchRecord, bool]:
        """Queue a search, or find the search of an equal request; also returns whether it was added.

        A name replaces the one that an earlier request gave.

        Parameters
        ----------
        for_run
            Whether a run asks and waits for the search, and no client does; see :meth:`cancel_unwanted`.
        most
            The caller's limit of unfinished searches; None for no limit.

        Raises
        ------
        TooManySearches
            Nothing was stored.
        """
        for _ in range(3):
            existing = _only(await self._database.rows(_BY_REQUEST, key=new.request_key))
            if existing is not None:
                name = new.name or existing.name
                is_same = existing.is_wanted_by_client and name == existing.name
                if for_run or is_same or await self._join(existing.id, new.name):
                    return existing.model_copy(update={"name": name}), False
                continue  # the last run that waited for it was just cancelled
            with suppress(IntegrityError):  # another transaction added it after the query
                await self._insert(new, most, for_run)
                if (record := await self.get(new.id)) is not None:
                    return record, True
        raise RuntimeError(f"search {new.request_key} is added and given up faster than it can be read.")

    async def _insert(self, new: NewSearch, most: int | None, for_run: bool) -> None:
        async with self._database.writing() as session:
            if most is not None:
                if not self._database.is_sqlite:  # which has one writer at a time
                    await session.execute(_ONE_AT_A_TIME, {"caller": f"searches of {new.created_by}"})
                unfinished = SearchRow.state.in_(["queued", "running"])
                theirs = select(SearchRow.id).where(SearchRow.created_by == new.created_by, unfinished)
                count = select(func.count()).select_from(theirs.limit(most).subquery())
                if await session.scalar(count) == most:
                    raise TooManySearches
            now, turn = await _moment_and_turn(session, new.created_by, await self._database.now(session))
            summary = new.summary
            row = SearchRow(
                **asdict(new),
                created_at=now,
                turn=turn,
                pp_degree=summary.get("pp_degree"),
                microbatches=summary.get("microbatches"),
                placement=summary.get("placement"),
                problem_objective=summary.get("objective"),
                state="queued",
                cancel_requested=False,
                is_wanted_by_client=not for_run,
                attempts=0,
                crashes=0,
                fence=0,
                last_event=0,
                updated_at=now,
            )
            session.add(row)
            await session.flush()  # the event refers to it
            await add_event(session, row, now, "state", "submitted")

    async def get(self, search_id: str) -> SearchRecord | None:
        """A search by id, with its place in the queue."""
        return _only(await self._database.rows(_BY_ID, id=search_id))

    async def of_requests(self, request_keys: Collection[str]) -> dict[str, SearchRecord]:
        """The searches of these request keys, by key; keys without a search are left out."""
        query = select(SearchRow.request_key, *_LISTED).where(SearchRow.request_key.in_(request_keys))
        return {
            row.request_key: _RECORD.validate_python(dict(row._mapping))
            for row in await self._database.rows(query)
        }

    async def problem(self, search_id: str) -> bytes | None:
        """The packed problem document of a search."""
        found = await self._database.rows(select(SearchRow.problem).where(SearchRow.id == search_id))
        return found[0].problem if found else None

    async def answer(self, search_id: str) -> bytes | None:
        """The packed answer of a search of layouts; None before its end."""
        found = await self._database.rows(select(SearchRow.answer).where(SearchRow.id == search_id))
        return found[0].answer if found else None

    async def page(self, wanted: SearchListQuery, after: Position | None = None) -> Page[SearchRecord]:
        """One page of searches, newest first, starting at a position."""
        conditions = of_shape(wanted, SearchRow, SearchRow.problem_objective)
        if wanted.kind is not None:
            conditions.append(SearchRow.kind == wanted.kind)
        if wanted.state:
            conditions.append(SearchRow.state.in_(wanted.state))
        conditions += begins(wanted.q, SearchRow.id, SearchRow.plan_id, parts_of=(SearchRow.name,))
        query = select(SearchRow.id).where(*conditions)

        def find(session: Session) -> Page[SearchRecord]:
            def load(ids: Sequence[str]) -> list[SearchRecord]:
                rows = session.execute(select(*_LISTED).where(SearchRow.id.in_(ids)))
                return [_RECORD.validate_python(dict(row._mapping)) for row in rows]

            return read_page(session, query, SearchRow, wanted, after, load)

        return await self._database.read(find)

    async def request_cancel(self, search_id: str) -> SearchRecord | None:
        """Cancel a search that is queued without an incumbent; ask any other unfinished one to stop.

        A queued search with an incumbent stays queued: a runner claims it once more to store its plan.
        """
        async with self._database.writing() as session:
            row = await session.get(SearchRow, search_id, with_for_update=True)
            if row is not None and row.state not in FINISHED and not row.cancel_requested:
                await _give_up(session, row, await self._database.now(session))
        self._changed(search_id)
        return await self.get(search_id)

    async def cancel_unwanted(self, search_id: str) -> bool:
        """Cancel a search that nobody wants any more; returns whether this call cancelled it.

        Clients that submitted a search want it, and so do runs that wait for its plan.
        """
        async with self._database.writing() as session:
            # A request that joins the search waits for this lock or has already been counted.
            row = await session.get(SearchRow, search_id, with_for_update=True)
            if row is None or row.state in FINISHED or row.cancel_requested or row.is_wanted_by_client:
                return False
            if await session.scalar(_waiting_run(search_id)) is not None:
                return False
            await _give_up(session, row, await self._database.now(session))
        self._changed(search_id)
        return True

    async def _join(self, search_id: str, name: str | None) -> bool:
        """Record that a client wants a search, and its name if it gave one; False if it was given up."""
        kept = update(SearchRow).where(SearchRow.id == search_id, SearchRow.request_key.is_not(None))
        async with self._database.writing() as session:
            return (
                await changed(
                    session, kept.values(is_wanted_by_client=True, name=func.coalesce(name, SearchRow.name))
                )
                == 1
            )

    async def discard(self, search_id: str) -> bool:
        """Remove a search and its events in any state; False if it does not exist.

        Its plan stays.

        Raises
        ------
        SearchInUse
            A run waits for its plan.
        """
        async with self._database.writing() as session:
            row = await session.get(SearchRow, search_id, with_for_update=True)
            if row is None:
                return False
            waiting = await session.scalar(_waiting_run(search_id))
            if waiting is not None:
                raise SearchInUse(waiting)
            await session.delete(row)
        self._changed(search_id)
        return True


def _waiting_run(search_id: str) -> Select[str]:
    """A query for one of the runs that wait for a search's plan."""
    return select(RunRow.id).where(RunRow.search_id == search_id, RunRow.state == "planning").limit(1)


async def _give_up(session: AsyncSession, row: SearchRow, now: datetime) -> None:
    """Cancel a locked unfinished search; from now on the same request starts a new search."""
    row.cancel_requested, row.request_key, row.updated_at = True, None, now
    if row.state == "queued" and row.objective is None:
        row.state, row.finished_at = "cancelled", now
        await add_event(session, row, now, "end")
    else:
        await add_event(session, row, now, "state", "cancel-requested")


async def _moment_and_turn(session: AsyncSession, caller: str | None, now: datetime) -> tuple[datetime, int]:
    """The moment and the turn of a caller's next search.

    The moment is later than that of every search: lists sort by it, and SQLite only has milliseconds. The
    turn is after the caller's other searches, and not before the current turn.
    """
    row = SearchRow
    queued, running, is_theirs = row.state == "queued", row.state == "running", row.created_by == caller
    looks = (
        select(func.max(row.created_at)),
        select(func.min(row.turn)).where(queued),
        select(func.max(row.turn)).where(running),
        select(func.max(row.turn)).where(is_theirs, queued),
        select(func.max(row.turn)).where(is_theirs, running),
    )  # each subquery reads one index entry
    result = await session.execute(select(*(look.scalar_subquery() for look in looks)))
    newest, next_queued, last_running, *theirs = result.one()
    if newest is not None and timedelta(0) <= newest - now < timedelta(milliseconds=1):
        now = newest + timedelta(microseconds=1)
    served = last_running if next_queued is None else next_queued
    return now, max(served or 0, *(turn + 1 for turn in theirs if turn is not None), 0)


_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(6451204, hashtext(:caller))")
"""Until the transaction ends, no other one adds a search of this caller to PostgreSQL; the first number is
arbitrary. What the session reads from now on includes what those have written."""
_RECORD: TypeAdapter[AnySearch] = TypeAdapter(AnySearch)
# Built once: compiling a query takes SQLAlchemy longer than executing it, and it caches the result.
_COLUMNS = (*columns_of(SearchRecord, SearchRow), SearchRow.summary, SearchRow.options, SearchRow.progress)
_other = aliased(SearchRow)
_TURN, _THEIR_TURN = ((row.turn, row.created_at, row.id) for row in (SearchRow, _other))
_EARLIER = select(func.count()).where(_other.state == "queued", tuple_(*_THEIR_TURN) < tuple_(*_TURN))
_PLACE = case((SearchRow.state == "queued", _EARLIER.scalar_subquery())).label("queued_before")
_RECORDS = select(*_COLUMNS, _PLACE)
_LISTED = tuple(column for column in _COLUMNS if column.key != "jitter")
_BY_ID = _RECORDS.where(SearchRow.id == bindparam("id"))
_BY_REQUEST = _RECORDS.where(SearchRow.request_key == bindparam("key"))


def _only(rows: Sequence[Row[Any]]) -> SearchRecord | None:
    return _RECORD.validate_python(dict(rows[0]._mapping)) if rows else None
