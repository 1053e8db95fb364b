"""First plans of pipelines, also ahead of the search that asks for them, in other processes."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
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
    """Plans every pipeline once: layouts often differ in what they exchange once per step only.

    With several processes, pipelines are planned ahead. Planning is mostly Python, so threads gain little.
    A context manager.

    Parameters
    ----------
    workers
        Threads of a plan in this process.
    processes
        Other processes that plan, if at least 2. The caller's main module must then be importable.

    Attributes
    ----------
    known
        The plans so far.
    """

    def __init__(self, workers: int = 1, processes: int = 1):
        self.workers, self.processes = workers, processes
        self.known: dict[LayeredProblem, Plan] = {}
        self._begun: dict[LayeredProblem, Future[Plan]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.processes > 1:
            # A fork would copy locks that other threads hold.
            context = get_context("spawn")
            self._stop = context.Event()
            self._pool = ProcessPoolExecutor(self.processes, context, _begin_process, (self._stop,))
            for _ in range(self.processes):  # they load kernels while the search computes its first bounds
                self._pool.submit(_planned, SMALL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    @property
    def can_begin(self) -> bool:
        """Whether another plan may begin: one more than there are processes, so that none of them waits."""
        return self._pool is not None and len(self._begun) <= self.processes

    def begin(self, problem: LayeredProblem) -> None:
        """Plan a pipeline ahead, if there are other processes."""
        if self._pool is not None and problem not in self.known and problem not in self._begun:
            with suppress(BrokenExecutor):
                self._begun[problem] = self._pool.submit(_planned, problem)

    def plan(self, problem: LayeredProblem, cancelled: Cancelled | None = None) -> Plan:
        """The plan of a pipeline; raises :class:`InfeasibleMemory` when no cut fits."""
        if problem not in self.known:
            plan = self._ahead(self._begun.pop(problem, None), cancelled)
            self.known[problem] = plan or first_plan(problem, cancelled, self.workers)
        return self.known[problem]

    def _ahead(self, future: Future[Plan] | None, cancelled: Cancelled | None) -> Plan | None:
        """The plan of another process; None without one, after a cancellation, or if a process was killed."""
        while future is not None and not (cancelled is not None and cancelled()):
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                continue
            except BrokenExecutor:
                return None
        return None


_stop: Event


def _begin_process(stop: Event) -> None:
    """Leave Ctrl-C to the search, and end with its process."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()  # returns however the parent ends
        os._exit(1)


def _planned(problem: LayeredProblem) -> Plan:
    return first_plan(problem, _stop.is_set)
