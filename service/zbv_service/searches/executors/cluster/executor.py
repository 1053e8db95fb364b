"""Searches on those workers of a Dask cluster that run this service's version.

Each search is a task of Dask. Calls of functions in the workers (:mod:`.worker`) carry reports and requests
to stop, and show a worker that its service is alive. Dask's events cannot replace them: its scheduler keeps
each event, and a report may have megabytes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from distributed import Client

from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.worker import Evicted, describe, exchange, run_on_worker, welcome
from zbv_service.searches.executors.task import Compute, SearchCrashed, SearchEvicted, SearchLost

LOOK_SECONDS = 0.25
"""Seconds between polls of a cluster …"""
LOOKED_AT_PER_LOOK = 25
"""… with this many workers. Larger clusters are polled less often, to limit the load on their scheduler."""
CONNECT_SECONDS, CALL_SECONDS, CLOSE_SECONDS = 5.0, 10.0, 0.25
LEAST_PAUSE, MOST_PAUSE = 0.25, 10.0
"""First and longest pause in seconds between attempts to reach a scheduler; each pause doubles."""
NO_ANSWER = (OSError, TimeoutError, RuntimeError)
"""What calls of Dask raise if the other side does not answer."""
_CLOSING = ("closing", "closing_gracefully")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker:
    """A worker process: ``others`` counts its searches for other services, ``asking`` is a running exchange.

    Its versions are known once it ``has_answered``; ``difference`` then says why it cannot be used, if so.
    """

    address: str
    threads: int
    has_answered: bool = False
    difference: str | None = None
    others: int = 0
    asking: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        return self.has_answered and self.difference is None


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
        self._name = secrets.token_hex(16)
        self._mine = describe()
        self._client: Client | None = None
        self._workers: dict[str, _Worker] = {}
        self._computations: dict[str, DaskComputation] = {}
        self._has_answered = False
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
        await self.disconnect("the service stops")

    def kill(self) -> None:
        """Give up every computation; the workers notice that nobody polls for them."""
        for computation in list(self._computations.values()):
            computation.fail(SearchLost("it did not stop in time."))

    @property
    def slots(self) -> int:
        """The number of searches of this service that can run at the same time."""
        room = max(0, self.shared_slots - sum(worker.others for worker in self._workers.values()))
        return room if self._most is None else min(room, self._most)

    @property
    def shared_slots(self) -> int:
        """The number of searches that all services together can run: the threads of the usable workers."""
        return sum(worker.threads for worker in self._usable.values())

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""
        if not self._has_answered:
            return "The Dask scheduler does not answer."
        if self._usable:
            return None
        differing = [worker.difference for worker in self._workers.values() if worker.difference]
        if not differing:
            return "The Dask cluster has no workers."
        return f"No worker of the Dask cluster can be used; of the first, {differing[0]}."

    def expect(self, claim: Claim, compute: Compute, on_update: Callable[[Update], None]) -> DaskComputation:
        """Prepare a search for computation by some worker."""
        return DaskComputation(claim, compute, on_update, self._due.set, self._submit)

    @property
    def _usable(self) -> dict[str, _Worker]:
        return {place: worker for place, worker in self._workers.items() if worker.is_usable}

    async def connect(self) -> None:
        """Connect to the scheduler; raises OSError or TimeoutError."""
        client = Client(  # type: ignore[no-untyped-call]
            self._address,
            asynchronous=True,
            timeout=CONNECT_SECONDS,
            set_as_default=False,
            name="zbv-service",
            direct_to_workers=False,
        )
        self._client = await cast("Any", client)
        logger.info("connected to the Dask scheduler %s", self._address)

    async def disconnect(self, why: str) -> None:
        """Close the connection and give up every computation."""
        client, self._client = self._client, None
        self._has_answered = False
        for computation in list(self._computations.values()):
            computation.fail(SearchLost(f"{why}."))
        for worker in self._workers.values():
            if worker.asking is not None:
                worker.asking.cancel()
        self._workers = {}
        if client is not None:
            with suppress(*NO_ANSWER):
                await asyncio.wait_for(cast("Any", client).close(CLOSE_SECONDS), 2 * CLOSE_SECONDS)

    async def _supervise(self) -> None:
        pause = LEAST_PAUSE
        while True:
            try:
                if self._client is None:
                    await self.connect()
                self._due.clear()
                await self.look()
                pause = LEAST_PAUSE
            except Exception as error:  # after any error the cluster may recover soon
                surprise = None if isinstance(error, (OSError, TimeoutError)) else error
                logger.warning(
                    "the Dask scheduler %s does not answer: %s; trying again in %g s",
                    self._address,
                    error or "not in time",
                    pause,
                    exc_info=surprise,
                )
                await self.disconnect("the scheduler is out of reach")
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS * max(1.0, len(self._workers) / LOOKED_AT_PER_LOOK)):
                    await self._due.wait()

    async def _submit(self, computation: DaskComputation) -> Outcome:
        """Submit a search to the usable workers, and return what it has found."""
        usable = self._usable
        if self._client is None or not usable:
            raise SearchLost("no worker can be used.")
        computation.allowed = frozenset(usable)
        future = self._client.submit(
            run_on_worker,
            computation.claim,
            computation.function,
            computation.token,
            self._name,
            self._patience,
            pure=False,
            retries=0,
            workers=[worker.address for worker in usable.values()],
            allow_other_workers=False,
        )
        self._computations[computation.token] = computation
        try:
            return cast("Outcome", await future)
        except Evicted:
            # The next look may come later than the next search, which would wait in a queue of Dask.
            if (leaving := self._workers.get(computation.place or "")) is not None:
                leaving.difference = "it is ending"
            raise
        finally:
            del self._computations[computation.token]
            future.release()  # type: ignore[no-untyped-call]

    async def look(self) -> None:
        """Poll the workers, and exchange requests and reports with them.

        Raises
        ------
        OSError, TimeoutError, RuntimeError
            The scheduler does not answer.
        """
        info = await self._of_scheduler("identity", n_workers=-1)
        # A place identifies a process: a successor with the same name and address has another scratch folder.
        present = {
            f"{address} {found['local_directory']}": (address, found["nthreads"])
            for address, found in info["workers"].items()
        }
        gone = {place: self._workers.pop(place) for place in self._workers.keys() - present.keys()}
        for place in present.keys() - self._workers.keys():
            self._workers[place] = _Worker(*present[place])
        for computation in self._computations.values():
            if computation.place is None and not computation.allowed & present.keys():
                computation.fail(SearchLost("the workers that could compute it are gone."))
        for place, worker in gone.items():
            if worker.asking is not None:
                worker.asking.cancel()
            await self._mourn(worker.address, place)
        for place, worker in self._workers.items():
            if worker.asking is None and worker.difference is None:
                worker.asking = asyncio.create_task(self._ask(place, worker))
        if asking := [worker.asking for worker in self._workers.values() if worker.asking is not None]:
            await asyncio.wait(asking, timeout=LOOK_SECONDS)  # a worker that hangs must not delay the others
        self._has_answered = True

    async def _mourn(self, address: str, place: str) -> None:
        """End the searches of a worker that is gone.

        A worker that is stopped announces this to the scheduler first: Dask does so when it closes a worker,
        :func:`~zbv_service.searches.executors.cluster.worker.welcome` on SIGTERM. Without an announcement, a
        search may be the reason.
        """
        computations = [each for each in self._computations.values() if each.place == place]
        if not computations:
            return
        events = await self._of_scheduler("events", topic=address)
        logger.warning("the Dask worker %s is gone, with %d searches", address, len(computations))
        was_closed = any(event.get("status") in _CLOSING for _, event in events or ())
        for computation in computations:
            if was_closed:
                computation.fail(SearchEvicted(f"its worker {address} was closed."))
            else:
                computation.fail(SearchCrashed("its worker died"))

    async def _ask(self, place: str, worker: _Worker) -> None:
        """Exchange requests and reports with a worker, whose versions are compared first."""
        try:
            if not worker.has_answered:
                worker.difference = await self._difference(worker.address)
                worker.has_answered = True
            if worker.difference is not None:
                return
            concerned = {token: c for token, c in self._computations.items() if c.place in (None, place)}
            wanted = {token: computation.wanted for token, computation in concerned.items()}
            held = await self._on_worker(worker.address, exchange, self._name, wanted)
            worker.others = held.others
            if held.is_leaving:
                worker.difference = "it is ending"
            for token, found in held.searches.items():
                concerned[token].found(place, found)
        except NO_ANSWER as error:
            logger.info("the Dask worker %s does not answer: %s", worker.address, error or "not in time")
        finally:
            worker.asking = None

    async def _difference(self, address: str) -> str | None:
        """Why a worker cannot be used: its versions differ from this service's. None if they match."""
        try:
            found = await self._on_worker(address, welcome)
        except NO_ANSWER:
            raise
        except Exception as error:  # most often an import fails; any error is logged once
            difference = f"it cannot load zbv: {error}"
        else:
            different = [name for name, value in self._mine.items() if found.get(name) != value]
            if not different:
                return None
            difference = ", ".join(
                f"{name} is {found.get(name)} and must be {self._mine[name]}" for name in different
            )
        logger.warning("the Dask worker %s is not used: %s", address, difference)
        return difference

    async def _of_scheduler(self, name: str, **arguments: Any) -> Any:
        """The scheduler's answer to a call."""
        client = self._client
        if client is None or client.scheduler is None or client.status != "running":
            raise OSError("the connection was closed")
        async with asyncio.timeout(CALL_SECONDS):
            return await getattr(client.scheduler, name)(**arguments)

    async def _on_worker(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a worker while its tasks run; raises the function's errors."""
        if self._client is None:
            raise OSError("the connection was closed")
        async with asyncio.timeout(CALL_SECONDS):
            answers = await self._client.run(function, *arguments, workers=[address], on_error="return")
        answer = answers.get(address, OSError("the worker is gone"))
        if isinstance(answer, Exception):
            raise answer
        return answer
