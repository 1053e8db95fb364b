"""An attempt computes a search under one lease, and stores its outcome.

The attempt ends with its computation. Its outcome is stored even if the database is away for long, unless
another service has claimed the search by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from zbv_solver.errors import ContradictedBound, InfeasibleMemory, NoLayoutFits, ZbvError
from zbv_solver.numerals import figure

from zbv_service.compute.processes import IsolatedProcesses
from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, SearchTable
from zbv_service.documents.problems import incumbent_of
from zbv_service.errors import (
    INFEASIBLE_MEMORY,
    INTERNAL,
    SEARCH_CRASHED,
    TIME_LIMIT,
    TOO_MUCH_MEMORY,
    contradicted,
    error_document,
    infeasible,
)
from zbv_service.observability.metrics import Metrics
from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import (
    Computation,
    SearchCrashed,
    SearchEvicted,
    SearchLost,
    plan_of_incumbent,
)
from zbv_service.settings import MEBIBYTE, Settings

RETRY_SECONDS = 1.0
"""Seconds between attempts to reach a database that is away."""
KEEP_SECONDS = 120.0
"""Time for making a plan of the best orders of a search that was killed; the largest take 30 s."""
MOST_EVICTIONS = 20
"""A search fails after this many evictions in a row without progress."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempt:
    """A search that this service computes under one lease."""

    claim: Claim
    computation: Computation
    latest: Update | None = None
    """The newest report."""
    is_unsaved: bool = False
    """Whether the newest report is not stored yet."""
    made_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """When the computation was first seen running, on the monotonic clock; it may wait for a cluster
    worker."""
    stopped_at: float | None = None
    """When the search was asked to stop; None before."""
    was_killed: bool = False
    """Whether it did not stop, so that its process was killed."""
    contradiction: ContradictedBound | None = None
    """The error that fails the search, once a report undercuts a stored bound."""
    refusal: Refusal | None = None
    """Set if the search could not use its stored incumbent."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def stop(self) -> None:
        """Ask the search to return its best plan, and remember when it was asked first."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        self.computation.stop()

    def hurry(self, patience: float, longest: float) -> None:
        """Stop a search well past its time limit, and kill its process if it does not stop.

        Parameters
        ----------
        patience
            Seconds that the search gets to stop.
        longest
            Time limit in seconds of a search without its own.
        """
        now = time.monotonic()
        if self.started_at is None and self.computation.is_under_way:
            self.started_at = now
        limit = self.claim.options.get("time_limit")
        if self.stopped_at is not None:
            if now - self.stopped_at > patience:
                self.was_killed = True
                self.computation.kill()
        elif self.started_at is not None:
            passed = now - self.started_at
            if passed > (longest if limit is None else limit + patience):
                logger.warning("search %s has run for %.0f s and is asked to stop", self.claim.id, passed)
                self.stop()


class Endings:
    """Stores the outcomes of attempts.

    Parameters
    ----------
    stopping
        Set when the service stops: attempts end for this reason, and nobody waits for the database.
    memory
        MiB that a search may take, if this service limits it.
    """

    def __init__(
        self,
        table: SearchTable,
        settings: Settings,
        stopping: asyncio.Event,
        metrics: Metrics,
        memory: int | None,
    ):
        self._table = table
        self._metrics = metrics
        self._settings = settings
        self._stopping = stopping
        self._memory = memory
        self._processes = IsolatedProcesses(memory=settings.search_memory * MEBIBYTE)

    def kill(self) -> None:
        """End the processes that make plans of incumbents."""
        self._processes.kill()

    async def settle(self, attempt: Attempt) -> bool:
        """Wait for the end of an attempt and store it; False if another service holds the search by then.

        Raises
        ------
        DatabaseAway
            The service stops before the database is back. The lease then expires.
        """
        store = await self._outcome(attempt)
        if attempt.contradiction is not None:
            store = partial(self._fail_contradicted, attempt, attempt.contradiction)
        while True:
            try:
                return await store()
            except DatabaseAway as error:
                if self._stopping.is_set():
                    raise
                logger.warning("the end of search %s is not stored yet: %s", attempt.claim.id, error)
            except ContradictedBound as error:
                store = partial(self._fail_contradicted, attempt, error)
                continue
            except Exception:
                # Another attempt would probably fail alike, so this counts as a crash, and crashes are
                # limited.
                logger.exception("the end of search %s cannot be stored", attempt.claim.id)
                return await self._requeue(attempt, SearchCrashed("its outcome could not be stored"))
            await happened(self._stopping, RETRY_SECONDS)

    async def _outcome(self, attempt: Attempt) -> Callable[[], Awaitable[bool]]:
        """Wait for a computation to end; returns the function that stores its outcome."""
        claim, table = attempt.claim, self._table
        try:
            found = await attempt.computation.plan()
        except ContradictedBound as error:
            return partial(self._fail_contradicted, attempt, error)
        except InfeasibleMemory as error:
            return partial(table.ended, claim.id, claim.fence, "infeasible", infeasible(error))
        except NoLayoutFits as error:
            document = error_document(INFEASIBLE_MEMORY, str(error))
            return partial(table.ended, claim.id, claim.fence, "infeasible", document)
        except (SearchCrashed, SearchLost) as error:
            logger.warning("search %s lost its process: %s", claim.id, error)
            return partial(self._requeue, attempt, error)
        except MemoryError:
            detail = f"The search needs more memory than there is. {self._advice}"
            if self._memory is not None:
                detail = (
                    f"The search needs more than {figure(self._memory)} MiB of memory, the limit of this "
                    f"service (--search-memory). {self._advice}"
                )
            document = error_document(TOO_MUCH_MEMORY, detail)
            return partial(table.killed, claim.id, claim.fence, document)
        except Exception as error:
            logger.exception("search %s failed", claim.id)
            # The planner's own errors are written for users; others belong in the log.
            detail = str(error) if isinstance(error, ZbvError) else "The search failed; see the log."
            document = error_document(INTERNAL, detail)
            return partial(table.ended, claim.id, claim.fence, "failed", document)
        if found.refusal is not None:
            self.note_refusal(attempt, found.refusal)
        return partial(self._keep, attempt, found)

    def note_refusal(self, attempt: Attempt, refusal: Refusal) -> None:
        """Log and count once that an attempt could not use its stored incumbent."""
        if attempt.refusal is not None:
            return
        attempt.refusal = refusal
        logger.warning(
            "search %s starts without its stored plan, which does not fit its problem: %s",
            attempt.claim.id,
            refusal.reason,
        )
        self._metrics.refused_incumbents.inc()

    async def _fail_contradicted(self, attempt: Attempt, error: ContradictedBound) -> bool:
        """Fail a search with a plan that undercuts a bound. Another attempt would hide the bug."""
        claim = attempt.claim
        document = contradicted(error, f"/v1/searches/{claim.id}/problem")
        is_ours = await self._table.contradicted(claim.id, claim.fence, document)
        if is_ours:
            logger.error("search %s failed: %s", claim.id, error)
            self._metrics.contradicted_bounds.inc()
        return is_ours

    async def _keep(self, attempt: Attempt, found: Outcome) -> bool:
        """Store a result. If only the service's stop ended the search, a plan becomes its incumbent."""
        claim = attempt.claim
        if self._stopping.is_set() and not await self._is_cancelled(claim.id):
            known = None if found.answer is not None else await asyncio.to_thread(incumbent_of, found)
            is_ours, end = await self._table.requeue(claim.id, claim.fence, known), "was queued again"
        else:
            without_plan = None
            if not found.plans:
                limit = f"The time limit of {self._limit_of(claim):g} s passed before a layout was planned."
                way = "Raise options.time_limit, or fix parts, such as tensor_parallel and expert_parallel."
                without_plan = error_document(TIME_LIMIT, f"{limit} {way}")
            is_ours = await self._table.finished(claim.id, claim.fence, found, without_plan)
            end = f"found {', '.join(f'plan {plan.summary.plan_id}' for plan in found.plans) or 'no plan'}"
        logger.info("search %s %s", claim.id, end if is_ours else "now belongs to another service")
        return is_ours

    async def _requeue(self, attempt: Attempt, error: SearchCrashed | SearchLost) -> bool:
        """Requeue a search that lost its process, or fail it if this happens too often."""
        claim, found = attempt.claim, attempt.latest
        if self._stopping.is_set():
            return await self._table.requeue(claim.id, claim.fence, found)
        if attempt.was_killed or await self._is_cancelled(claim.id):
            return await self._end(attempt)
        if isinstance(error, SearchCrashed):
            most, reason = self._settings.max_crashes, "process-died"
            what = (
                f"The process of this search died {most} times, so it was not started again. The last time "
                f"{error}."
            )
        elif isinstance(error, SearchEvicted):
            most, reason = MOST_EVICTIONS, "worker-ended"
            what = (
                f"{most} workers in a row were stopped before this search made progress, so it was not "
                f"started again."
            )
        else:
            return await self._table.requeue(claim.id, claim.fence, found, "process-lost")
        memory = (
            "" if self._memory is None else f", of which a search may take {figure(self._memory)} MiB here"
        )
        detail = f"{what} Most often memory ran out{memory}. {self._advice}"
        document = error_document(SEARCH_CRASHED, detail)
        return await self._table.requeue(claim.id, claim.fence, found, reason, most, document)

    async def _end(self, attempt: Attempt) -> bool:
        """End a search whose process did not stop, with its best plan if it has one."""
        claim = attempt.claim
        incumbent = claim.incumbent if attempt.latest is None else attempt.latest.incumbent
        if incumbent is not None:
            try:
                plan = await self._plan_of(replace(claim, incumbent=incumbent))
            except Exception as error:  # the search ends without a plan then
                logger.warning("the best plan of search %s cannot be kept: %s", claim.id, error)
            else:
                return await self._table.finished(claim.id, claim.fence, plan)
        detail = (
            f"The search did not stop within {self._settings.stop_seconds:g} s after its time limit of "
            f"{self._limit_of(claim):g} s, so its process was ended; it left no plan. {self._advice}"
        )
        return await self._table.killed(claim.id, claim.fence, error_document(TIME_LIMIT, detail))

    async def _plan_of(self, claim: Claim) -> Outcome:
        """The plan of an incumbent, made in another process; raises TimeoutError, or its errors."""
        future = self._processes.submit(plan_of_incumbent, claim)
        try:
            async with asyncio.timeout(KEEP_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self._processes.kill_process_of(future)
            raise

    def _limit_of(self, claim: Claim) -> float:
        """Seconds that a search may take."""
        limit: float | None = claim.options.get("time_limit")
        return self._settings.max_time_limit if limit is None else limit

    @property
    def _advice(self) -> str:
        return "Try fewer microbatches or less effort; for layouts, fix parts of the layout."

    async def _is_cancelled(self, search_id: str) -> bool:
        record = await self._table.get(search_id)
        return record is not None and record.cancel_requested
