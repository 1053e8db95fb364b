"""One search, as it is computed in another process: a plain function of plain data.

Any :class:`concurrent.futures.Executor` can carry it. How its reports reach the service, and how a request
to stop reaches it, is its executor's affair: see :class:`Reporter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from zbv_solver.orders import Orders
from zbv_solver.plan import Plan
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem

from zbv_service.packing import finite, pack, pack_plan, unpack
from zbv_service.records import NewPlan, Update

METHOD_CHARACTERS = 200


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


class Reporter(Protocol):
    """A search's tie to the service that started it."""

    def report(self, progress: ProgressLike) -> None:
        """Have a better plan or bound sent soon; a newer one takes its place. Never waits."""

    def is_stopped(self) -> bool:
        """Whether the search should return what it has: told to, or nobody is left to tell."""


@dataclass(frozen=True)
class SearchTask:
    """Everything that a search is told.

    Attributes
    ----------
    problem, incumbent
        Packed documents: the problem, and the ranks of the best plan known.
    """

    search_id: str
    problem: bytes
    options: dict[str, Any]
    incumbent: bytes | None


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


def compute(task: SearchTask, search: SearchFunction, reporter: Reporter) -> NewPlan:
    """Run a search to its end; raises :class:`zbv_solver.errors.InfeasibleMemory` when no plan fits."""
    problem = parse_problem(unpack(task.problem))
    incumbent = None if task.incumbent is None else Orders.from_text(unpack(task.incumbent))
    problem.require_feasible()
    return pack_plan(search(problem, task.options, reporter.report, reporter.is_stopped, incumbent))


def update_of(progress: ProgressLike) -> Update:
    """A report as it is stored; packing the ranks of a large problem takes a while."""
    return Update(
        objective=progress.objective,
        lower_bound=progress.lower_bound,
        gap=finite(progress.gap),
        method=progress.method[:METHOD_CHARACTERS],
        incumbent=pack(progress.orders.all_text()),
    )
