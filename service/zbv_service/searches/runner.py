"""Runs the queued searches of the database: leases them, starts them in an executor, follows them.

The database is the truth and this is its servant: a runner that dies at any moment leaves rows from
which another one goes on. It holds a lease on every search it runs and renews it; rows whose lease has
ended are queued again, by whoever sees them first. Within one machine the leases of dead processes are
recognised at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from zbv_solver.errors import InfeasibleMemory, ZbvError

from zbv_service.database import DatabaseAway, SearchTable
from zbv_service.http import problems
from zbv_service.observability.context import SEARCH_ID
from zbv_service.packing import incumbent_of
from zbv_service.records import FINISHED, Claim, NewPlan, SearchState, Update
from zbv_service.searches.choice import parse_choice
from zbv_service.searches.executors import Computation, SearchCrashed, SearchExecutor, SearchLost
from zbv_service.searches.local import LocalExecutor
from zbv_service.searches.owners import is_dead, new_owner
from zbv_service.searches.task import SearchFunction, SearchTask, solver_search
from zbv_service.settings import Settings

POLL_SECONDS = 0.25
"""How often the queue, and requests to stop, are looked for that came in by another service."""
RETRY_SECONDS = 1.0
"""How long to wait when the database is away."""

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Hears of the end of every search that ran here, for metrics."""

    def search_ended(self, state: str, method: str | None, gap: float | None, seconds: float) -> None:
        """Method and gap are those of its plan, None without one; seconds since it started here."""


@dataclass(eq=False)
class _Run:
    """A search that runs here. ``latest`` is its newest report; ``unsaved`` says that it is not stored."""

    claim: Claim
    computation: Computation
    latest: Update | None = None
    unsaved: bool = False
    is_lost: bool = False
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Runner:
    """Runs searches, as many at a time as its executor has room for, between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    search
        What a search process runs; it must be importable from there.
    """

    def __init__(
        self,
        table: SearchTable,
        settings: Settings,
        search: SearchFunction = solver_search,
        observer: Observer | None = None,
    ):
        self._table = table
        self._observer = observer
        self._settings = settings
        self._search = search
        self._owner = new_owner()
        self._executor = make_executor(settings)
        self._runs: dict[str, _Run] = {}
        self._queue_grew = asyncio.Event()
        self._reported = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_stopping = False
        self._maintained = self._watched_since = float("-inf")
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take over what dead services of this machine left behind, and begin."""
        await self._executor.start()
        dead = {owner for owner in await self._table.owners() if is_dead(owner, self._owner)}
        if dead:
            count = await self._table.requeue_of(dead)
            logger.info("queued %d searches again that a dead service left behind", count)
        for step, name in (
            (self._dispatch, "dispatch"),
            (self._maintain, "leases"),
            (self._heed, "requests to stop"),
            (self._save, "progress"),
        ):
            self._loops.append(asyncio.create_task(self._forever(step), name=f"zbv-{name}"))

    async def stop(self) -> None:
        """Stop every search, queue it again with what it found, and end the processes."""
        self._is_stopping = True
        for event in (self._stopped, self._queue_grew, self._reported):
            event.set()
        # Left to end by themselves, so that no transaction is cut off in the middle.
        if self._loops:
            _, unfinished = await asyncio.wait(self._loops, timeout=self._settings.shutdown_seconds)
            for loop in unfinished:
                loop.cancel()
        await self._stop_runs()
        await self._executor.stop()

    def wake(self) -> None:
        """Say that a search was queued."""
        if len(self._runs) < self._executor.slots:  # else it waits for a place, whose end wakes, too
            self._queue_grew.set()

    def cancel(self, search_id: str) -> None:
        """Stop a search at once when it runs here; elsewhere its own runner reads it in the database."""
        run = self._runs.get(search_id)
        if run is not None:
            run.computation.stop()

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None when they can."""
        return self._executor.trouble

    @property
    def is_working(self) -> bool:
        """Whether every loop is alive."""
        return bool(self._loops) and not any(loop.done() for loop in self._loops)

    async def _stop_runs(self) -> None:
        for run in self._runs.values():
            run.computation.stop()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=self._settings.shutdown_seconds)
        if unfinished:
            logger.warning("%d searches did not stop in time and are ended", len(unfinished))
            self._executor.kill()
            await asyncio.wait(unfinished, timeout=self._settings.shutdown_seconds)

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        while not self._is_stopping:
            try:
                await step()
            except DatabaseAway as error:
                logger.warning("%s It is tried again in %g s.", error, RETRY_SECONDS)
                await _wait(self._stopped, RETRY_SECONDS)
            except Exception:
                logger.exception("the runner failed; it goes on in %g s", RETRY_SECONDS)
                await _wait(self._stopped, RETRY_SECONDS)

    async def _dispatch(self) -> None:
        self._queue_grew.clear()
        slots = self._executor.slots
        # A cancelled search only has to make a plan of what it found: that need not wait for a free place.
        while len(self._runs) < 2 * slots and not self._is_stopping:
            claim = await self._table.claim(
                self._owner, self._settings.lease_seconds, cancelled_only=len(self._runs) >= slots
            )
            if claim is None:
                break
            self._begin(claim)
        await _wait(self._queue_grew, POLL_SECONDS)

    async def _maintain(self) -> None:
        # Renewed before looking for expired ones: a pause of this process must not cost it its own.
        fences = {search_id: run.claim.fence for search_id, run in self._runs.items()}
        kept, _ = await self._table.renew(self._owner, fences, self._settings.lease_seconds)
        for search_id in fences.keys() - kept:
            self._lose(search_id, fences[search_id])
        if self._may_judge() and await self._table.requeue_expired():
            logger.info("queued searches again whose service gave no sign of life")
            self.wake()
        await _wait(self._stopped, self._settings.heartbeat_seconds)

    def _may_judge(self) -> bool:
        """Whether leases that have ended are their owners' fault.

        When the database was away, nobody could renew: then everybody gets the time to do so.
        """
        now, lease = time.monotonic(), self._settings.lease_seconds
        if self._maintained > float("-inf") and now - self._maintained > lease / 2:
            self._watched_since = now
        self._maintained = now
        return now - self._watched_since >= lease

    async def _heed(self) -> None:
        """Stop searches that were cancelled or taken away, by whichever service."""
        fences = {search_id: run.claim.fence for search_id, run in self._runs.items()}
        for search_id in await self._table.unwanted(fences):
            self.cancel(search_id)
        await _wait(self._stopped, POLL_SECONDS)

    def _lose(self, search_id: str, fence: int) -> None:
        run = self._runs.get(search_id)
        if run is not None and run.claim.fence == fence:
            run.is_lost = True
            run.computation.stop()

    async def _save(self) -> None:
        await self._reported.wait()
        self._reported.clear()
        for run in list(self._runs.values()):
            if run.unsaved and run.latest is not None:
                run.unsaved = False
                try:
                    await self._table.progressed(run.claim.id, run.claim.fence, run.latest)
                except Exception:
                    run.unsaved = True
                    self._reported.set()
                    raise

    def _begin(self, claim: Claim) -> None:
        def report(update: Update) -> None:
            run.latest = update
            run.unsaved = True
            self._reported.set()

        task = SearchTask(claim.id, claim.problem, claim.options, claim.incumbent)
        run = _Run(claim, self._executor.expect(task, self._search, report))
        if claim.cancel_requested:
            run.computation.stop()
        self._runs[claim.id] = run
        run.task = asyncio.create_task(self._follow(run), name=f"zbv-search-{claim.id}")

    async def _follow(self, run: _Run) -> None:
        claim = run.claim
        SEARCH_ID.set(claim.id)  # this task's own, for its log lines
        logger.info("search %s starts (attempt %d)", claim.id, claim.attempts)
        try:
            await self._settle(run)
            await self._note_end(run)
        except Exception:
            # Not settled, so its lease ends by itself and it is run again.
            logger.exception("the end of search %s could not be stored", claim.id)
        finally:
            del self._runs[claim.id]
            self.wake()

    async def _note_end(self, run: _Run) -> None:
        record = None if run.is_lost else await self._table.get(run.claim.id)
        if self._observer is not None and record is not None and record.state in FINISHED:
            seconds = time.monotonic() - run.began
            self._observer.search_ended(record.state, record.method, record.gap, seconds)

    async def _settle(self, run: _Run) -> None:
        """Wait for a search to end, and store what became of it, however long the database is away."""
        store = await self._outcome(run)
        while True:
            try:
                await store()
                return
            except DatabaseAway as error:
                if self._is_stopping:
                    raise  # its lease ends by itself, and it is run again
                logger.warning("the end of search %s is not stored yet: %s", run.claim.id, error)
            await _wait(self._stopped, RETRY_SECONDS)

    async def _outcome(self, run: _Run) -> Callable[[], Awaitable[None]]:
        """Wait for a search to end; returns what stores that."""
        claim = run.claim
        try:
            plan = await run.computation.plan()
        except InfeasibleMemory as error:
            return partial(self._end, run, "infeasible", problems.infeasible(error))
        except SearchCrashed as error:
            return partial(self._requeue, run, error, is_crash=not self._is_stopping)
        except SearchLost as error:
            return partial(self._requeue, run, error, is_crash=False)
        except Exception as error:
            logger.exception("search %s failed", claim.id)
            # The planner's own errors are meant to be read; others belong into the log.
            detail = str(error) if isinstance(error, ZbvError) else "The search failed; the log says why."
            return partial(self._end, run, "failed", problems.document(problems.INTERNAL, detail))
        return partial(self._keep, run, plan)

    async def _end(self, run: _Run, state: SearchState, error: dict[str, Any]) -> None:
        await self._table.ended(run.claim.id, run.claim.fence, state, error)

    async def _keep(self, run: _Run, plan: NewPlan) -> None:
        """Store a plan; that of a search which was only stopped with its service is where it goes on."""
        claim = run.claim
        if self._is_stopping and not await self._is_cancelled(claim.id):
            await self._table.release(claim.id, claim.fence, await asyncio.to_thread(incumbent_of, plan))
            logger.info("search %s is queued again: the service stops", claim.id)
        else:
            await self._table.finished(claim.id, claim.fence, plan)
            logger.info("search %s found plan %s", claim.id, plan.summary.plan_id)

    async def _requeue(self, run: _Run, error: Exception, *, is_crash: bool) -> None:
        """Queue a search again whose process is gone, unless that was once too often and its own fault."""
        claim = run.claim
        logger.warning("search %s is queued again: %s", claim.id, error)
        if not is_crash:
            reason = "service-stopped" if self._is_stopping else "process-lost"
            await self._table.release(claim.id, claim.fence, run.latest, reason)
            return
        if run.latest is not None:
            await self._table.progressed(claim.id, claim.fence, run.latest)
        limit = self._settings.max_crashes
        detail = (
            f"The process of this search died {limit} times, so it is not started again. "
            f"Most often memory ran out: try fewer microbatches or less effort."
        )
        document = problems.document(problems.SEARCH_CRASHED, detail)
        await self._table.crashed(claim.id, claim.fence, limit, document)

    async def _is_cancelled(self, search_id: str) -> bool:
        record = await self._table.get(search_id)
        return record is not None and record.cancel_requested


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def make_executor(settings: Settings) -> SearchExecutor:
    """The executor that the settings ask for."""
    choice = parse_choice(settings.executor)
    if choice.scheduler is None:
        return LocalExecutor(choice.processes or settings.searches, preload=settings.preload == "at-start")
    from zbv_service.searches.cluster.executor import DaskExecutor  # which not everybody has installed

    most = settings.searches if "searches" in settings.model_fields_set else None
    # Workers give up before the lease ends: else a search would wait for a place that its own past takes.
    return DaskExecutor(choice.scheduler, most, patience=settings.lease_seconds / 2)
