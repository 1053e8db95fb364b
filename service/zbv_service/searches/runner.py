"""Runs the queued searches of the database: leases them, starts them in an executor, follows them.

The database is the truth and this is its servant: a runner that dies at any moment leaves rows from
which another one goes on. It holds a lease on every search it runs and renews it; rows whose lease has
ended are queued again, by whoever sees them first. Within one machine the leases of dead processes are
recognised at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from zbv_solver.errors import InfeasibleMemory, ZbvError

from zbv_service.database import SearchTable
from zbv_service.http import problems
from zbv_service.packing import incumbent_of
from zbv_service.records import Claim, NewPlan, Update
from zbv_service.searches.processes import IsolatedProcesses
from zbv_service.searches.progress import Line, ProgressServer
from zbv_service.searches.task import SearchFunction, SearchTask, run_task, solver_search
from zbv_service.settings import Settings

POLL_SECONDS = 1.0
"""How often the queue is looked at when nobody says that it grew."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """A search that runs here. ``latest`` is its newest report; ``unsaved`` says that it is not stored."""

    claim: Claim
    line: Line
    latest: Update | None = None
    unsaved: bool = False
    is_lost: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Runner:
    """Runs searches, at most ``settings.searches`` at a time, between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    search
        What a search process runs; it must be importable from there.
    """

    def __init__(self, table: SearchTable, settings: Settings, search: SearchFunction = solver_search):
        self._table = table
        self._settings = settings
        self._search = search
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._executor = IsolatedProcesses()
        self._progress = ProgressServer()
        self._runs: dict[str, _Run] = {}
        self._queue_grew = asyncio.Event()
        self._reported = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_stopping = False
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take over what dead services of this machine left behind, and begin."""
        await self._progress.start()
        dead = {owner for owner in await self._table.owners() if _is_dead(owner, self._owner)}
        if dead:
            count = await self._table.requeue_of(dead)
            logger.info("queued %d searches again that a dead service left behind", count)
        for step, name in (
            (self._dispatch, "dispatch"),
            (self._maintain, "leases"),
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
        await self._progress.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Say that a search was queued."""
        self._queue_grew.set()

    def cancel(self, search_id: str) -> None:
        """Stop a search at once when it runs here; elsewhere its own runner reads it in the database."""
        run = self._runs.get(search_id)
        if run is not None:
            run.line.stop()

    @property
    def is_working(self) -> bool:
        """Whether every loop is alive."""
        return bool(self._loops) and not any(loop.done() for loop in self._loops)

    async def _stop_runs(self) -> None:
        for run in self._runs.values():
            run.line.stop()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=self._settings.shutdown_seconds)
        if unfinished:
            logger.warning("%d searches did not stop in time; their processes are ended", len(unfinished))
            self._executor.kill()
            await asyncio.wait(unfinished, timeout=self._settings.shutdown_seconds)

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        while not self._is_stopping:
            try:
                await step()
            except Exception:
                # A database that is away for a moment must not end the service's work for good.
                logger.exception("the runner failed; it goes on in %g s", POLL_SECONDS)
                await _wait(self._stopped, POLL_SECONDS)

    async def _dispatch(self) -> None:
        self._queue_grew.clear()
        while len(self._runs) < self._settings.searches and not self._is_stopping:
            claim = await self._table.claim(self._owner, self._settings.lease_seconds)
            if claim is None:
                break
            self._begin(claim)
        await _wait(self._queue_grew, POLL_SECONDS)

    async def _maintain(self) -> None:
        # Renewed before looking for expired ones: a pause of this process must not cost it its own.
        fences = {search_id: run.claim.fence for search_id, run in self._runs.items()}
        kept, cancelled = await self._table.renew(self._owner, fences, self._settings.lease_seconds)
        for search_id in fences:
            run = self._runs.get(search_id)
            if run is None or run.claim.fence != fences[search_id]:
                continue
            run.is_lost = search_id not in kept
            if run.is_lost or search_id in cancelled:
                run.line.stop()
        if await self._table.requeue_expired():
            logger.info("queued searches again whose service gave no sign of life")
            self.wake()
        await _wait(self._stopped, self._settings.heartbeat_seconds)

    async def _save(self) -> None:
        await self._reported.wait()
        self._reported.clear()
        for run in list(self._runs.values()):
            if run.unsaved and run.latest is not None:
                run.unsaved = False
                await self._table.progressed(run.claim.id, run.claim.fence, run.latest)

    def _begin(self, claim: Claim) -> None:
        def report(update: Update) -> None:
            run.latest = update
            run.unsaved = True
            self._reported.set()

        run = _Run(claim, self._progress.expect(report))
        if claim.cancel_requested:
            run.line.stop()
        self._runs[claim.id] = run
        run.task = asyncio.create_task(self._follow(run), name=f"zbv-search-{claim.id}")

    async def _follow(self, run: _Run) -> None:
        claim = run.claim
        logger.info("search %s starts (attempt %d)", claim.id, claim.attempts)
        try:
            await self._settle(run)
        except Exception:
            # Not settled, so its lease ends by itself and it is run again.
            logger.exception("the end of search %s could not be stored", claim.id)
        finally:
            self._progress.forget(run.line)
            del self._runs[claim.id]
            self.wake()

    async def _settle(self, run: _Run) -> None:
        """Wait for a search to end, and store what became of it."""
        claim, table = run.claim, self._table
        try:
            plan = await self._execute(run)
        except InfeasibleMemory as error:
            await table.ended(claim.id, claim.fence, "infeasible", problems.infeasible(error))
        except (BrokenExecutor, OSError) as error:
            await self._settle_crash(run, error)
        except Exception as error:
            logger.exception("search %s failed", claim.id)
            # The planner's own errors are meant to be read; others belong into the log.
            detail = str(error) if isinstance(error, ZbvError) else "The search failed; the log says why."
            await table.ended(claim.id, claim.fence, "failed", problems.document(problems.INTERNAL, detail))
        else:
            if self._is_stopping and not await self._is_cancelled(claim.id):
                await table.release(claim.id, claim.fence, await asyncio.to_thread(incumbent_of, plan))
                logger.info("search %s is queued again: the service stops", claim.id)
            else:
                await table.finished(claim.id, claim.fence, plan)
                logger.info("search %s found plan %s", claim.id, plan.summary.plan_id)

    async def _execute(self, run: _Run) -> NewPlan:
        claim = run.claim
        task = SearchTask(
            search_id=claim.id,
            problem=claim.problem,
            options=claim.options,
            incumbent=claim.incumbent,
            address=self._progress.address,
            token=run.line.token,
        )
        # Starting a process takes the calling thread some milliseconds, so it is not this one.
        future = await asyncio.to_thread(self._executor.submit, run_task, task, self._search)
        return await asyncio.wrap_future(future)

    async def _settle_crash(self, run: _Run, error: Exception) -> None:
        claim = run.claim
        if self._is_stopping:
            await self._table.release(claim.id, claim.fence, run.latest)
            return
        logger.warning("the process of search %s died: %s", claim.id, error)
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


def _is_dead(owner: str, mine: str) -> bool:
    """Whether an owner is a process of this machine that is no more."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    my_host = mine.rpartition(":")[0].rpartition(":")[0]
    if host != my_host or not rest.isdigit():
        return False
    process_id = int(rest)
    if process_id == os.getpid():
        return True  # an earlier process had our number: containers give the first one always the same
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
