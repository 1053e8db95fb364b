"""Computes searches in processes on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from functools import partial

from zbv_service.compute.processes import IsolatedProcesses, ShutDown
from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.connection import run_connected
from zbv_service.searches.executors.executor import SearchCrashed, SearchLost
from zbv_service.searches.executors.progress import ProgressServer, TaskConnection
from zbv_service.searches.executors.task import SearchFunction


class LocalExecutor:
    """Computes searches in processes on this machine, one process per search.

    Parameters
    ----------
    slots
        Most searches at the same time.
    preload
        Whether to load the planner into the fork server at the start instead of at the first search.
    memory
        Bytes that a search may allocate; None for no limit.
    """

    def __init__(self, slots: int, *, preload: bool = True, memory: int | None = None):
        self._slots = slots
        self._preload = preload
        self._processes = IsolatedProcesses(memory)
        self._progress = ProgressServer()

    async def start(self) -> None:
        """Listen for reports of searches, and prepare the fork server."""
        await self._progress.start()
        if self._preload:
            await asyncio.to_thread(self._processes.prepare)

    async def stop(self) -> None:
        """Close the connections, and end each process after its task."""
        await self._progress.close()
        self._processes.shutdown(wait=False, cancel_futures=True)

    def kill(self) -> None:
        """Kill every process now."""
        self._processes.kill()

    @property
    def slots(self) -> int:
        """The number of searches that can run at the same time."""
        return self._slots

    @property
    def shared_slots(self) -> None:
        """None: no other service has these processes."""
        return None

    @property
    def trouble(self) -> str | None:
        """None: a process can always be started."""
        return None

    def expect(
        self, claim: Claim, search: SearchFunction, on_update: Callable[[Update], None]
    ) -> LocalComputation:
        """Prepare a search for a separate process."""
        run = partial(run_connected, claim, search)
        return LocalComputation(self._processes, self._progress, run, on_update)


class LocalComputation(TaskConnection):
    """One search in a separate process."""

    def __init__(
        self,
        processes: IsolatedProcesses,
        progress: ProgressServer,
        run: Callable[[tuple[str, int], str], Outcome],
        on_update: Callable[[Update], None],
    ):
        super().__init__(on_update)
        self._processes = processes
        self._progress = progress
        self._run = run
        self._future: Future[Outcome] | None = None
        self._was_killed = False
        progress.expect(self)

    def kill(self) -> None:
        """Kill its process."""
        if self._future is not None:
            self._was_killed = True
            self._processes.kill_process_of(self._future)

    @property
    def is_under_way(self) -> bool:
        """Whether its process has connected."""
        return self.writer is not None

    async def plan(self) -> Outcome:
        """Compute the plan; raises :class:`SearchCrashed`, :class:`SearchLost`, or the search's own error."""
        try:
            # Starting a process takes some milliseconds, so another thread does it.
            start = partial(self._processes.submit, self._run, self._progress.address, self.token)
            self._future = await asyncio.to_thread(start)
            return await asyncio.wrap_future(self._future)
        except ShutDown as error:
            raise SearchLost("the service stopped before a process was started for it.") from error
        except BrokenExecutor as error:
            how = "did not stop on request and was killed" if self._was_killed else "died"
            raise SearchCrashed(f"it {how}") from error
        except OSError as error:
            raise SearchCrashed(f"its machine refused it something ({error})") from error
        finally:
            self._progress.forget(self)
