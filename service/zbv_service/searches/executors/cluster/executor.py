"""Searches on a Dask cluster.

The service connects only to the scheduler that its operator configured. Dask's connections carry pickled
objects: anyone who reaches the scheduler can run code on the cluster and in this service. So the scheduler
belongs on an isolated network, or behind TLS with its own certificates.

A lost scheduler loses no search: running searches are queued again with their best plans, and the service
tries to reconnect at growing intervals as long as it lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.connection import Cluster
from zbv_service.searches.executors.task import Compute, SearchLost

LEAST_PAUSE, MOST_PAUSE = 0.25, 10.0
"""First and longest pause in seconds between attempts to reach a scheduler; each pause doubles."""

logger = logging.getLogger(__name__)


class DaskExecutor:
    """Computes searches on those workers of a Dask cluster that run this service's version.

    Parameters
    ----------
    address
        Address of the scheduler: ``tcp://host:port`` or ``tls://host:port``. Dask's own configuration
        (``DASK_DISTRIBUTED__COMM__TLS__…``) has the certificates for TLS.
    most
        Most concurrent searches of this service; None for as many as the workers have threads.
    patience
        A worker gives its searches up after this many seconds without contact to the service.
    """

    def __init__(self, address: str, most: int | None, patience: float):
        self._address = address
        self._most = most
        self._patience = patience
        self._cluster: Cluster | None = None
        self._trouble: str | None = "The Dask scheduler has not been reached yet."
        self._computations: dict[str, DaskComputation] = {}
        self._due = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start connecting in the background."""
        for noisy in ("distributed", "distributed.client", "tornado"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)  # this module logs the important parts
        if self._address.startswith("tcp:"):
            logger.warning(
                "the connection to %s is not encrypted; anyone who reaches it can run code", self._address
            )
        self._supervisor = asyncio.create_task(self._supervise(), name="zbv-dask")

    async def stop(self) -> None:
        """Close the connection."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._disconnect("the service stops")

    def kill(self) -> None:
        """Give up every computation; the workers notice that nobody polls for them."""
        for computation in list(self._computations.values()):
            computation.fail(SearchLost("it did not stop in time."))

    @property
    def slots(self) -> int:
        """The number of searches of this service that can run at the same time."""
        room = 0 if self._cluster is None else self._cluster.room
        return room if self._most is None else min(room, self._most)

    @property
    def shared_slots(self) -> int:
        """The number of searches that all services together can run."""
        return 0 if self._cluster is None else self._cluster.threads

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""
        return self._trouble

    def expect(self, claim: Claim, compute: Compute, on_update: Callable[[Update], None]) -> DaskComputation:
        """Prepare a search for computation by some worker."""
        return DaskComputation(claim, compute, on_update, self._due.set, self._compute)

    async def _compute(self, computation: DaskComputation) -> Outcome:
        """Submit a computation and wait for its outcome."""
        cluster = self._cluster
        if cluster is None:
            raise SearchLost("the Dask scheduler is out of reach.")
        self._computations[computation.token] = computation
        try:
            submitted = asyncio.ensure_future(cluster.submit(computation, self._patience))
            submitted.add_done_callback(computation.take_outcome)
            try:
                return await computation.outcome
            finally:
                submitted.cancel()
        finally:
            del self._computations[computation.token]

    async def _supervise(self) -> None:
        pause = LEAST_PAUSE
        while True:
            try:
                if self._cluster is None:
                    self._cluster = await Cluster.connect(self._address)
                    logger.info("connected to the Dask scheduler %s", self._address)
                self._due.clear()
                await self._cluster.look(self._computations)
                self._trouble = self._cluster.trouble
                pause = LEAST_PAUSE
            except Exception as error:  # after any error the cluster may recover soon
                self._trouble = "The Dask scheduler does not answer."
                surprise = None if isinstance(error, (OSError, TimeoutError)) else error
                logger.warning(
                    "the Dask scheduler %s does not answer: %s; trying again in %g s",
                    self._address,
                    error or "not in time",
                    pause,
                    exc_info=surprise,
                )
                await self._disconnect("the scheduler is out of reach")
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._cluster.look_seconds):
                    await self._due.wait()

    async def _disconnect(self, why: str) -> None:
        cluster, self._cluster = self._cluster, None
        for computation in list(self._computations.values()):
            computation.fail(SearchLost(f"{why}."))
        if cluster is not None:
            await cluster.close()
