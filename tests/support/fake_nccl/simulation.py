"""Virtual time: one Python thread per rank, of which exactly one runs at a time.

The scheduler always continues with the earliest host or device, so a run depends on its seed alone. A
host that only polls does not advance time in small steps: it sleeps until something changes, or ever longer.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

_POLLS_UNTIL_IDLE = 4
_LONGEST_SLEEP = 30.0
_REAL_SECONDS = 60.0
"""How long the scheduler waits, in real time, for a rank's thread to call the model again."""

_current: ContextVar[Host | None] = ContextVar("host", default=None)
"""The host of this thread, and of threads that run in a copy of its context."""


class ModelError(AssertionError):
    """The program does something that real CUDA or NCCL forbids, or that ends in wrong data or a hang."""


class Deadlock(ModelError):
    """Nothing can ever happen again, but ranks wait. The message shows who waits for what."""


class _Stopped(BaseException):
    """The simulation is over; unwinds a rank's thread."""


@dataclass(eq=False)
class Host:
    """The Python thread of one rank, and its own clock, which is never behind the simulation's."""

    simulation: Simulation
    rank: int
    time: float = 0.0
    waits_for: str | None = None
    """Describes the wait, for the picture of a deadlock."""
    observed: dict[int, int] = field(default_factory=dict)
    """The device work that the host knows to be finished: a vector clock by stream."""
    is_done: bool = False
    idle_polls: int = 0
    turn: int = 0
    is_paused: bool = False
    condition: Callable[[], bool] | None = None
    is_stopped: bool = False
    go: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None

    def spend(self, seconds: float) -> None:
        """Host time passes; no one else needs to run."""
        self._check()
        self.time += seconds
        self.idle_polls = 0

    def pause(self, seconds: float, waits_for: str = "polls") -> None:
        """Sleep at least that long; longer while nothing that the host could see changes."""
        self._check()
        self.time += seconds
        sleep = min(seconds * 2**self.idle_polls, max(seconds, _LONGEST_SLEEP))
        self.idle_polls += 1
        self.is_paused = True
        self.waits_for = waits_for
        self.simulation.resume(self, self.time - seconds + sleep)
        self._yield()
        self.is_paused = False
        self.waits_for = None

    def block(self, condition: Callable[[], bool], waits_for: str) -> None:
        """Block until the condition holds."""
        self.catch_up()
        if not condition():
            self.condition, self.waits_for = condition, waits_for
            self._yield()
            self.condition = self.waits_for = None
        self.time = max(self.time, self.simulation.now)
        self.idle_polls = 0

    def catch_up(self) -> None:
        """Let everything happen that happens before this host's time."""
        self._check()
        if self.simulation.next_time() <= self.time:
            self.simulation.resume(self, self.time)
            self._yield()

    def _yield(self) -> None:
        self.simulation.hand_over(self)
        self._check()
        self.time = max(self.time, self.simulation.now)

    def _check(self) -> None:
        if self.is_stopped:
            raise _Stopped


class Simulation:
    """Virtual time and the ranks' threads.

    Parameters
    ----------
    deadlines_pass
        Whether hosts that poll in vain reach their deadlines. If not, that is a :class:`Deadlock`.
    """

    def __init__(self, seed: int, *, deadlines_pass: bool = False):
        self.random = Random(seed)
        self.now = 0.0
        self.hosts: dict[int, Host] = {}
        self.describe: Callable[[], list[str]] = list
        self._deadlines_pass = deadlines_pass
        self._heap: list[tuple[float, int, Callable[[], None] | None, Host | None, int]] = []
        self._count = itertools.count()
        self._scheduled = 0
        self._failure: ModelError | None = None
        self._over = threading.Event()
        self._is_over = False
        self._error: BaseException | None = None

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(time, self.now), next(self._count), action, None, 0))

    def resume(self, host: Host, time: float) -> None:
        """Resume a host that yields, unless something else resumes it first."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._count), None, host, host.turn))

    def next_time(self) -> float:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else float("inf")

    def changed(self, rank: int) -> None:
        """Tell a rank's host that it may see something new."""
        host = self.hosts.get(rank)
        if host is None or host.is_done:
            return
        if host.condition is not None and host.condition():
            host.condition, host.idle_polls = None, 0
            self.resume(host, max(self.now, host.time))
        elif host.is_paused:
            host.idle_polls = 0
            self.resume(host, max(self.now, host.time))

    def emptied(self, rank: int) -> None:
        """A stream of a rank is empty, which only a blocked host can wait for."""
        host = self.hosts.get(rank)
        if host is not None and host.condition is not None:
            self.changed(rank)

    def changed_everywhere(self) -> None:
        """Like :meth:`changed` for every rank."""
        for rank in self.hosts:
            self.changed(rank)

    def fail(self, error: ModelError) -> None:
        """Report a failure from a place that cannot raise it."""
        self._failure = self._failure or error

    def run(self, mains: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run one function per rank until all have returned; returns what they return.

        Raises the first error of a rank, or :class:`Deadlock`.
        """
        results: dict[int, Any] = {}
        self.hosts = {rank: Host(self, rank) for rank in mains}
        for rank, main in mains.items():
            self._start(self.hosts[rank], main, results)
        try:
            self.hand_over(None)
            self._wait()
        finally:
            self._stop()
        if self._error is not None:
            raise self._error
        return results

    def _start(self, host: Host, main: Callable[[], Any], results: dict[int, Any]) -> None:
        def body() -> None:
            _current.set(host)
            host.go.acquire()
            try:
                if not host.is_stopped:
                    results[host.rank] = main()
            except _Stopped:
                pass
            except BaseException as error:
                self._end(error)
            finally:
                host.is_done = True
                self.hand_over(None)

        host.go.acquire()
        host.thread = threading.Thread(target=body, name=f"rank {host.rank}", daemon=True)
        host.thread.start()
        self.resume(host, 0.0)

    def hand_over(self, host: Host | None) -> None:
        """Let the next host run: called by a host that yields, which returns at its next turn, or ends.

        The thread that yields does the work of the devices itself, which saves most changes of thread.
        """
        if not self._is_over:
            try:
                with torch._C.DisableTorchFunction():
                    following = self._next_host()
            except ModelError as error:
                self._end(error)
            else:
                if following is None:
                    self._end(None)
                elif following is host:
                    return
                else:
                    following.go.release()
        if host is not None:
            host.go.acquire()

    def _end(self, error: BaseException | None) -> None:
        self._is_over = True
        self._error = self._error or error
        self._over.set()

    def _next_host(self) -> Host | None:
        """Run the devices until a host is next; None once all hosts are done."""
        while True:
            if self._failure is not None:
                raise self._failure
            if all(host.is_done for host in self.hosts.values()):
                return None
            if not self._heap or self._only_polls():
                raise Deadlock(self.picture())
            time, _, action, host, turn = heapq.heappop(self._heap)
            if action is not None:
                self._scheduled -= 1
                self.now = max(self.now, time)
                action()
            elif host is not None and not host.is_done and turn == host.turn:
                self.now = max(self.now, time)
                host.turn += 1
                host.condition = None
                return host

    def _only_polls(self) -> bool:
        if self._scheduled or self._deadlines_pass:
            return False
        return all(
            host.is_done or host.condition is not None or host.idle_polls >= _POLLS_UNTIL_IDLE
            for host in self.hosts.values()
        )

    def _wait(self) -> None:
        """Wait for the end of the run, while ranks change turns."""
        turns = -1
        while not self._over.wait(_REAL_SECONDS):
            if turns == (turns := sum(host.turn for host in self.hosts.values())):
                raise ModelError(f"a rank computes or blocks outside the model for {_REAL_SECONDS:g} s")

    def _stop(self) -> None:
        self._is_over = True
        for host in self.hosts.values():
            if not host.is_done:
                host.is_stopped = True
                host.go.release()
        for host in self.hosts.values():
            if host.thread is not None:
                host.thread.join(timeout=5)

    def picture(self) -> str:
        lines = [f"nothing can happen any more at {self.now * 1e3:.3f} ms:"]
        lines += [
            f"  rank {host.rank}, host: {host.waits_for or 'polls'}{_caller(host)}"
            for host in self.hosts.values()
            if not host.is_done
        ]
        return "\n".join([*lines, *self.describe()])


def _caller(host: Host) -> str:
    """The worker's function in which a host waits."""
    frame = None if host.thread is None else sys._current_frames().get(host.thread.ident or 0)
    while frame is not None and "zbv_worker" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f", in {frame.f_code.co_qualname}"


def this_host() -> Host:
    """The host whose thread calls.

    Raises
    ------
    ModelError
        In any other thread: NCCL and CUDA work is issued from a rank's one thread only.
    """
    host = _current.get()
    if host is None:
        raise ModelError("a thread other than the rank's main one uses CUDA or NCCL; issue from one thread")
    return host


def pause_if_host(seconds: float) -> None:
    """Pause a rank's main thread. Its other threads run in no virtual time."""
    host = _current.get()
    if host is not None:
        host.pause(seconds)


@dataclass(frozen=True)
class FakeClock:
    """The host's clock (:class:`zbv_worker.host.process.Clock`)."""

    def now(self) -> float:
        """Seconds of virtual time; reading it takes a microsecond."""
        host = this_host()
        host.time += 1e-6
        return host.time

    def pause(self, seconds: float) -> None:
        this_host().pause(seconds)
