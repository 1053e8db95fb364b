"""Computes searches in processes on this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from contextlib import closing
from dataclasses import dataclass

from zbv_service.compute.child import Caller
from zbv_service.compute.processes import IsolatedProcesses, ShutDown
from zbv_service.records.searches import Claim, Outcome, Update
from zbv_service.searches.executors.task import Compute, SearchCrashed, SearchLost

REPORT_SECONDS = 0.25
"""Minimal time between two reports of one search."""


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

    shared_slots: int | None = None
    """None: no other service has these processes."""
    trouble: str | None = None
    """None: a process can always be started."""

    def __init__(self, slots: int, *, preload: bool = True, memory: int | None = None):
        self.slots = slots
        self._preload = preload
        self._processes = IsolatedProcesses(memory)

    async def start(self) -> None:
        """Prepare the fork server."""
        if self._preload:
            await asyncio.to_thread(self._processes.prepare)

    async def stop(self) -> None:
        """Ask every search to stop, and end each process after its search."""
        self._processes.shutdown()

    def kill(self) -> None:
        """Kill every process now."""
        self._processes.kill()

    def expect(self, claim: Claim, compute: Compute, on_update: Callable[[Update], None]) -> LocalComputation:
        """Prepare a search for a separate process."""
        return LocalComputation(self._processes, claim, compute, on_update)


@dataclass(eq=False)
class LocalComputation:
    """One search in a separate process."""

    processes: IsolatedProcesses
    claim: Claim
    compute: Compute
    on_update: Callable[[Update], None]
    _future: Future[Outcome] | None = None
    _is_stopped: bool = False
    _was_killed: bool = False

    def stop(self) -> None:
        """Ask the search to return its best plan, now or as soon as it begins."""
        self._is_stopped = True
        if self._future is not None:
            self.processes.stop(self._future)

    def kill(self) -> None:
        """Kill its process."""
        if self._future is not None:
            self._was_killed = True
            self.processes.kill_process_of(self._future)

    @property
    def is_under_way(self) -> bool:
        """Whether it has its process."""
        return self._future is not None and self.processes.has_begun(self._future)

    async def plan(self) -> Outcome:
        """Compute the plan; raises :class:`SearchCrashed`, :class:`SearchLost`, or the search's own error."""
        loop = asyncio.get_running_loop()

        def on_report(update: Update) -> None:
            loop.call_soon_threadsafe(self.on_update, update)

        try:
            self._future = self.processes.submit(run_reporting, (self.claim, self.compute), on_report)
            if self._is_stopped:
                self.stop()
            return await asyncio.wrap_future(self._future)
        except ShutDown as error:
            raise SearchLost("the service stopped before a process was started for it.") from error
        except BrokenExecutor as error:
            how = "did not stop on request and was killed" if self._was_killed else "died"
            raise SearchCrashed(f"it {how}") from error
        except OSError as error:
            raise SearchCrashed(f"its machine refused it something ({error})") from error


def run_reporting(asked: tuple[Claim, Compute], caller: Caller) -> Outcome:
    """Run a claimed search in this process, and report to the service.

    Raises
    ------
    InfeasibleMemory, NoLayoutFits
        No plan or layout fits the memory limit.
    """
    claim, compute = asked
    with closing(_Reports(caller)) as reports:
        return compute(claim, reports)


class _Reports:
    """Sends the newest report in another thread, so that the search never waits for the service.

    It is a :class:`zbv_service.searches.executors.task.Reporter`.
    """

    def __init__(self, caller: Caller):
        self.is_stopped = caller.is_stopped
        self._caller = caller
        self._closed = threading.Event()
        self._fresh = threading.Event()
        self._latest: Callable[[], Update] | None = None
        self._thread = threading.Thread(target=self._send, name="zbv-reports", daemon=True)
        self._thread.start()

    def report(self, make: Callable[[], Update]) -> None:
        """Make and send a report soon, unless a newer one replaces it. Never blocks."""
        self._latest = make
        self._fresh.set()

    def close(self) -> None:
        """Send no more."""
        self._closed.set()
        self._fresh.set()
        self._thread.join()

    def _send(self) -> None:
        while True:
            self._fresh.wait()
            self._fresh.clear()
            if self._closed.is_set():
                return
            if self._latest is not None:
                try:
                    self._caller.report(self._latest())
                except OSError:  # the service is gone, and the search has been asked to stop
                    return
            self._closed.wait(REPORT_SECONDS)
