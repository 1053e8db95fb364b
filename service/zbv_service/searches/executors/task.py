"""One search, as it is computed in another process: a plain function of plain data.

Any :class:`concurrent.futures.Executor` can carry it. How its reports reach the service, and how a request
to stop reaches it, is its executor's affair: see :class:`Reporter`.
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
from zbv_solver.problem.stage_document import parse_problem, problem_json

from zbv_service.documents.packing import finite, pack_incumbent, pack_plan, unpack
from zbv_service.documents.problems import Question, answers, parse_question
from zbv_service.records.searches import NewPlan, Refusal, Update

METHOD_CHARACTERS = 200
REASON_CHARACTERS = 1000


class ProgressLike(Protocol):
    """What the solver reports: see :class:`zbv_solver.search.search.Progress`."""

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
    """A search's tie to the service that started it.

    Attributes
    ----------
    refusal
        Every report carries it: the search could not use its stored incumbent.
    """

    refusal: Refusal | None

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
    from zbv_solver.search.search import SearchOptions, search

    return search(problem, SearchOptions(**options), on_progress, cancelled, incumbent)


def compute(task: SearchTask, search: SearchFunction, reporter: Reporter) -> NewPlan:
    """Run a search to its end.

    A stored incumbent that does not fit the problem is refused, and the search starts without it.

    Raises
    ------
    InfeasibleMemory
        When no plan fits.
    InvalidPlan
        When the search returns a plan of another problem.
    ContradictedBound
        When a verified plan undercuts a lower bound.
    """
    question = parse_question(unpack(task.problem))
    if isinstance(question, Problem):  # of layers, only the search finds out
        question.require_feasible()
    incumbent = None
    if task.incumbent is not None:
        try:
            incumbent = _incumbent(question, unpack(task.incumbent))
        except ContradictedBound:
            raise
        except Exception as error:  # whatever is wrong with it: the search can do without
            digest = hashlib.sha256(task.incumbent).hexdigest()
            reporter.refusal = Refusal(digest, f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    plan = search(question, task.options, reporter.report, reporter.is_stopped, incumbent)
    if not answers(question, plan.problem):
        raise InvalidPlan("the search returned a plan of another problem. This is a bug in zbv.")
    return replace(pack_plan(plan), refusal=reporter.refusal)


def _incumbent(question: Question, found: Any) -> Orders | Plan:
    """A stored plan to start from, verified: orders, or a whole plan where layers were cut.

    Raises
    ------
    InvalidPlan
        When it is no plan of this problem.
    Exception
        Any other kind, when it cannot be read.
    """
    # Imported here: the solver's kernels take a second that only search processes should spend.
    from zbv_solver.search.search import make_plan
    from zbv_solver.verify.verifier import verify_orders

    ranks = found if isinstance(found, list) else found["ranks"]
    orders = Orders.from_text(ranks)
    if isinstance(question, Problem):
        verify_orders(question, orders)
        return orders
    problem = parse_problem(found["problem"])
    if not answers(question, problem):
        raise InvalidPlan("the incumbent's cut is not a cut of the layers that were asked for.")
    return make_plan(problem, orders, method="resumed")


def update_of(progress: ProgressLike, refusal: Refusal | None = None) -> Update:
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
        refusal=refusal,
    )
