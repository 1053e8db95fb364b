"""One search as a plain function of plain data, for another process.

Any :class:`concurrent.futures.Executor` can run it. A :class:`Reporter` of its executor carries reports to
the service and requests to stop back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zbv_solver.errors import ContradictedBound, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import problem_json

from zbv_service.documents.packing import finite_or_none, pack_incumbent, pack_plan, unpack
from zbv_service.documents.problems import Question, answers
from zbv_service.records.searches import NewPlan, Refusal, Update

METHOD_CHARACTERS = 200
REASON_CHARACTERS = 1000


class ProgressLike(Protocol):
    """A progress report of the solver; see :class:`zbv_solver.search.search.Progress`."""

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
    """The function that the service runs for a search; it must be importable in other processes."""

    def __call__(
        self,
        problem: Question,
        options: dict[str, Any],
        on_progress: Callable[[ProgressLike], None],
        cancelled: Callable[[], bool],
        incumbent: Orders | Plan | None,
        /,
    ) -> Plan:
        """Search; returns a verified plan, or the best plan so far if cancelled."""


class Reporter(Protocol):
    """Connects a search to the service that started it.

    Attributes
    ----------
    refusal
        Set if the search could not use its stored incumbent; every report carries it.
    """

    refusal: Refusal | None

    def report(self, progress: ProgressLike) -> None:
        """Send a better plan or bound soon, unless a newer one replaces it. Never blocks."""

    def is_stopped(self) -> bool:
        """Whether the search should return its best plan: on request, or because the service is gone."""


@dataclass(frozen=True)
class SearchTask:
    """The input of a search.

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
    # Imported here because loading the solver's kernels takes a second, which only search processes need.
    from zbv_solver.search.search import SearchOptions, search

    return search(problem, SearchOptions(**options), on_progress, cancelled, incumbent)


def compute(task: SearchTask, search: SearchFunction, reporter: Reporter) -> NewPlan:
    """Run a search to its end.

    If the stored incumbent does not fit the problem, it is refused and the search starts without it.

    Raises
    ------
    InfeasibleMemory
        No plan fits the memory limit.
    InvalidPlan
        The search returned a plan of another problem.
    ContradictedBound
        A verified plan undercuts a lower bound.
    """
    question = parse_any_problem(unpack(task.problem))
    if isinstance(question, Problem):  # for layers, only the search can tell
        question.require_feasible()
    incumbent = None
    if task.incumbent is not None:
        try:
            incumbent = _incumbent(question, unpack(task.incumbent))
        except ContradictedBound:
            raise
        except Exception as error:  # the search can start without it, whatever is wrong
            digest = hashlib.sha256(task.incumbent).hexdigest()
            reporter.refusal = Refusal(digest, f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    plan = search(question, task.options, reporter.report, reporter.is_stopped, incumbent)
    if not answers(question, plan.problem):
        raise InvalidPlan("the search returned a plan of another problem. This is a bug in zbv.")
    return replace(pack_plan(plan), refusal=reporter.refusal)


def _incumbent(question: Question, found: Any) -> Orders | Plan:
    """A verified stored plan to start from: its orders, or the whole plan if layers were cut.

    Raises
    ------
    InvalidPlan
        It is not a plan of this problem.
    Exception
        It cannot be read; the error may be of any kind.
    """
    # Imported here because loading the solver's kernels takes a second, which only search processes need.
    from zbv_solver.search.search import make_plan
    from zbv_solver.verify.verifier import verify_orders

    ranks = found if isinstance(found, list) else found["ranks"]
    orders = Orders.from_text(ranks)
    if isinstance(question, Problem):
        verify_orders(question, orders)
        return orders
    problem = parse_problem(found["problem"])
    if not answers(question, problem):
        raise InvalidPlan("the incumbent's cut is not a cut of the problem's layers.")
    return make_plan(problem, orders, method="resumed")


def update_of(progress: ProgressLike, refusal: Refusal | None = None) -> Update:
    """A report in the form that is stored; packing the ranks of a large problem takes time."""
    problem = progress.problem
    return Update(
        objective=progress.objective,
        lower_bound=progress.lower_bound,
        gap=finite_or_none(progress.gap),
        method=progress.method[:METHOD_CHARACTERS],
        incumbent=pack_incumbent(
            progress.orders.all_text(), None if problem.model is None else problem_json(problem)
        ),
        refusal=refusal,
    )
