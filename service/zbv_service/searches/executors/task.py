"""One search as a plain function of plain data, for another process, and the interface of what runs it.

A :class:`Reporter` of its executor carries reports to the service and requests to stop back. There are two
executors: processes on this machine (:mod:`zbv_service.searches.executors.local`), and a Dask cluster
(:mod:`zbv_service.searches.executors.cluster.executor`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from zbv_solver.errors import ContradictedBound, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.writing import problem_json

from zbv_service.documents.problems import (
    Question,
    answers,
    pack_incumbent,
    pack_plan,
    unpack,
)
from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Claim, Outcome, Update

if TYPE_CHECKING:  # loading the solver's kernels takes a second, which only search processes need
    from zbv_solver.search.incumbent import Progress

METHOD_CHARACTERS = 200
REASON_CHARACTERS = 1000


SearchFunction = Callable[
    [Question, dict[str, Any], Callable[["Progress"], None], Callable[[], bool], Orders | Plan | None], Plan
]
"""Searches a plan; it must be importable in other processes.

Its arguments are those of :func:`solver_search`. It returns a verified plan, or the best plan so far if
cancelled.
"""


class Reporter(Protocol):
    """Connects a search to the service that started it."""

    def report(self, make: Callable[[], Update], /) -> None:
        """Make and send a report soon, in another thread, unless a newer one replaces it. Never blocks."""

    def is_stopped(self) -> bool:
        """Whether the search should return its best plan: on request, or because the service is gone."""


Compute = Callable[[Claim, Reporter], Outcome]
"""Computes a claimed search of a kind to its end; it must be importable in other processes.

The options of the claim also have ``workers``, the number of threads.
"""


class SearchCrashed(Exception):
    """The process of a search died, possibly because of it; the message says how: ``its worker died``."""


class SearchLost(Exception):
    """The process of a search is gone or unreachable for reasons outside the search."""


class SearchEvicted(SearchLost):
    """The process of a search received a signal to end. Only repeated evictions count against the search."""


class Computation(Protocol):
    """One search in an executor."""

    def stop(self) -> None:
        """Ask the search to return its best plan, now or as soon as it begins."""

    def kill(self) -> None:
        """Kill the computation, or give it up where killing is impossible; its process then continues."""

    @property
    def is_under_way(self) -> bool:
        """Whether its process has begun to compute."""

    async def plan(self) -> Outcome:
        """Compute the plan; called once.

        Raises
        ------
        SearchCrashed, SearchLost
            The computation did not finish.
        Exception
            Any error of the search itself.
        """


class SearchExecutor(Protocol):
    """Computes searches between :meth:`start` and :meth:`stop`."""

    async def start(self) -> None:
        """Start; connections that fail are tried again later."""

    async def stop(self) -> None:
        """Release all resources."""

    def kill(self) -> None:
        """Kill every computation now."""

    @property
    def slots(self) -> int:
        """The number of searches that can run at the same time."""

    @property
    def shared_slots(self) -> int | None:
        """The number of slots of all services together, if they share them; otherwise None."""

    @property
    def trouble(self) -> str | None:
        """Why no search can be computed now; None if one can."""

    def expect(self, claim: Claim, compute: Compute, on_update: Callable[[Update], None]) -> Computation:
        """Prepare a search; ``on_update`` is called in the event loop."""


def solver_search(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """The solver's own search."""
    from zbv_solver.problem.jitter import parse_jitter  # here for the same reason as Progress
    from zbv_solver.search.jitter import search_for_jitter
    from zbv_solver.search.options import SearchOptions

    plain = {name: value for name, value in options.items() if name not in ("jitter", "quantile")}
    jitter, quantile = options.get("jitter"), options.get("quantile")
    return search_for_jitter(
        problem,
        SearchOptions(**plain),
        on_progress,
        cancelled,
        incumbent,
        jitter=None if jitter is None else parse_jitter(jitter),
        quantile=quantile,
    )


def search_plan(claim: Claim, reporter: Reporter, search: SearchFunction = solver_search) -> Outcome:
    """Compute a claimed search for a plan.

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
    question = parse_any_problem(unpack(claim.problem))
    if isinstance(question, Problem):  # for layers, only the search can tell
        question.require_feasible()
    incumbent, refusal = None, None
    if claim.incumbent is not None:
        try:
            incumbent = _incumbent(question, unpack(claim.incumbent))
        except ContradictedBound:
            raise
        except Exception as error:  # after any error, the search can start without it
            digest = hashlib.sha256(claim.incumbent).hexdigest()
            refusal = Refusal(digest, f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
    options = claim.options if claim.jitter is None else {**claim.options, "jitter": unpack(claim.jitter)}

    def report(progress: Progress) -> None:
        reporter.report(lambda: update_of(progress, refusal))

    plan = search(question, options, report, reporter.is_stopped, incumbent)
    if not answers(question, plan.problem):
        raise InvalidPlan("the search returned a plan of another problem. This is a bug in zbv.")
    return Outcome.of(pack_plan(plan), refusal)


def plan_of_incumbent(claim: Claim) -> Outcome:
    """The plan of a claim's incumbent, without a search.

    Raises
    ------
    InvalidPlan
        There is none that fits the problem.
    """
    return search_plan(claim, _Nobody(), _kept)


def _kept(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """A search that ends at once with what it starts from."""
    from zbv_solver.search.assemble import make_plan  # here for the same reason as Progress

    if incumbent is None:
        raise InvalidPlan("there is no plan to keep.")
    if isinstance(incumbent, Plan):
        return incumbent
    if not isinstance(problem, Problem):
        raise InvalidPlan("orders of layers say no cut.")
    return make_plan(problem, incumbent, method="resumed")


class _Nobody:
    """The connection of a search that nobody follows."""

    def report(self, make: Callable[[], Update]) -> None:
        """Nobody reads it."""

    def is_stopped(self) -> bool:
        """It ends at once."""
        return True


def _incumbent(question: Question, found: Any) -> Orders | Plan:
    """A verified stored plan to start from: its orders, or the whole plan if layers were cut.

    Raises
    ------
    InvalidPlan
        It is not a plan of this problem.
    Exception
        It cannot be read; the error may be of any kind.
    """
    from zbv_solver.search.assemble import make_plan  # here for the same reason as Progress
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


def update_of(progress: Progress, refusal: Refusal | None = None) -> Update:
    """A report in the form that is stored; packing the ranks of a large problem takes time."""
    problem = progress.problem
    return Update(
        objective=progress.objective,
        lower_bound=progress.lower_bound,
        method=progress.method[:METHOD_CHARACTERS],
        incumbent=pack_incumbent(
            progress.orders.all_text(), None if problem.model is None else problem_json(problem)
        ),
        refusal=refusal,
    )
