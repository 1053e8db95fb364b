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
from zbv_solver.schema import parse_problem, problem_json

from zbv_service.packing import finite, pack_incumbent, pack_plan, unpack
from zbv_service.questions import Question, parse_question
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
    @property
    def problem(self) -> Problem: ...  # noqa: D102


class SearchFunction(Protocol):
    """What the service runs for a search. It is sent to other processes, so it must be importable."""

    def __call__(
        self,
        problem: Question,
        options: dict[str, Any],
        on_progress: Callable[[ProgressLike], None],
        cancelled: Callable[[], bool],
        incumbent: Orders | Plan | None,
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
        Packed documents: the problem, and the ranks of the best plan known (:func:`pack_incumbent`).
    """

    search_id: str
    problem: bytes
    options: dict[str, Any]
    incumbent: bytes | None


def solver_search(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """The solver's own search."""
    # Imported here: the solver's kernels take a second that only search processes should spend.
    from zbv_solver.search import SearchOptions, search

    return search(problem, SearchOptions(**options), on_progress, cancelled, incumbent)


def compute(task: SearchTask, search: SearchFunction, reporter: Reporter) -> NewPlan:
    """Run a search to its end; raises :class:`zbv_solver.errors.InfeasibleMemory` when no plan fits."""
    question = parse_question(unpack(task.problem))
    incumbent = None if task.incumbent is None else _incumbent(question, unpack(task.incumbent))
    if isinstance(question, Problem):  # of layers, only the search finds out
        question.require_feasible()
    return pack_plan(search(question, task.options, reporter.report, reporter.is_stopped, incumbent))


def _incumbent(question: Question, found: Any) -> Orders | Plan:
    """What to go on from: orders, and of layers those of a cut."""
    ranks = found if isinstance(found, list) else found["ranks"]
    orders = Orders.from_text(ranks)
    if isinstance(question, Problem):
        return orders
    # Imported here, as the solver's own search is.
    from zbv_solver.search import make_plan

    return make_plan(parse_problem(found["problem"]), orders, method="resumed")


def update_of(progress: ProgressLike) -> Update:
    """A report as it is stored; packing the ranks of a large problem takes a while."""
    problem = progress.problem
    return Update(
        objective=progress.objective,
        lower_bound=progress.lower_bound,
        gap=finite(progress.gap),
        method=progress.method[:METHOD_CHARACTERS],
        incumbent=pack_incumbent(
            progress.orders.all_text(), None if problem.model is None else problem_json(problem)
        ),
    )
