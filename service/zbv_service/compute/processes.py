"""Calls of functions in other processes: the death of one process does not affect the others.

Each process makes one call at a time and is kept for later ones. A call can report while it runs, and can
be asked to stop. A :class:`concurrent.futures.ProcessPoolExecutor` offers neither, and breaks as a whole when
one of its processes dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from zbv_service.compute.child import receive, send, serve

T = TypeVar("T")

KEPT_BYTES = 96 * 1024**2
"""An idle process with a memory limit that holds more private bytes than this is ended, to release them; so
is one whose memory ran out."""

_everyone: WeakSet[IsolatedProcesses] = WeakSet()
_CONTEXT = multiprocessing.get_context("forkserver")
"""Processes are forked from a fork server that has loaded the planner and has no threads, which takes
milliseconds. Forking this process would be unsafe, because it has threads."""

logger = logging.getLogger(__name__)


class ShutDown(RuntimeError):
    """The processes were shut down; they take no more calls."""


def preload(*modules: str) -> None:
    """Have the fork server import these modules, so that forked processes start with them.

    All processes have one fork server, which imports modules only when it starts.
    """
    _CONTEXT.set_forkserver_preload(list(modules))


@dataclass(eq=False)
class _Call:
    """A call that has not ended."""

    function: Callable[..., Any]
    argument: Any
    on_report: Callable[[Any], None] | None
    future: Future[Any] = field(default_factory=Future)
    process: _Process | None = None
    """None as long as it has not started."""
    is_stopped: bool = False


class IsolatedProcesses:
    """Runs one process per concurrent call, and keeps idle processes for later calls.

    The caller limits the number of calls. If a process dies, its call fails with
    :class:`concurrent.futures.BrokenExecutor`, and no other call is affected.

    Parameters
    ----------
    memory
        Bytes that a process may allocate after its start, None for no limit. Beyond it Python raises
        :class:`MemoryError`, and other code may end the process. Only effective on Linux.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._calls: dict[Future[Any], _Call] = {}
        self._is_shut_down = False
        _everyone.add(self)

    def prepare(self) -> None:
        """Start the fork server without waiting until it has loaded everything."""
        forkserver.ensure_running()

    def submit(
        self, function: Callable[..., T], argument: Any, on_report: Callable[[Any], None] | None = None
    ) -> Future[T]:
        """Call a function in an idle process, or in a new one; returns at once.

        Parameters
        ----------
        argument
            Bytes are passed as they are, all else is pickled.
        on_report
            Called in another thread with each report. The function then has a second argument, a
            :class:`zbv_service.compute.child.Caller`.

        Raises
        ------
        ShutDown
            The processes take no more calls.
        """
        call = _Call(function, argument, on_report)
        call.future.set_running_or_notify_cancel()
        with self._lock:
            if self._is_shut_down:
                raise ShutDown("the service stops, so no process takes another call.")
            self._calls[call.future] = call
        # Starting a process and passing large bytes takes milliseconds.
        threading.Thread(target=self._make, args=(call,), name="zbv-call", daemon=True).start()
        return call.future

    def has_begun(self, future: Future[Any]) -> bool:
        """Whether a call has its process and has not ended."""
        call = self._calls.get(future)
        return call is not None and call.process is not None

    def stop(self, future: Future[Any]) -> None:
        """Ask a call to stop, now or when it begins; see :class:`zbv_service.compute.child.Caller`."""
        with self._lock:
            call = self._calls.get(future)
        if call is not None:
            _stop(call)

    def shutdown(self) -> None:
        """Ask every call to stop, and end each process after its call."""
        with self._lock:
            self._is_shut_down = True
            idle, self._idle = self._idle, []
            calls = list(self._calls.values())
        for process in idle:
            process.end()
        for call in calls:
            _stop(call)

    def kill(self) -> None:
        """Kill every process now."""
        with self._lock:
            self._is_shut_down = True
            for call in self._calls.values():
                if call.process is not None:
                    call.process.kill()
        self.shutdown()

    def kill_process_of(self, future: Future[Any]) -> None:
        """Kill the process of a call, unless the call has ended or not begun."""
        with self._lock:
            call = self._calls.get(future)
            if call is not None and call.process is not None:
                call.process.kill()

    def kill_largest(self, least: int) -> Future[Any] | None:
        """Kill the largest process if it holds more than ``least`` private bytes; returns its call."""
        with self._lock:
            begun = {future: call.process.id for future, call in self._calls.items() if call.process}
        held = {future: _private_bytes(process_id) for future, process_id in begun.items()}
        largest = max(held, key=held.__getitem__, default=None)
        if largest is None or held[largest] <= least:
            return None
        self.kill_process_of(largest)
        return largest

    @property
    def process_ids(self) -> list[int]:
        """The ids of all processes, idle ones included."""
        with self._lock:
            working = [call.process for call in self._calls.values()]
            return [process.id for process in (*self._idle, *working) if process is not None]

    def _make(self, call: _Call) -> None:
        """Make a call from its start to its end, in a thread."""
        try:
            made = self._begin(call).result()
        except BaseException as error:
            self._release(call, is_kept=not isinstance(error, BrokenExecutor | MemoryError))
            call.future.set_exception(error)
        else:
            self._release(call, is_kept=True)
            call.future.set_result(made)

    def _begin(self, call: _Call) -> _Process:
        """Have a process begin a call: an idle one, unless it has died, or a new one."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            # Without the lock: starting may take long, and the event loop needs the lock to kill.
            process = _Process(self._memory) if idle is None else idle
            with self._lock:
                call.process = None if self._is_shut_down else process
            if call.process is None:
                process.kill()
                process.end()
                raise ShutDown("the service stopped before a process was started for the call.")
            try:
                process.begin(call)
            except BrokenExecutor:
                if idle is None or self._is_shut_down:
                    raise
                logger.warning("an idle process has died; the next call gets a new one")
                process.end()
            else:
                return process

    def _release(self, call: _Call, *, is_kept: bool) -> None:
        process = call.process
        if process is not None and self._memory is not None:
            is_kept = is_kept and _private_bytes(process.id) <= KEPT_BYTES
        with self._lock:
            del self._calls[call.future]
            if process is not None and is_kept and not self._is_shut_down:
                self._idle.append(process)
                return
        if process is not None:
            process.end()


class _Process:
    """A process, and this end of the pipe to it."""

    def __init__(self, memory: int | None):
        self._pipe, theirs = _CONTEXT.Pipe()
        self._sending = threading.Lock()
        self._call: _Call | None = None
        # The system ends it with this process, but :func:`zbv_service.compute.child.serve` does so sooner.
        self._process = _CONTEXT.Process(target=serve, args=(theirs, memory), daemon=True)
        with theirs:
            self._process.start()
        self.id = int(self._process.pid or 0)

    def begin(self, call: _Call) -> None:
        """Send a call and wait until the process has it; raises :class:`BrokenExecutor` if it dies before."""
        with self._sending, _breaking():
            send(self._pipe, b"function", (call.function, call.on_report is not None))
            send(self._pipe, b"argument", call.argument)
            self._call = call
        if call.is_stopped:
            self.stop(call)
        with _breaking():
            receive(self._pipe)

    def result(self) -> Any:
        """The result of the call; raises its error, or :class:`BrokenExecutor` if the process dies."""
        call = self._call
        try:
            with _breaking():
                answer = receive(self._pipe)
            while answer.kind == b"report":
                if call is not None and call.on_report is not None:
                    call.on_report(answer.value)
                with _breaking():
                    answer = receive(self._pipe)
        finally:
            with self._sending:
                self._call = None
        if answer.kind == b"failed":
            raise answer.value
        return answer.value

    def stop(self, call: _Call) -> None:
        """Ask a call to stop if it is the current one."""
        with self._sending, suppress(OSError):  # a process that has died needs no request
            if self._call is call:
                send(self._pipe, b"stop", b"")

    def kill(self) -> None:
        """Kill it now."""
        self._process.kill()

    def end(self) -> None:
        """Close the pipe: an idle process then ends."""
        self._pipe.close()


@contextmanager
def _breaking() -> Iterator[None]:
    """Turns the errors of a pipe whose other end has closed into :class:`BrokenExecutor`."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise BrokenExecutor("the process died before its call ended.") from error


def _stop(call: _Call) -> None:
    call.is_stopped = True
    if call.process is not None:
        call.process.stop(call)


def memory_exceeds(most: float) -> bool:
    """Whether this process and all its calls' processes hold more than so many bytes."""
    # The first sum takes microseconds and counts what processes share several times.
    return sum(map(_resident, _process_ids())) > most and memory_of_all() > most


def memory_of_all() -> int:
    """The private bytes of this process and all its calls' processes."""
    return sum(map(_private_bytes, _process_ids()))


def _process_ids() -> list[int]:
    return [
        os.getpid(),
        *(process_id for processes in list(_everyone) for process_id in processes.process_ids),
    ]


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
