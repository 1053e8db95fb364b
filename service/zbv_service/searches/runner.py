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
from collections.abc import Awaitable, Callable, Collection, Set

from zbv_solver.errors import ContradictedBound

from zbv_service.compute.executor_choice import parse_choice
from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, SearchTable
from zbv_service.observability.context import SEARCH_ID
from zbv_service.records.searches import FINISHED, Claim, Update
from zbv_service.searches.attempts import RETRY_SECONDS, Attempt, Endings, Observer
from zbv_service.searches.executors.executor import SearchExecutor
from zbv_service.searches.executors.local import LocalExecutor
from zbv_service.searches.executors.task import SearchFunction, SearchTask, solver_search
from zbv_service.searches.owners import is_dead, new_owner
from zbv_service.settings import Settings, cores

POLL_SECONDS = 0.25
"""How often the queue, and requests to stop, are looked for that came in by another service."""

USEFUL_WORKERS = 2
"""Threads that a search makes use of: it runs two chains."""

logger = logging.getLogger(__name__)


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
        self._attempts: set[Attempt] = set()
        self._queue_grew = asyncio.Event()
        self._reported = asyncio.Event()
        self._stopped = asyncio.Event()
        self._endings = Endings(table, settings.max_crashes, self._stopped, observer)
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
        for event in (self._stopped, self._queue_grew, self._reported):
            event.set()
        # Left to end by themselves, so that no transaction is cut off in the middle.
        if self._loops:
            _, unfinished = await asyncio.wait(self._loops, timeout=self._settings.shutdown_seconds)
            for loop in unfinished:
                loop.cancel()
        await self._stop_attempts()
        await self._executor.stop()

    def wake(self) -> None:
        """Say that a search was queued."""
        if len(self._attempts) < self._executor.slots:  # else it waits for a place, whose end wakes, too
            self._queue_grew.set()

    def cancel(self, search_id: str) -> None:
        """Stop a search at once when it runs here; elsewhere its own runner reads it in the database."""
        for attempt in self._attempts:
            if attempt.claim.id == search_id:
                attempt.stop()

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None when they can."""
        return self._executor.trouble

    @property
    def is_working(self) -> bool:
        """Whether every loop is alive."""
        return bool(self._loops) and not any(loop.done() for loop in self._loops)

    async def _stop_attempts(self) -> None:
        for attempt in self._attempts:
            attempt.stop()
        tasks = [attempt.task for attempt in self._attempts if attempt.task is not None]
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=self._settings.shutdown_seconds)
        if unfinished:
            logger.warning("%d searches did not stop in time and are ended", len(unfinished))
            self._executor.kill()
            await asyncio.wait(unfinished, timeout=self._settings.shutdown_seconds)

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        while not self._stopped.is_set():
            try:
                await step()
            except DatabaseAway as error:
                logger.warning("%s It is tried again in %g s.", error, RETRY_SECONDS)
                await happened(self._stopped, RETRY_SECONDS)
            except Exception:
                logger.exception("the runner failed; it goes on in %g s", RETRY_SECONDS)
                await happened(self._stopped, RETRY_SECONDS)

    async def _dispatch(self) -> None:
        self._queue_grew.clear()
        slots = self._executor.slots
        # A cancelled search only has to make a plan of what it found: that need not wait for a free place.
        while len(self._attempts) < 2 * slots and not self._stopped.is_set():
            claim = await self._table.claim(
                self._owner,
                self._settings.lease_seconds,
                cancelled_only=len(self._attempts) >= slots,
                share=self._settings.max_running_per_token,
            )
            if claim is None:
                break
            self._begin(claim)
        await happened(self._queue_grew, POLL_SECONDS)

    async def _maintain(self) -> None:
        # Renewed before looking for expired ones: a pause of this process must not cost it its own.
        held = list(self._attempts)
        kept = await self._table.renew(self._owner, _fences(held), self._settings.lease_seconds)
        _stop_lost(held, kept)
        if self._may_judge() and await self._table.requeue_expired():
            logger.info("queued searches again whose service gave no sign of life")
            self.wake()
        await happened(self._stopped, self._settings.heartbeat_seconds)

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
        """Stop searches that were cancelled or taken away, by whichever service, and those that overstay."""
        for attempt in self._attempts:
            attempt.hurry(self._settings.stop_seconds, self._settings.max_time_limit)
        held = list(self._attempts)
        fences = _fences(held)
        unwanted = await self._table.unwanted(fences)
        _stop_lost(held, fences.keys() - unwanted)
        await happened(self._stopped, POLL_SECONDS)

    async def _save(self) -> None:
        await self._reported.wait()
        self._reported.clear()
        for attempt in list(self._attempts):
            if attempt.is_unsaved and attempt.latest is not None and attempt.contradiction is None:
                attempt.is_unsaved = False
                try:
                    await self._table.progressed(attempt.claim.id, attempt.claim.fence, attempt.latest)
                except ContradictedBound as error:
                    attempt.contradiction = error
                    attempt.stop()
                except Exception:
                    attempt.is_unsaved = True
                    self._reported.set()
                    raise

    def _begin(self, claim: Claim) -> None:
        def report(update: Update) -> None:
            attempt.latest = update
            attempt.is_unsaved = True
            self._endings.note_refusal(attempt, update.refusal)
            self._reported.set()

        workers = self._workers()
        task = SearchTask(claim.id, claim.problem, {**claim.options, "workers": workers}, claim.incumbent)
        attempt = Attempt(claim, self._executor.expect(task, self._search, report), workers)
        if claim.cancel_requested:
            attempt.stop()
        self._attempts.add(attempt)
        attempt.task = asyncio.create_task(self._follow(attempt), name=f"zbv-search-{claim.id}")

    def _workers(self) -> int:
        """Threads for the next search: of this machine's cores, those that no search uses."""
        if self._settings.search_workers is not None:
            return self._settings.search_workers
        if not isinstance(self._executor, LocalExecutor):
            return 1  # a place on a cluster is one thread
        idle = cores() - sum(attempt.workers for attempt in self._attempts)
        return max(1, min(USEFUL_WORKERS, idle))

    async def _follow(self, attempt: Attempt) -> None:
        claim = attempt.claim
        SEARCH_ID.set(claim.id)  # this task's own, for its log lines
        logger.info("search %s starts (attempt %d)", claim.id, claim.attempts)
        try:
            if await self._endings.settle(attempt):
                await self._note_end(attempt)
        except DatabaseAway as error:
            logger.warning("search %s: %s", claim.id, error)
        except Exception:
            # If it is not settled, its lease ends by itself and it is run again.
            logger.exception("the end of search %s could not be stored", claim.id)
        finally:
            self._attempts.remove(attempt)
            self.wake()

    async def _note_end(self, attempt: Attempt) -> None:
        record = await self._table.get(attempt.claim.id)
        if self._observer is not None and record is not None and record.state in FINISHED:
            seconds = time.monotonic() - attempt.made_at
            self._observer.search_ended(record.state, record.method, record.gap, seconds)


def _fences(attempts: Collection[Attempt]) -> dict[str, int]:
    """By search the newest fence: one that was lost may have been claimed again while it still stops."""
    fences: dict[str, int] = {}
    for attempt in attempts:
        claim = attempt.claim
        fences[claim.id] = max(claim.fence, fences.get(claim.id, 0))
    return fences


def _stop_lost(attempts: Collection[Attempt], kept: Set[str]) -> None:
    """Stop the attempts at searches that are not kept, and those that a newer one has overtaken."""
    fences = _fences(attempts)
    for attempt in attempts:
        claim = attempt.claim
        if claim.id not in kept or claim.fence != fences[claim.id]:
            attempt.stop()


def make_executor(settings: Settings) -> SearchExecutor:
    """The executor that the settings ask for."""
    choice = parse_choice(settings.executor)
    if choice.scheduler is None:
        return LocalExecutor(choice.processes or settings.searches, preload=settings.preload == "at-start")
    from zbv_service.searches.executors.cluster.executor import (
        DaskExecutor,  # which not everybody has installed
    )

    most = settings.searches if "searches" in settings.model_fields_set else None
    # Workers give up before the lease ends: else a search would wait for a place that its own past takes.
    return DaskExecutor(choice.scheduler, most, patience=settings.lease_seconds / 2)
