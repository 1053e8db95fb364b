"""One search, as it runs in a process of its own.

The task is a plain function of plain data, so that any :class:`concurrent.futures.Executor` can carry
it. While it runs it holds a connection to the service that started it: better plans go out on it, a
request to stop comes in, and its end means that the service is gone. Progress is sent by a thread of
its own, the newest only, so that the search never waits for the network.

Wire format: the task sends its token and a newline; then for every report a line of JSON whose
``size`` counts the bytes of packed ranks that follow it. The service sends ``stop`` and a newline.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from zbv_solver.orders import Orders
from zbv_solver.plan import Plan
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem

from zbv_service.packing import finite, pack, pack_plan, unpack
from zbv_service.records import NewPlan

CONNECT_SECONDS = 10.0
SEND_SECONDS = 30.0
REPORT_SECONDS = 0.25
"""Least time between two reports of one search."""


class ProgressLike(Protocol):
    """What the solver reports: see :class:`zbv_solver.search.Progress`."""

    @property
    def objective(self) -> float: ...  # noqa: D102
    @property
    def lower_bound(self) -> float: ...  # noqa: D102
    @property
    def gap(self) -> float: ...  # noqa: D102
    @property
    def method(self) -> str: ...  # noqa: D102
    @property
    def orders(self) -> Orders: ...  # noqa: D102


class SearchFunction(Protocol):
    """What the service runs for a search. It is sent to other processes, so it must be importable."""

    def __call__(
        self,
        problem: Problem,
        options: dict[str, Any],
        on_progress: Callable[[ProgressLike], None],
        cancelled: Callable[[], bool],
        incumbent: Orders | None,
    ) -> Plan:
        """Search; returns a verified plan, the best so far when cancelled."""


@dataclass(frozen=True)
class SearchTask:
    """Everything a search process is told.

    Attributes
    ----------
    problem, incumbent
        Packed documents: the problem, and the ranks of the best plan known.
    address, token
        Where to report, and how to say which search it is.
    """

    search_id: str
    problem: bytes
    options: dict[str, Any]
    incumbent: bytes | None
    address: tuple[str, int]
    token: str


def solver_search(
    problem: Problem,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | None,
) -> Plan:
    """The solver's own search."""
    # Imported here: the solver's kernels take a second that only search processes should spend.
    from zbv_solver.search import SearchOptions, search

    return search(problem, SearchOptions(**options), on_progress, cancelled, incumbent)


def run_task(task: SearchTask, search: SearchFunction) -> NewPlan:
    """Run a search to its end.

    Raises
    ------
    InfeasibleMemory
        When no plan fits.
    OSError
        When the service cannot be reached.
    """
    problem = parse_problem(unpack(task.problem))
    incumbent = None if task.incumbent is None else Orders.from_text(unpack(task.incumbent))
    with Connection(task.address, task.token) as connection:
        problem.require_feasible()
        plan = search(problem, task.options, connection.report, connection.is_stopped, incumbent)
        return pack_plan(plan)


class Connection:
    """The task's end of the connection to the service."""

    def __init__(self, address: tuple[str, int], token: str):
        self._socket = socket.create_connection(address, timeout=CONNECT_SECONDS)
        self._socket.settimeout(SEND_SECONDS)
        self._socket.sendall(token.encode() + b"\n")
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._fresh = threading.Event()
        self._latest: ProgressLike | None = None
        self._threads = [
            threading.Thread(target=target, name=f"zbv-{target.__name__}", daemon=True)
            for target in (self._listen, self._send_reports)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def report(self, progress: ProgressLike) -> None:
        """Have a better plan or bound sent soon; a newer one takes its place. Never waits."""
        self._latest = progress
        self._fresh.set()

    def is_stopped(self) -> bool:
        """Whether the search should return what it has: told to, or nobody is left to tell."""
        return self._stopped.is_set()

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._fresh.set()
        with suppress(OSError):  # the service may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=SEND_SECONDS)
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                received = self._socket.recv(64)
            except TimeoutError:
                continue  # silence is the normal case
            except OSError:
                received = b""
            # Either the word "stop", or the end of the connection, which means the same.
            del received
            self._stopped.set()
            return

    def _send_reports(self) -> None:
        while True:
            self._fresh.wait()
            self._fresh.clear()
            if self._closed.is_set():
                return
            progress = self._latest
            if progress is not None:
                try:
                    self._socket.sendall(_report(progress))
                except OSError:
                    self._stopped.set()
                    return
            self._closed.wait(REPORT_SECONDS)


def _report(progress: ProgressLike) -> bytes:
    ranks = pack(progress.orders.all_text())
    header = {
        "objective": progress.objective,
        "lower_bound": progress.lower_bound,
        "gap": finite(progress.gap),
        "method": progress.method[:200],
        "size": len(ranks),
    }
    return json.dumps(header, allow_nan=False).encode() + b"\n" + ranks
