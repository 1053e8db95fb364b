"""First plans of pipelines, also ahead of the search that asks for them, in other processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from contextlib import contextmanager
from ctypes import c_bool
from multiprocessing import get_context, parent_process
from types import TracebackType
from typing import Self

from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.layered import first_plan
from zbv_solver.search.search_state import Cancelled

POLL_SECONDS = 0.05
_PLAIN = LayerCosts(1.0, 1.0, 1.0, None, LayerMemory(1.0, 0.0, -1.0))
_AGAIN = LayerCosts(1.0, 2.0, 1.0, None, LayerMemory(0.5, 0.0, -0.5))
SMALL = LayeredProblem(
    Model((Layer("block", _PLAIN, _AGAIN, repeat=16),)), 2, 4, (0.0, 0.0), (8.0, 8.0), placement="auto"
)
"""A pipeline whose plan takes all kinds of kernels."""


class FirstPlans:
    """Plans every pipeline once: layouts often differ only in what they exchange once per step.

    With several processes, pipelines are planned ahead. Planning is mostly Python, so threads gain little.
    If these processes fail, this one plans alone. A context manager.

    Parameters
    ----------
    workers
        Threads of a plan in this process.
    processes
        Other processes that plan, if at least 2; at most as many as there are cores. They import the main
        module, so a script needs ``if __name__ == "__main__"``.

    Attributes
    ----------
    known
        The plans so far.
    """

    def __init__(self, workers: int = 1, processes: int = 1):
        self.workers, self.processes = workers, min(processes, os.cpu_count() or 1)
        self.known: dict[LayeredProblem, Plan] = {}
        self._begun: dict[LayeredProblem, Future[Plan]] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._is_broken = False

    def __enter__(self) -> Self:
        if self.processes > 1:
            # A fork would copy locks that other threads hold.
            context = get_context("spawn")
            # Without a lock, which a killed process may keep.
            self._stop = context.RawValue(c_bool, False)
            self._pool = ProcessPoolExecutor(self.processes, context, _begin_process, (self._stop,))
            for _ in range(self.processes):  # they load kernels while the search computes its first bounds
                self._submit(SMALL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._stop.value = True
            self._pool.shutdown(cancel_futures=True)

    @property
    def can_begin(self) -> bool:
        """Whether another plan may begin: one more than there are processes, so that none of them waits."""
        return self._pool is not None and not self._is_broken and len(self._begun) <= self.processes

    def begin(self, problem: LayeredProblem) -> None:
        """Plan a pipeline ahead, if there are other processes."""
        if problem not in self.known and problem not in self._begun:
            future = self._submit(problem)
            if future is not None:
                self._begun[problem] = future

    def plan(self, problem: LayeredProblem, cancelled: Cancelled | None = None) -> Plan:
        """The plan of a pipeline; raises :class:`InfeasibleMemory` when no cut fits."""
        if problem not in self.known:
            plan = self._ahead(self._begun.pop(problem, None), cancelled)
            self.known[problem] = plan or first_plan(problem, cancelled, self.workers)
        return self.known[problem]

    def _submit(self, problem: LayeredProblem) -> Future[Plan] | None:
        if self._pool is None or self._is_broken:
            return None
        try:
            with _without_interrupts():
                return self._pool.submit(_planned, problem)
        except (BrokenExecutor, OSError):
            self._is_broken = True
            return None

    def _ahead(self, future: Future[Plan] | None, cancelled: Cancelled | None) -> Plan | None:
        """The plan of another process; None without one, after a cancellation, or if a process was killed."""
        while future is not None and not (cancelled is not None and cancelled()):
            try:
                return future.result(None if future.done() else POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
            except BrokenExecutor:
                self._is_broken = True
                return None
        return None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start here never see Ctrl-C, which is for the search."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stop: c_bool


def _begin_process(stop: c_bool) -> None:
    """End with the process of the search."""
    global _stop
    _stop = stop
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()  # returns however the parent ends
        os._exit(1)


def _is_stopped() -> bool:
    return bool(_stop.value)


def _planned(problem: LayeredProblem) -> Plan:
    if _is_stopped():
        raise CancelledError
    return first_plan(problem, _is_stopped)
