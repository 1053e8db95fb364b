"""Searches in processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from functools import partial

from zbv_service.compute.processes import IsolatedProcesses
from zbv_service.records.searches import NewPlan, Update
from zbv_service.searches.executors.connection import run_connected
from zbv_service.searches.executors.executor import SearchCrashed
from zbv_service.searches.executors.progress import ProgressServer
from zbv_service.searches.executors.task import SearchFunction, SearchTask


class LocalExecutor:
    """Computes searches in processes of this machine, one each.

    Parameters
    ----------
    slots
        How many at the same time.
    preload
        Whether to have processes ready to be forked before the first search comes.
    """

    def __init__(self, slots: int, *, preload: bool = True):
        self._slots = slots
        self._preload = preload
        self._processes = IsolatedProcesses()
        self._progress = ProgressServer()

    async def start(self) -> None:
        """Listen for the reports of searches, and make ready for them."""
        await self._progress.start()
        if self._preload:
            await asyncio.to_thread(self._processes.prepare)

    async def stop(self) -> None:
        """Hang up, and end the processes once their tasks have ended."""
        await self._progress.close()
        self._processes.shutdown(wait=False, cancel_futures=True)

    def kill(self) -> None:
        """End every process now."""
        self._processes.kill()

    @property
    def slots(self) -> int:
        """How many searches there is room for."""
        return self._slots

    @property
    def trouble(self) -> str | None:
        """None: a process can always be started."""
        return None

    def expect(
        self, task: SearchTask, search: SearchFunction, on_update: Callable[[Update], None]
    ) -> LocalComputation:
        """A search that is to be computed in a process of its own."""
        return LocalComputation(self._processes, self._progress, task, search, on_update)


class LocalComputation:
    """One search in a process of its own."""

    def __init__(
        self,
        processes: IsolatedProcesses,
        progress: ProgressServer,
        task: SearchTask,
        search: SearchFunction,
        on_update: Callable[[Update], None],
    ):
        self._processes = processes
        self._progress = progress
        self._task = task
        self._search = search
        self._line = progress.expect(on_update)
        self._future: Future[NewPlan] | None = None
        self._was_killed = False

    def stop(self) -> None:
        """Ask the search to return what it has, now or as soon as it begins."""
        self._line.stop()

    def kill(self) -> None:
        """End its process."""
        if self._future is not None:
            self._was_killed = True
            self._processes.kill_process_of(self._future)

    @property
    def is_under_way(self) -> bool:
        """Whether its process has called."""
        return self._line.writer is not None

    async def plan(self) -> NewPlan:
        """Compute it; raises :class:`SearchCrashed`, or what the search raised."""
        run = partial(run_connected, self._task, self._search, self._progress.address, self._line.token)
        try:
            # Starting a process takes the calling thread some milliseconds, so it is not this one.
            self._future = await asyncio.to_thread(lambda: self._processes.submit(run))
            return await asyncio.wrap_future(self._future)
        except BrokenExecutor as error:
            how = "did not stop when it was told to, and was killed" if self._was_killed else "just died"
            raise SearchCrashed(f"it {how}") from error
        except OSError as error:
            raise SearchCrashed(f"it was refused something by its machine ({error})") from error
        finally:
            self._progress.forget(self._line)
