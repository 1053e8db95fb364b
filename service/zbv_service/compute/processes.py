"""An executor that isolates its processes: the death of one does not affect the others.

A :class:`concurrent.futures.ProcessPoolExecutor` breaks as a whole when one of its processes dies, and all
its tasks fail. Here each process is a separate pool, so only the task that it ran fails.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

P = ParamSpec("P")
T = TypeVar("T")

NICENESS = 10
"""Niceness: computations use the CPU time that the service leaves, so requests stay fast."""
KEPT_BYTES = 96 * 1024**2
"""An idle process with a memory limit that holds more private bytes than this is ended, to release them; so
is one whose memory ran out."""
ORPHANED = 70
"""Exit status of a process that lost its service."""

_executors: WeakSet[IsolatedProcesses] = WeakSet()

logger = logging.getLogger(__name__)


class ShutDown(RuntimeError):
    """The executor was shut down; it takes no more tasks."""


def preload(*modules: str) -> None:
    """Have the fork server import these modules, so that forked processes start with them.

    The fork server is shared by all executors of this process, and imports modules only when it starts.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class IsolatedProcesses(Executor):
    """Runs one process per concurrent task, and keeps idle processes for later tasks.

    The caller limits the number of tasks. If a process dies, its task fails with
    :class:`concurrent.futures.BrokenExecutor`, and no other task is affected.

    Parameters
    ----------
    memory
        Bytes that a process may allocate after its start, None for no limit. Beyond it Python raises
        :class:`MemoryError`, and other code may end the process. Only effective on Linux.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[ProcessPoolExecutor] = []
        self._all: dict[ProcessPoolExecutor, Future[int]] = {}
        self._working: dict[Future[Any], ProcessPoolExecutor] = {}
        self._is_shut_down = False
        _executors.add(self)
        # Processes are forked from a fork server that has loaded the planner and has no threads, which takes
        # milliseconds. Forking this process would be unsafe, because it has threads.
        self._context = multiprocessing.get_context("forkserver")

    def prepare(self) -> None:
        """Start the fork server without waiting until it has loaded everything."""
        forkserver.ensure_running()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in an idle process, or in a new one; raises :class:`ShutDown`."""
        while True:
            with self._lock:
                if self._is_shut_down:
                    raise ShutDown("the executor was shut down; it takes no more tasks.")
                idle = self._idle.pop() if self._idle else None
            pool = self._new() if idle is None else idle
            try:
                future = pool.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self._discard(pool)  # it died while idle
                continue
            except RuntimeError as error:  # of a pool that was shut down meanwhile
                raise ShutDown("the executor was shut down; it takes no more tasks.") from error
            with self._lock:
                self._working[future] = pool
            future.add_done_callback(partial(self._returned, pool))
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End each process after its task."""
        with self._lock:
            self._is_shut_down = True
            pools = list(self._all)
        for pool in pools:
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def kill(self) -> None:
        """Kill every process now."""
        with self._lock:
            self._is_shut_down = True
            started = [process_id for process_id in self._all.values() if process_id.done()]
        for process_id in started:
            _kill(process_id)

    def kill_process_of(self, future: Future[Any]) -> None:
        """Kill the process of a call, unless the call has ended or not begun."""
        with self._lock:
            pool = self._working.get(future)
            process_id = None if pool is None else self._all.get(pool)
        if process_id is not None and process_id.done():
            _kill(process_id)

    def kill_largest(self, least: int) -> Future[Any] | None:
        """Kill the largest process if it holds more than ``least`` private bytes; returns its call."""
        with self._lock:
            started = [(call, self._all[pool]) for call, pool in self._working.items() if pool in self._all]
        begun = [(call, process_id.result()) for call, process_id in started if _has_begun(process_id)]
        held = {call: _private_bytes(process_id) for call, process_id in begun}
        largest = max(held, key=held.__getitem__, default=None)
        if largest is None or held[largest] <= least:
            return None
        self.kill_process_of(largest)
        return largest

    @property
    def process_ids(self) -> list[int]:
        """The ids of all processes, idle ones included."""
        with self._lock:
            return [process_id.result() for process_id in self._all.values() if _has_begun(process_id)]

    def _new(self) -> ProcessPoolExecutor:
        """Start a process, without the lock: it may take long, and the event loop needs the lock to kill."""
        pool = ProcessPoolExecutor(
            1, mp_context=self._context, initializer=_prepare, initargs=(self._memory,)
        )
        process_id = pool.submit(os.getpid)
        with self._lock:
            if not self._is_shut_down:
                self._all[pool] = process_id
                return pool
        pool.shutdown(wait=False)
        raise ShutDown("the executor was shut down; it takes no more tasks.")

    def _returned(self, pool: ProcessPoolExecutor, future: Future[Any]) -> None:
        with self._lock:
            self._working.pop(future, None)
        error = None if future.cancelled() else future.exception()
        if isinstance(error, BrokenExecutor):
            self._discard(pool)
            return
        is_large = self._memory is not None and _private_bytes(self._all[pool].result()) > KEPT_BYTES
        if is_large or isinstance(error, MemoryError):
            with self._lock:
                self._all.pop(pool, None)
            pool.shutdown(wait=False)
            return
        with self._lock:
            if not self._is_shut_down:
                self._idle.append(pool)

    def _discard(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            self._all.pop(pool, None)
            is_surprise = not self._is_shut_down
        if is_surprise:
            logger.warning("a process ended before its task did; the next task gets a new one")
        pool.shutdown(wait=False)


def memory_exceeds(most: float) -> bool:
    """Whether this process and those of all its executors hold more than so many bytes."""
    # The first sum takes microseconds and counts what processes share several times.
    return sum(map(_resident, _everyone())) > most and memory_of_all() > most


def memory_of_all() -> int:
    """The private bytes of this process and those of all its executors."""
    return sum(map(_private_bytes, _everyone()))


def _everyone() -> list[int]:
    children = (process_id for executor in list(_executors) for process_id in executor.process_ids)
    return [os.getpid(), *children]


def _has_begun(process_id: Future[int]) -> bool:
    return process_id.done() and process_id.exception() is None


def _kill(process_id: Future[int]) -> None:
    if process_id.exception() is None:
        with suppress(ProcessLookupError):
            os.kill(process_id.result(), signal.SIGKILL)


def _prepare(memory: int | None) -> None:
    """Set up a new process: ignore Ctrl-C, exit if the service dies, and run at low priority."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory is not None:
        _limit_memory(memory)
    with suppress(OSError):  # systems without priorities, or without permission to change them
        os.nice(NICENESS)
    threading.Thread(target=_exit_with_parent, name="zbv-orphan-watch", daemon=True).start()


def _limit_memory(most: int) -> None:
    """Let this process allocate at most this many more bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit = 1024 * int(line.split()[1]) + most
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _resident(process_id: int) -> int:
    """The resident memory of a process without files, in bytes; 0 if the system does not report it.

    Some of it may be memory of the fork server that the process has not changed.
    """
    try:
        _, resident, of_files, *_ = Path(f"/proc/{process_id}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")


def _private_bytes(process_id: int) -> int:
    """The memory of a process that no other one shares, in bytes; 0 if the system does not report it.

    For a gigabyte the system takes some milliseconds.
    """
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # the pipe from the parent closes however the parent dies
        os._exit(ORPHANED)
