"""A connection to a Dask scheduler, and the state of its workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from distributed import Client

from zbv_service.records.searches import Outcome
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.worker import Evicted, describe, exchange, run_on_worker, welcome
from zbv_service.searches.executors.task import SearchCrashed, SearchEvicted, SearchLost

T = TypeVar("T")

LOOK_SECONDS = 0.25
"""Seconds between polls of a cluster …"""
LOOKED_AT_PER_LOOK = 25
"""… with this many workers. Larger clusters are polled less often, to limit the load on their scheduler."""
CONNECT_SECONDS, CALL_SECONDS, CLOSE_SECONDS = 5.0, 10.0, 0.25

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


class Cluster:
    """A connection to a scheduler, and the state of its workers."""

    def __init__(self, client: Client):
        self._client = client
        self._loop: asyncio.AbstractEventLoop = cast("Any", client.loop).asyncio_loop
        self._name = secrets.token_hex(16)
        self._mine = describe()
        self._workers: dict[str, _Worker] = {}

    @classmethod
    async def connect(cls, address: str) -> Cluster:
        """Connect to a scheduler; raises OSError or TimeoutError."""

        def connect() -> Client:
            return Client(  # type: ignore[no-untyped-call]
                address,
                timeout=CONNECT_SECONDS,
                set_as_default=False,
                name="zbv-service",
                direct_to_workers=False,
            )

        return cls(await asyncio.to_thread(connect))

    async def close(self) -> None:
        """Close the connection."""
        for asking in self._exchanges:
            asking.cancel()
        with suppress(OSError, TimeoutError, RuntimeError):
            await asyncio.to_thread(self._client.close, timeout=CLOSE_SECONDS)

    @property
    def room(self) -> int:
        """The number of searches that the usable workers have threads for."""
        return max(0, self.threads - sum(worker.others for worker in self._workers.values()))

    @property
    def threads(self) -> int:
        """The number of threads of the usable workers."""
        return sum(worker.threads for worker in self._usable.values())

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""
        if self._usable:
            return None
        differing = [worker.difference for worker in self._workers.values() if worker.difference]
        if not differing:
            return "The Dask cluster has no workers."
        return f"No worker of the Dask cluster can be used; of the first, {differing[0]}."

    @property
    def look_seconds(self) -> float:
        """Seconds between polls."""
        return LOOK_SECONDS * max(1.0, len(self._workers) / LOOKED_AT_PER_LOOK)

    @property
    def _usable(self) -> dict[str, _Worker]:
        return {place: worker for place, worker in self._workers.items() if worker.is_usable}

    @property
    def _exchanges(self) -> list[asyncio.Task[None]]:
        return [worker.asking for worker in self._workers.values() if worker.asking is not None]

    async def submit(self, computation: DaskComputation, patience: float) -> Outcome:
        """Submit a search to the usable workers, and return its plan."""
        usable = self._usable
        computation.allowed = frozenset(usable)
        workers = [worker.address for worker in usable.values()]
        if not workers:
            raise SearchLost("no worker can be used.")
        executor: Executor = self._client.get_executor(  # type: ignore[no-untyped-call]
            pure=False, retries=0, workers=workers, allow_other_workers=False
        )
        run = partial(run_on_worker, computation.claim, computation.function, computation.token)
        future = await asyncio.to_thread(lambda: executor.submit(run, self._name, patience))
        try:
            return await asyncio.wrap_future(future)
        except Evicted:
            # The next look may come later than the next search, which would wait in a queue of Dask.
            if (leaving := self._workers.get(computation.place or "")) is not None:
                leaving.difference = "it is ending"
            raise

    async def look(self, computations: Mapping[str, DaskComputation]) -> None:
        """Poll the workers, and exchange requests and reports with them.

        Raises
        ------
        OSError, TimeoutError, RuntimeError
            The scheduler does not answer.
        """
        if self._client.status != "running":
            raise OSError(f"the connection is {self._client.status}")
        info = await self._call(lambda: self._scheduler.identity(n_workers=-1))
        # A place identifies a process: a successor with the same name and address has another scratch folder.
        present = {
            f"{address} {found['local_directory']}": (address, found["nthreads"])
            for address, found in info["workers"].items()
        }
        gone = {place: self._workers.pop(place) for place in self._workers.keys() - present.keys()}
        for place in present.keys() - self._workers.keys():
            self._workers[place] = _Worker(*present[place])
        for computation in computations.values():
            if computation.place is None and computation.allowed and not computation.allowed & present.keys():
                computation.fail(SearchLost("the workers that could compute it are gone."))
        for place, worker in gone.items():
            if worker.asking is not None:
                worker.asking.cancel()
            await self._mourn(worker.address, [c for c in computations.values() if c.place == place])
        await self._exchange(computations)

    async def _difference(self, address: str) -> str | None:
        """Why a worker cannot be used: its versions differ from this service's. None if they match."""
        try:
            found = await self._on_worker(address, welcome)
        except (OSError, TimeoutError, RuntimeError):
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

    async def _mourn(self, address: str, computations: list[DaskComputation]) -> None:
        """End the searches of a worker that is gone.

        A worker that is stopped announces this to the scheduler first: Dask does so when it closes a worker,
        :func:`~zbv_service.searches.executors.cluster.worker.welcome` on SIGTERM. Without an announcement, a
        search may be the reason.
        """
        if not computations:
            return
        events = await self._call(lambda: self._scheduler.events(topic=address))
        logger.warning("the Dask worker %s is gone, with %d searches", address, len(computations))
        was_closed = any(event.get("status") in _CLOSING for _, event in events or ())
        for computation in computations:
            if was_closed:
                computation.fail(SearchEvicted(f"its worker {address} was closed."))
            else:
                computation.fail(SearchCrashed("its worker died"))

    @property
    def _scheduler(self) -> Any:
        if self._client.scheduler is None:
            raise OSError("the connection was closed")
        return self._client.scheduler

    async def _exchange(self, computations: Mapping[str, DaskComputation]) -> None:
        for place, worker in self._workers.items():
            if worker.asking is None and worker.difference is None:
                worker.asking = asyncio.create_task(self._ask(place, worker, computations))
        if exchanges := self._exchanges:
            # A worker that hangs must not delay the others.
            await asyncio.wait(exchanges, timeout=LOOK_SECONDS)

    async def _ask(self, place: str, worker: _Worker, computations: Mapping[str, DaskComputation]) -> None:
        try:
            if not worker.has_answered:
                worker.difference = await self._difference(worker.address)
                worker.has_answered = True
            if worker.difference is not None:
                return
            concerned = {token: c for token, c in computations.items() if c.place in (None, place)}
            wanted = {token: computation.wanted for token, computation in concerned.items()}
            held = await self._on_worker(worker.address, exchange, self._name, wanted)
            worker.others = held.others
            if held.is_leaving:
                worker.difference = "it is ending"
            for token, found in held.searches.items():
                concerned[token].found(place, found)
        except (OSError, TimeoutError, RuntimeError) as error:
            logger.info("the Dask worker %s does not answer: %s", worker.address, error or "not in time")
        finally:
            worker.asking = None

    async def _on_worker(self, address: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a worker while its tasks run; raises the function's errors."""
        answers = await self._call(
            lambda: self._client.run(function, *arguments, workers=[address], on_error="return")
        )
        answer = answers.get(address, OSError("the worker is gone"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _call(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of Dask in Dask's event loop, which belongs to another thread."""

        async def call() -> T:
            return await asyncio.wait_for(begin(), CALL_SECONDS)

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            # The time limit here is needed too, because a stopped loop never runs the coroutine.
            return await asyncio.wait_for(asyncio.wrap_future(future), 2 * CALL_SECONDS)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise OSError("the connection was closed") from None
