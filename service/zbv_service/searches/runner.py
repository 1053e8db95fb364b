"""Runs the queued searches of the database: leases them, starts them in an executor, follows them.

The database is the source of truth: if a runner dies at any moment, another one continues from the rows. A
runner leases every search that it runs and renews the leases. Any runner requeues searches with expired
leases. On the same machine, runners recognise the leases of dead processes at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Set
from dataclasses import replace
from pathlib import Path

from zbv_solver.errors import ContradictedBound

from zbv_service.compute.waiting import Loops, happened
from zbv_service.database import DatabaseAway, SearchTable
from zbv_service.observability.context import SEARCH_ID
from zbv_service.observability.metrics import Metrics
from zbv_service.records.searches import FINISHED, Claim, SearchKind, Update
from zbv_service.searches.attempts import RETRY_SECONDS, Attempt, Endings
from zbv_service.searches.executors.local import LocalExecutor
from zbv_service.searches.executors.task import SearchExecutor
from zbv_service.searches.kinds import Kind
from zbv_service.settings import MEBIBYTE, Settings, cores, parse_choice

POLL_SECONDS = 0.25
"""Seconds between queries for searches and requests to stop that another service accepted."""

USEFUL_WORKERS = 2
"""Most threads that a search can use: it runs two chains."""

_STORE_SECONDS = 10.0
"""Longest wait, when a service ends, for the stored ends of searches that had to be killed."""

logger = logging.getLogger(__name__)


class Runner:
    """Runs as many searches as its executor has slots, between :meth:`start` and :meth:`stop`.

    Parameters
    ----------
    kinds
        What search processes run for each kind.
    """

    def __init__(
        self,
        table: SearchTable,
        settings: Settings,
        metrics: Metrics,
        kinds: Mapping[SearchKind, Kind],
    ):
        self._table = table
        self._metrics = metrics
        self._settings = settings
        self._kinds = kinds
        self._owner = new_owner()
        self._cores = cores()
        self._executor = make_executor(settings)
        self._attempts: set[Attempt] = set()
        self._queue_grew = asyncio.Event()
        self._reported = asyncio.Event()
        self._loops = Loops(DatabaseAway, RETRY_SECONDS)
        memory = settings.search_memory if isinstance(self._executor, LocalExecutor) else None
        self._endings = Endings(table, settings, self._loops.stopped, metrics, memory)
        self._maintained = self._watched_since = float("-inf")

    async def start(self) -> None:
        """Requeue the searches of dead services on this machine, and start."""
        await self._executor.start()
        dead = {owner for owner in await self._table.owners() if is_dead(owner, self._owner)}
        if dead:
            count = await self._table.requeue_lost(dead)
            logger.info("queued %d searches of a dead service again", count)
        steps = {"dispatch": self._dispatch, "leases": self._maintain}
        self._loops.start({**steps, "requests to stop": self._heed, "progress": self._save})

    async def stop(self) -> None:
        """Stop every search, requeue it with its best plan, and end the processes."""
        for event in (self._loops.stopped, self._queue_grew, self._reported):
            event.set()
        await self._loops.stop(self._settings.shutdown_seconds)
        await self._stop_attempts()
        self._endings.kill()
        await self._executor.stop()

    def wake(self) -> None:
        """Notice that a search was queued."""
        if len(self._attempts) < self._executor.slots:  # otherwise the end of a running search wakes it
            self._queue_grew.set()

    def cancel(self, search_id: str) -> None:
        """Stop a search at once if it runs here; any other runner reads the request from the database."""
        for attempt in self._attempts:
            if attempt.claim.id == search_id:
                attempt.stop()

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""
        return self._executor.trouble

    @property
    def is_working(self) -> bool:
        """Whether all loops are alive."""
        return self._loops.is_working

    async def _stop_attempts(self) -> None:
        for attempt in self._attempts:
            attempt.stop()
        tasks = [attempt.task for attempt in self._attempts if attempt.task is not None]
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=self._settings.shutdown_seconds)
        if unfinished:
            logger.warning("%d searches did not stop in time and are killed", len(unfinished))
            self._executor.kill()
            await asyncio.wait(unfinished, timeout=_STORE_SECONDS)

    async def _dispatch(self) -> None:
        self._queue_grew.clear()
        slots = self._executor.slots
        # A cancelled search only has to store its best plan, which need not wait for a free slot.
        while len(self._attempts) < 2 * slots and not self._loops.stopped.is_set():
            claim, (full, most) = None, self._callers_without_turn(slots)
            if len(self._attempts) < slots or full:
                claim = await self._table.claim(
                    self._owner,
                    self._settings.lease_seconds,
                    share=self._settings.max_running_per_token,
                    full=full,
                    most=most,
                )
            if claim is None and len(self._attempts) >= slots:
                claim = await self._table.claim(
                    self._owner, self._settings.lease_seconds, cancelled_only=True
                )
            if claim is None:
                break
            self._begin(claim)
        await happened(self._queue_grew, POLL_SECONDS)

    def _callers_without_turn(self, slots: int) -> tuple[Set[str | None], int | None]:
        """The caller that runs the searches of all slots, and the most searches that a caller may run.

        One more slot is for others: an attempt that was cancelled or lost counts until its computation has
        ended. Slots that services share cannot be more, so there a caller runs one search less, in all
        services.
        """
        shared = self._executor.shared_slots
        if self._settings.auth != "tokens":
            return frozenset(), None
        if shared is not None:
            return frozenset(), max(1, shared - 1)
        callers = {attempt.claim.created_by for attempt in self._attempts}
        is_alone = len(callers) == 1 and len(self._attempts) == slots
        return callers if is_alone else frozenset(), None

    async def _maintain(self) -> None:
        # Renew before requeueing expired leases, so that a pause of this process does not lose its own ones.
        held = list(self._attempts)
        kept = await self._table.renew(self._owner, _fences(held), self._settings.lease_seconds)
        _stop_lost(held, kept)
        if self._may_judge() and await self._table.requeue_lost():
            logger.info("queued searches of a silent service again")
            self.wake()
        await happened(self._loops.stopped, self._settings.heartbeat_seconds)

    def _may_judge(self) -> bool:
        """Whether owners can be blamed for expired leases.

        While the database was away, nobody could renew; afterwards all owners get time to do so.
        """
        now, lease = time.monotonic(), self._settings.lease_seconds
        if self._maintained > float("-inf") and now - self._maintained > lease / 2:
            self._watched_since = now
        self._maintained = now
        return now - self._watched_since >= lease

    async def _heed(self) -> None:
        """Stop searches that any service cancelled or took over, and those past their time limit."""
        for attempt in self._attempts:
            attempt.hurry(self._settings.stop_seconds, self._settings.max_time_limit)
        held = list(self._attempts)
        fences = _fences(held)
        unwanted = await self._table.unwanted(fences)
        _stop_lost(held, fences.keys() - unwanted)
        await happened(self._loops.stopped, POLL_SECONDS)

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
            if update.refusal is not None:
                self._endings.note_refusal(attempt, update.refusal)
            self._reported.set()

        claim = replace(claim, options={**claim.options, "workers": self._workers()})
        attempt = Attempt(claim, self._executor.expect(claim, self._kinds[claim.kind].compute, report))
        if claim.cancel_requested:
            attempt.stop()
        self._attempts.add(attempt)
        attempt.task = asyncio.create_task(self._follow(attempt), name=f"zbv-search-{claim.id}")

    def _workers(self) -> int:
        """Threads for the next search: the cores of this machine that no search uses."""
        if self._settings.search_workers is not None:
            return self._settings.search_workers
        if not isinstance(self._executor, LocalExecutor):
            return 1  # a slot on a cluster is one thread
        used: int = sum(attempt.claim.options["workers"] for attempt in self._attempts)
        return max(1, min(USEFUL_WORKERS, self._cores - used))

    async def _follow(self, attempt: Attempt) -> None:
        claim = attempt.claim
        SEARCH_ID.set(claim.id)  # for the log lines of this task only
        logger.info("search %s starts (attempt %d)", claim.id, claim.attempts)
        try:
            if await self._endings.settle(attempt):
                record = await self._table.get(claim.id)
                if record is not None and record.state in FINISHED:
                    seconds = time.monotonic() - attempt.made_at
                    labels = record.state, family(record.method)
                    self._metrics.search_seconds.labels(*labels).observe(seconds)
                    if record.gap is not None:
                        self._metrics.search_gap.observe(record.gap)
        except DatabaseAway as error:
            logger.warning("search %s: %s", claim.id, error)
        except Exception:
            # Without a stored end, the lease expires and the search runs again.
            logger.exception("the end of search %s could not be stored", claim.id)
        finally:
            self._attempts.remove(attempt)
            self.wake()


def family(method: str | None) -> str:
    """The first word of a method, which gives few labels however methods are combined and numbered."""
    words = (method or "").replace(":", " ").replace("+", " ").split()
    return words[0].lower()[:40] if words else "none"


def _fences(attempts: Collection[Attempt]) -> dict[str, int]:
    """The newest fence of each search: a lost search may be claimed again while its old attempt stops."""
    # Of several entries for a search, the last one stays, which has the largest fence.
    return dict(sorted((attempt.claim.id, attempt.claim.fence) for attempt in attempts))


def _stop_lost(attempts: Collection[Attempt], kept: Set[str]) -> None:
    """Stop attempts that lost their lease, and attempts that a newer one has replaced."""
    fences = _fences(attempts)
    for attempt in attempts:
        claim = attempt.claim
        if claim.id not in kept or claim.fence != fences[claim.id]:
            attempt.stop()


def make_executor(settings: Settings) -> SearchExecutor:
    """The executor configured in the settings."""
    choice = parse_choice(settings.executor)
    if choice.scheduler is None:
        return LocalExecutor(
            choice.processes or settings.searches,
            preload=settings.preload == "at-start",
            memory=settings.search_memory * MEBIBYTE,
        )
    # Dask is an optional dependency.
    from zbv_service.searches.executors.cluster.executor import DaskExecutor

    most = settings.searches if "searches" in settings.model_fields_set else None
    # Workers give up before the lease expires. Otherwise a search could wait for a slot that its
    # former attempt still occupies.
    return DaskExecutor(choice.scheduler, most, patience=settings.lease_seconds / 2)


def new_owner(process_id: int | None = None) -> str:
    """A name for a process that owns leases, by default this one: ``machine:process id:random``.

    Other runners on the same machine can tell from it whether the owner is dead.
    """
    return f"{_machine()}:{os.getpid() if process_id is None else process_id}:{secrets.token_hex(8)}"


def is_dead(owner: str, mine: str) -> bool:
    """Whether an owner is a dead process of this machine; False for owners on other machines."""
    machine, process_id = _parts(owner)
    if machine != _parts(mine)[0] or not process_id.isdigit() or owner == mine:
        return False
    if int(process_id) == os.getpid():
        return True  # an earlier process had our id, as the first process of every container does
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """The scope of a process id: boot and process namespace.

    The host name alone is not enough: containers may share their host's, and cloned machines have the same.
    """
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space = boot = ""
    return f"{socket.gethostname()[:100]}/{boot}/{space}"


def _parts(owner: str) -> tuple[str, str]:
    machine, _, process_id = owner.rpartition(":")[0].rpartition(":")
    return machine, process_id
