"""An executor whose processes fail one by one.

A :class:`concurrent.futures.ProcessPoolExecutor` breaks as a whole when one of its processes dies, and
takes every other search down with it. Here each process is a pool of its own, so a death is known to be
the fault of the task it ran.
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

P = ParamSpec("P")
T = TypeVar("T")

PRELOADED = "zbv_service.searches.preload"
NICENESS = 10
"""Searches take whatever CPU time is left: requests, which take little, are answered meanwhile."""
KEPT_BYTES = 384 * 1024**2
"""An idle process of bounded memory that holds more than this is ended: little of it is given back else."""
ORPHANED = 70
"""Exit status of a process whose service is gone."""

logger = logging.getLogger(__name__)


class IsolatedProcesses(Executor):
    """As many processes as there are tasks at the same time; idle ones are kept for the next task.

    The caller bounds the number of tasks. A task whose process dies fails with
    :class:`concurrent.futures.BrokenExecutor`; the others never notice.

    Parameters
    ----------
    memory
        Bytes that a process may allocate beyond what it begins with, None for any number: then Python raises
        :class:`MemoryError`, and other code may end the process. Only Linux keeps to it.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[ProcessPoolExecutor] = []
        self._all: dict[ProcessPoolExecutor, Future[int]] = {}
        self._working: dict[Future[Any], ProcessPoolExecutor] = {}
        self._is_shut_down = False
        # Forked, from a process that has no threads and has loaded the planner: starting another one is a
        # matter of milliseconds. Never forked from this one, which has threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED])

    def prepare(self) -> None:
        """Start the process from which the others are forked, without waiting for what it loads."""
        forkserver.ensure_running()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in an idle process, or in a new one."""
        while True:
            with self._lock:
                if self._is_shut_down:
                    raise RuntimeError("the executor was shut down; it takes no more tasks.")
                pool = self._idle.pop() if self._idle else self._new()
            try:
                future = pool.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self._discard(pool)  # it died while idle
                continue
            with self._lock:
                self._working[future] = pool
            future.add_done_callback(partial(self._returned, pool))
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End every process once its task has ended."""
        with self._lock:
            self._is_shut_down = True
            pools = list(self._all)
        for pool in pools:
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def kill(self) -> None:
        """End every process now, whatever it does."""
        with self._lock:
            self._is_shut_down = True
            started = [process_id for process_id in self._all.values() if process_id.done()]
        for process_id in started:
            _kill(process_id)

    def kill_process_of(self, future: Future[Any]) -> None:
        """End the process that works on a call; one that has ended, or not begun, is left alone."""
        with self._lock:
            pool = self._working.get(future)
            process_id = None if pool is None else self._all.get(pool)
        if process_id is not None and process_id.done():
            _kill(process_id)

    def _new(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            1, mp_context=self._context, initializer=_prepare, initargs=(self._memory,)
        )
        self._all[pool] = pool.submit(os.getpid)
        return pool

    def _returned(self, pool: ProcessPoolExecutor, future: Future[Any]) -> None:
        with self._lock:
            self._working.pop(future, None)
        if not future.cancelled() and isinstance(future.exception(), BrokenExecutor):
            self._discard(pool)
            return
        if self._memory is not None and _resident(self._all[pool].result()) > KEPT_BYTES:
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


def _kill(process_id: Future[int]) -> None:
    if process_id.exception() is None:
        with suppress(ProcessLookupError):
            os.kill(process_id.result(), signal.SIGKILL)


def _prepare(memory: int | None) -> None:
    """In the new process: leave Ctrl-C to the service, follow it when it dies, and let it go first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory is not None:
        _limit_memory(memory)
    with suppress(OSError):  # systems that have no priorities, or allow no change
        os.nice(NICENESS)
    threading.Thread(target=_exit_with_parent, name="zbv-orphan-watch", daemon=True).start()


def _limit_memory(most: int) -> None:
    """Let this process allocate so many bytes more."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmData:"))
    limit = 1024 * int(line.split()[1]) + most
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _resident(process_id: int) -> int:
    """Bytes of memory that a process has; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # a pipe from the parent ends with it, however it dies
        os._exit(ORPHANED)
