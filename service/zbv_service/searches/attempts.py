"""A search that is computed here under one lease, and what becomes of it.

The attempt ends with its computation; what came of that is stored, however long the database is away, unless
somebody else has the search by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from zbv_solver.errors import ContradictedBound, InfeasibleMemory, ZbvError

from zbv_service import errors as problems
from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, SearchTable
from zbv_service.documents.packing import incumbent_of
from zbv_service.records.searches import Claim, NewPlan, Refusal, Update
from zbv_service.searches.executors.executor import Computation, SearchCrashed, SearchEvicted, SearchLost

RETRY_SECONDS = 1.0
"""How long to wait when the database is away."""
MOST_EVICTIONS = 20
"""A search whose worker is told to end so often before it gets any further is not given to another one."""

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Counts what happens to searches that run here."""

    def search_ended(self, state: str, method: str | None, gap: float | None, seconds: float) -> None:
        """A search ended: method and gap of its plan, None without one; seconds since it started here."""

    def bound_contradicted(self) -> None:
        """A search failed because a plan undercuts a bound."""

    def incumbent_refused(self) -> None:
        """A search could not use its stored incumbent."""


@dataclass(eq=False)
class Attempt:
    """A search that is computed here.

    Attributes
    ----------
    workers
        Threads that it may use.
    latest
        Its newest report.
    is_unsaved
        Whether that is not stored yet.
    started_at
        When it was seen to be computed, on the monotonic clock; it may wait for a place on a cluster before.
    stopped_at
        When it was told to stop; None while it is to go on.
    contradiction
        Why the search fails, once a report undercuts a stored bound.
    refusal
        Set once it is known that the search could not use its stored incumbent.
    """

    claim: Claim
    computation: Computation
    workers: int = 1
    latest: Update | None = None
    is_unsaved: bool = False
    made_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    stopped_at: float | None = None
    contradiction: ContradictedBound | None = None
    refusal: Refusal | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def stop(self) -> None:
        """Ask it to return what it has, and remember when it was asked first."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
        self.computation.stop()

    def hurry(self, patience: float, longest: float) -> None:
        """Stop it when its time limit is long over, and end its process when it does not stop.

        Parameters
        ----------
        patience
            Seconds that it gets to stop.
        longest
            Seconds after which a search without a time limit is stopped.
        """
        now = time.monotonic()
        if self.started_at is None and self.computation.is_under_way:
            self.started_at = now
        limit = self.claim.options.get("time_limit")
        if self.stopped_at is not None:
            if now - self.stopped_at > patience:
                self.computation.kill()
        elif self.started_at is not None:
            passed = now - self.started_at
            if passed > (longest if limit is None else limit + patience):
                logger.warning("search %s has run for %.0f s and is told to stop", self.claim.id, passed)
                self.stop()


class Endings:
    """Stores what becomes of attempts.

    Parameters
    ----------
    stopping
        Set once the service stops: then attempts end because of it, and the database may stay away.
    """

    def __init__(
        self,
        table: SearchTable,
        max_crashes: int,
        stopping: asyncio.Event,
        observer: Observer | None = None,
    ):
        self._table = table
        self._observer = observer
        self._max_crashes = max_crashes
        self._stopping = stopping

    async def settle(self, attempt: Attempt) -> bool:
        """Wait for the end of an attempt and store it; False when the search is somebody else's by then.

        Raises
        ------
        DatabaseAway
            When the service stops before the database is back: the lease ends by itself then.
        """
        store = await self._outcome(attempt)
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
                # Run again, it would come to the same; so it counts as a death, and there is an end to it.
                logger.exception("the end of search %s cannot be stored", attempt.claim.id)
                return await self._requeue(attempt, SearchCrashed("what came of it could not be stored"))
            await happened(self._stopping, RETRY_SECONDS)

    async def _outcome(self, attempt: Attempt) -> Callable[[], Awaitable[bool]]:
        """Wait for a computation to end; returns what stores that."""
        store = await self._computed(attempt)
        if attempt.contradiction is not None:
            return partial(self._fail_contradicted, attempt, attempt.contradiction)
        return store

    async def _computed(self, attempt: Attempt) -> Callable[[], Awaitable[bool]]:
        claim, table = attempt.claim, self._table
        try:
            plan = await attempt.computation.plan()
        except ContradictedBound as error:
            return partial(self._fail_contradicted, attempt, error)
        except InfeasibleMemory as error:
            return partial(table.ended, claim.id, claim.fence, "infeasible", problems.infeasible(error))
        except (SearchCrashed, SearchLost) as error:
            logger.warning("search %s lost its process: %s", claim.id, error)
            return partial(self._requeue, attempt, error)
        except Exception as error:
            logger.exception("search %s failed", claim.id)
            # The planner's own errors are meant to be read; others belong into the log.
            detail = str(error) if isinstance(error, ZbvError) else "The search failed; the log says why."
            document = problems.document(problems.INTERNAL, detail)
            return partial(table.ended, claim.id, claim.fence, "failed", document)
        self.note_refusal(attempt, plan.refusal)
        return partial(self._keep, attempt, plan)

    def note_refusal(self, attempt: Attempt, refusal: Refusal | None) -> None:
        """Log and count, once, that an attempt could not use its stored incumbent."""
        if refusal is None or attempt.refusal is not None:
            return
        attempt.refusal = refusal
        logger.warning(
            "search %s: its stored plan does not fit its problem, so it starts without: %s",
            attempt.claim.id,
            refusal.reason,
        )
        if self._observer is not None:
            self._observer.incumbent_refused()

    async def _fail_contradicted(self, attempt: Attempt, error: ContradictedBound) -> bool:
        """Fail a search whose plan undercuts a bound. It is not run again: that would hide the bug."""
        claim = attempt.claim
        document = problems.contradicted(error, f"/v1/searches/{claim.id}/problem")
        is_ours = await self._table.contradicted(claim.id, claim.fence, document)
        if is_ours:
            logger.error("search %s failed: %s", claim.id, error)
            if self._observer is not None:
                self._observer.bound_contradicted()
        return is_ours

    async def _keep(self, attempt: Attempt, plan: NewPlan) -> bool:
        """Store a plan; that of a search which was only stopped with its service is where it goes on."""
        claim = attempt.claim
        if self._stopping.is_set() and not await self._is_cancelled(claim.id):
            found = await asyncio.to_thread(incumbent_of, plan)
            is_ours, end = await self._table.release(claim.id, claim.fence, found), "is queued again"
        else:
            is_ours = await self._table.finished(claim.id, claim.fence, plan)
            end = f"found plan {plan.summary.plan_id}"
        logger.info("search %s %s", claim.id, end if is_ours else "is not ours any more")
        return is_ours

    async def _requeue(self, attempt: Attempt, error: SearchCrashed | SearchLost) -> bool:
        """Queue a search again whose process is gone, unless that was once too often and its own fault."""
        claim, found, most = attempt.claim, attempt.latest, self._max_crashes
        if self._stopping.is_set():
            return await self._table.release(claim.id, claim.fence, found)
        if isinstance(error, SearchCrashed):
            detail = (
                f"The process of this search died {most} times, so it is not started again. The last time "
                f"{error}. Most often memory ran out: try fewer microbatches or less effort."
            )
            document = problems.document(problems.SEARCH_CRASHED, detail)
            return await self._table.crashed(claim.id, claim.fence, found, most, document)
        if isinstance(error, SearchEvicted):
            detail = (
                f"{MOST_EVICTIONS} workers in a row were told to end before this search got any further, so "
                f"it is not started again. Most often memory ran out: try fewer microbatches or less effort."
            )
            document = problems.document(problems.SEARCH_CRASHED, detail)
            return await self._table.evicted(claim.id, claim.fence, found, MOST_EVICTIONS, document)
        return await self._table.release(claim.id, claim.fence, found, "process-lost")

    async def _is_cancelled(self, search_id: str) -> bool:
        record = await self._table.get(search_id)
        return record is not None and record.cancel_requested
