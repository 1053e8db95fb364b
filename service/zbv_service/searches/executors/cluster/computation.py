"""The service's view of one search on a Dask cluster."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any

from distributed.scheduler import KilledWorker

from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.cluster.worker import Abandoned, Evicted, Found, OutOfMemory, Wanted
from zbv_service.searches.executors.task import Compute, SearchCrashed, SearchEvicted, SearchLost


class DaskComputation:
    """One search on a cluster.

    Parameters
    ----------
    submit
        Submits it to the cluster and waits for its outcome.
    look_now
        Polls the cluster at once.
    """

    def __init__(
        self,
        claim: Claim,
        function: Compute,
        on_update: Callable[[Update], None],
        look_now: Callable[[], None],
        submit: Callable[[DaskComputation], Coroutine[Any, Any, Outcome]],
    ):
        self._look_now = look_now
        self._submit = submit
        self._on_update = on_update
        self._is_stopped = False
        self._seen = 0
        self.claim = claim
        self.function = function
        self.token = secrets.token_hex(16)
        self.place: str | None = None
        """Identity of the worker that computes it, once the worker has said so."""
        self.allowed: frozenset[str] = frozenset()
        """Identities of the workers that may compute it, once it is submitted."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Ask the search to return its best plan, now or as soon as it begins."""
        self._is_stopped = True
        self._look_now()

    def kill(self) -> None:
        """Give the search up, because its thread cannot be killed. It occupies the thread until it stops."""
        if self.is_under_way:
            self.fail(SearchCrashed("it did not stop on request and was given up"))
        else:  # it waits in a queue of Dask, because a worker has died since it was submitted
            self.fail(SearchLost("no worker has begun it."))

    @property
    def is_under_way(self) -> bool:
        """Whether a worker has said that it computes the search."""
        return self.place is not None

    async def plan(self) -> Outcome:
        """Compute the plan; raises :class:`SearchCrashed`, :class:`SearchLost`, or the search's own error."""
        submitted = asyncio.ensure_future(self._submit(self))
        submitted.add_done_callback(self.take_outcome)
        try:
            return await self.outcome
        finally:
            submitted.cancel()

    @property
    def wanted(self) -> Wanted:
        """The request to its worker."""
        return Wanted(self._is_stopped, self._seen)

    def found(self, place: str, found: Found) -> None:
        """Take the answer of its worker."""
        self.place = place
        # Dask may have moved the search to another process, which numbers its reports from the beginning.
        if found.update is not None and found.number != self._seen:
            self._seen = found.number
            self._on_update(found.update)

    def fail(self, error: Exception) -> None:
        """End the search with an error, unless it has ended already."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def take_outcome(self, submitted: asyncio.Future[Outcome]) -> None:
        """Take the outcome that Dask reports."""
        if submitted.cancelled():
            return
        error = submitted.exception()
        if error is None:
            if not self.outcome.done():
                self.outcome.set_result(submitted.result())
        elif isinstance(error, CancelledError):
            self.fail(SearchLost("the Dask scheduler lost it."))
        elif isinstance(error, KilledWorker):
            self.fail(SearchCrashed("each worker that computed it died"))
        elif isinstance(error, OutOfMemory):
            self.fail(SearchCrashed("its worker ran out of memory"))
        elif isinstance(error, Evicted):
            self.fail(SearchEvicted(str(error)))
        elif isinstance(error, Abandoned):
            self.fail(SearchLost(str(error)))
        else:
            self.fail(error if isinstance(error, Exception) else SearchLost(repr(error)))
