"""Removes rows that are older than the operator wants to keep, in batches that block nobody.

A row stays as long as another row refers to it: a plan named by a search, a run or a trace, a search that a
run waits for, an agent that worked for a run, a token that others were made from. Services that sweep at the
same time take different rows. The database removes what is a part of a removed row: events of a search or a
run, sessions of a token. All times come from the database's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, inspect, or_, select, tuple_, update

from zbv_service.compute.waiting import Loops, happened
from zbv_service.database.engine import Base, BaseTable, DatabaseAway
from zbv_service.database.models import (
    AgentRow,
    NodeRow,
    PartRow,
    PlanRow,
    RunRow,
    SearchPlanRow,
    SearchRow,
    TokenRow,
)
from zbv_service.records.agents import AGENT_ENDED
from zbv_service.records.runs import RUN_ENDED
from zbv_service.records.searches import FINISHED

BATCH = 200
"""Rows per transaction."""
LARGE_BATCH = 20
"""Searches or runs per transaction; each may have a thousand events."""
USED_HOURS = 1.0
"""The resolution of a plan's last use, which saves writes."""


@dataclass(frozen=True)
class Keep:
    """For how many days rows are kept."""

    others: float
    """Searches that did not fail, with their events; traces and logs of runs; agents, tokens, sessions and
    links that have ended."""
    plans: float
    """Plans that nothing refers to, after their last use; runs and failed searches."""


class Retention(BaseTable):
    """Removes old rows from one database."""

    async def note_uses(self, plan_ids: Collection[str]) -> None:
        """Record that plans were used now."""
        remaining = sorted(plan_ids)
        while remaining:
            batch, remaining = remaining[:BATCH], remaining[BATCH:]
            async with self._database.writing() as session:
                now = await self._database.now(session)
                stale = _last_use() < now - timedelta(hours=USED_HOURS)
                used = update(PlanRow).where(PlanRow.plan_id.in_(batch), stale)
                await session.execute(used.values(used_at=now))

    async def sweep(self, keep: Keep, is_enough: Callable[[], bool] = lambda: False) -> dict[str, int]:
        """Remove old rows until ``is_enough`` returns True; returns the number of removed rows by kind."""
        async with self._database.writing() as session:
            now = await self._database.now(session)

        def before(days: float) -> datetime:
            return now - timedelta(days=days)

        old, oldest = before(keep.others), before(keep.plans)
        parts = max(old, oldest)  # a removed run takes its traces and logs along
        steps: tuple[tuple[str, Callable[[], Awaitable[int]]], ...] = (
            ("traces and logs", lambda: self._remove(PartRow, _of_old_run(parts))),
            ("runs", lambda: self._remove(RunRow, _old_run(oldest), _has_no_agent(), most=LARGE_BATCH)),
            ("searches", lambda: self._remove(SearchRow, *_old_search(old, oldest), most=LARGE_BATCH)),
            ("plans", lambda: self._remove(PlanRow, *_old_plan(oldest))),
            ("agents", lambda: self._remove(AgentRow, *_old_agent(old))),
            ("tokens", lambda: self._remove(TokenRow, _old_token(old))),
        )
        gone: dict[str, int] = {}
        for name, remove in steps:
            while not is_enough() and (count := await remove()):
                gone[name] = gone.get(name, 0) + count
        return gone

    async def _remove(
        self, table: type[Base], *conditions: ColumnElement[bool], most: int | None = None
    ) -> int:
        """Remove a batch of rows, with all rows that are parts of them."""
        key = inspect(table).primary_key
        found = select(*key).where(*conditions).limit(most or BATCH)
        if not await self._database.rows(found.limit(1)):
            return 0  # checked without a lock
        async with self._database.writing() as session:
            rows = (await session.execute(found.with_for_update(skip_locked=True, of=table))).all()
            # Repeat the condition on the locked rows: a new reference since then keeps a row.
            doomed = tuple_(*key).in_([tuple(row) for row in rows])
            await session.execute(
                delete(table).where(doomed, *conditions).execution_options(synchronize_session=False)
            )
        return len(rows)


def _old_run(before: datetime) -> ColumnElement[bool]:
    return RunRow.state.in_(sorted(RUN_ENDED)) & (RunRow.finished_at < before)


def _of_old_run(before: datetime) -> ColumnElement[bool]:
    return select(RunRow.id).where(RunRow.id == PartRow.run_id, _old_run(before)).exists()


def _has_no_agent() -> ColumnElement[bool]:
    return ~select(AgentRow.id).where(AgentRow.run_id == RunRow.id).exists()


def _old_search(before: datetime, failed_before: datetime) -> tuple[ColumnElement[bool], ...]:
    # created_at has an index, and no search ends before it was created.
    recent = SearchRow.created_at < max(before, failed_before)
    ended = SearchRow.state.in_(sorted(FINISHED - {"failed"})) & (SearchRow.finished_at < before)
    failed = (SearchRow.state == "failed") & (SearchRow.finished_at < failed_before)
    return recent, or_(ended, failed), ~_awaited()


def _awaited() -> ColumnElement[bool]:
    """Whether a run waits for the search, or uses it to replan for measured costs."""
    planning = (RunRow.search_id == SearchRow.id) & (RunRow.state == "planning")
    measured = RunRow.state.not_in(sorted(RUN_ENDED)) & RunRow.replanning.is_not(None)
    replanning = measured & (RunRow.replanning["search_id"].as_string() == SearchRow.id)
    return select(RunRow.id).where(or_(planning, replanning)).exists()


def _last_use() -> ColumnElement[datetime]:
    return func.coalesce(PlanRow.used_at, PlanRow.created_at)


def _old_plan(before: datetime) -> tuple[ColumnElement[bool], ...]:
    this, open_runs = PlanRow.plan_id, RunRow.state.not_in(sorted(RUN_ENDED))
    offered, measured = RunRow.offer["plan_id"].as_string(), RunRow.replanning["plan_id"].as_string()
    return (
        PlanRow.created_at < before,
        _last_use() < before,
        ~select(SearchRow.id).where(SearchRow.plan_id == this).exists(),
        ~select(SearchPlanRow.search_id).where(SearchPlanRow.plan_id == this).exists(),
        ~select(RunRow.id).where(RunRow.plan_id == this).exists(),
        ~select(RunRow.id).where(RunRow.target_plan_id == this).exists(),
        ~select(PartRow.run_id).where(PartRow.plan_id == this).exists(),
        this.not_in(select(offered).where(open_runs, offered.is_not(None))),
        this.not_in(select(measured).where(open_runs, measured.is_not(None))),
    )


def _old_agent(before: datetime) -> tuple[ColumnElement[bool], ...]:
    return (
        AgentRow.state.in_(sorted(AGENT_ENDED)),
        AgentRow.seen_at < before,
        AgentRow.run_id.is_(None),
        ~select(NodeRow.run_id).where(NodeRow.agent_id == AgentRow.id).exists(),
    )


def _old_token(before: datetime) -> ColumnElement[bool]:
    """A token, session or link that has ended; those that a token made end with it."""
    return or_(TokenRow.revoked_at < before, TokenRow.expires_at < before)


SWEEP_SECONDS = 600.0
STOP_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Sweeper:
    """Removes old rows every ten minutes, between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    used
        Ids of plans fetched since the last sweep; a sweep records these uses and empties the set.
    """

    def __init__(self, retention: Retention, keep: Keep, used: set[str]):
        self._retention = retention
        self._keep = keep
        self._used = used
        self._loops = Loops(DatabaseAway, SWEEP_SECONDS)

    async def start(self) -> None:
        """Begin."""
        self._loops.start({"sweeper": self._step})

    async def stop(self) -> None:
        """Stop after the current batch."""
        await self._loops.stop(STOP_SECONDS)

    async def sweep(self) -> None:
        """Record which plans were fetched, and remove old rows."""
        noted = frozenset(self._used)
        await self._retention.note_uses(noted)
        self._used -= noted
        gone = await self._retention.sweep(self._keep, self._loops.stopped.is_set)
        if gone:
            logger.info("removed old rows: %s", ", ".join(f"{n} {kind}" for kind, n in gone.items()))

    async def _step(self) -> None:
        await self.sweep()
        await happened(self._loops.stopped, SWEEP_SECONDS)
