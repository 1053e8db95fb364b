"""Searches for plans that a test controls; search processes import this module.

Each is a :class:`zbv_service.searches.executors.task.SearchFunction`. The test controls it
with files in the directory that ``ZBV_TEST_DIRECTORY`` names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from zbv_service.documents.problems import Question
from zbv_service.records.searches import Update
from zbv_service.searches.executors.task import SearchFunction, solver_search
from zbv_solver.errors import ContradictedBound, InfeasibleMemory
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Metrics, Plan, Provenance
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress

from support.processes import DEADLINE, announce


def directory() -> Path:
    return Path(os.environ["ZBV_TEST_DIRECTORY"])


def stages_of(question: Question) -> Problem:
    """The problem; layers are divided evenly into stages."""
    if isinstance(question, Problem):
        return question
    placement = question.placements[0]
    stages, layers = placement.n_stages, question.model.n_layers
    return question.cut_into(placement, Cut.at(layers * stage // stages for stage in range(stages + 1)))


def orders_of(problem: Problem) -> Orders:
    """One microbatch after the other, which is always valid."""
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    rank_of, stages = problem.placement.rank_of, range(problem.n_stages)
    for j in range(problem.microbatches):
        for s in stages:
            ranks[rank_of[s]].append(Action(s, "F", j))
        for s in reversed(stages):
            ranks[rank_of[s]].append(Action(s, "B", j))
    return Orders.from_actions(ranks)


def plan_of(problem: Problem, method: str = "fake") -> Plan:
    """A plan with invented metrics, for tests that do not depend on them."""
    peak = problem.smallest_limit
    metrics = Metrics(8.0, 8.0, 0.5, peak, 4.0, 1.0, "feasible")
    return Plan(problem, orders_of(problem), metrics, provenance=Provenance(method))


class Arguments(NamedTuple):
    question: Question
    options: dict[str, Any]
    on_progress: Callable[[Progress], None]
    cancelled: Callable[[], bool]
    incumbent: Orders | Plan | None

    @property
    def problem(self) -> Problem:
        """The problem; layers are divided into stages."""
        return stages_of(self.question)


BY_NAME: dict[str, SearchFunction] = {"solver": solver_search}
"""The fakes below, and the solver's search for tests that need real plans."""


def fake(search: Callable[[Arguments], Plan]) -> SearchFunction:
    """A search function that calls ``search`` with its arguments as one object."""

    @wraps(search)
    def call(*arguments: Any) -> Plan:
        return search(Arguments(*arguments))

    BY_NAME[search.__name__] = call
    return call


@fake
def immediate(given: Arguments) -> Plan:
    """Ends at once."""
    return plan_of(given.problem)


@fake
def honest(given: Arguments) -> Plan:
    """Ends at once; its plan has its true metrics."""
    return make_plan(given.problem, orders_of(given.problem), method="honest")


@fake
def first(given: Arguments) -> Plan:
    """The solver's first plan of layers, without the classical schedules, whose cuts take the longest."""
    from zbv_solver.search.layered import first_plan  # loads kernels that only layers need

    if isinstance(given.question, LayeredProblem):
        return first_plan(given.question, given.cancelled)
    return solver_search(*given)


@fake
def held(given: Arguments) -> Plan:
    """Reports one plan, then waits for the file ``release`` or for cancellation."""
    return hold(given)


def started_and_released(is_stopped: Callable[[], bool], workers: int) -> bool:
    """Write the file ``started-PID``, and wait for the file ``release``; False if the search is stopped."""
    here = directory()
    announce(here / f"started-{os.getpid()}", f"workers {workers}")
    until = time.monotonic() + DEADLINE
    while not (here / "release").exists():
        if is_stopped():
            return False
        if time.monotonic() > until:
            raise TimeoutError("the test neither released nor cancelled its search.")
        time.sleep(0.01)
    return True


def hold(given: Arguments) -> Plan:
    """Does what :func:`held` describes."""
    here = directory()
    if given.incumbent is not None:
        orders = given.incumbent.orders if isinstance(given.incumbent, Plan) else given.incumbent
        announce(here / "resumed", "\n".join(orders.text(0)))
    given.on_progress(Progress(9.0, 4.0, 1.25, "held", 0.0, orders_of(given.problem), given.problem))
    was_released = started_and_released(given.cancelled, given.options["workers"])
    return plan_of(given.problem, "released" if was_released else "cancelled")


@fake
def deaf(given: Arguments) -> Plan:
    """Ignores cancellation."""
    return hold(given._replace(cancelled=lambda: False))


@fake
def mute(given: Arguments) -> Plan:
    """Ignores cancellation, and reports nothing."""
    return hold(given._replace(cancelled=lambda: False, on_progress=lambda _: None))


@fake
def greedy(given: Arguments) -> Plan:
    """Needs more memory than any limit; records every start."""
    starts = directory() / "starts"
    starts.mkdir(exist_ok=True)
    (starts / str(len(os.listdir(starts)))).touch()
    held = []
    while True:
        held.append(bytearray(1024**2))


@fake
def dying(given: Arguments) -> Plan:
    """Removes one file ``die-M-*`` and kills its process; ends normally when there is no such file."""
    here = directory()
    fatal = sorted(here.glob(f"die-{given.problem.microbatches}-*"))
    if fatal:
        fatal[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_of(given.problem)


@fake
def broken(given: Arguments) -> Plan:
    """Fails with an error that the input did not cause."""
    raise ZeroDivisionError("secret detail")


@fake
def tight(given: Arguments) -> Plan:
    """Finds that no plan fits the memory limit."""
    raise InfeasibleMemory((9.0,) * given.problem.pp_degree, (8.0,) * given.problem.pp_degree)


@fake
def contradicted(given: Arguments) -> Plan:
    """Fails as the library does when a plan is better than a bound; records every start."""
    (directory() / f"started-{time.monotonic_ns()}").touch()
    raise ContradictedBound(problem_json(given.problem), 7.0, 8.0, "cp-sat")


@fake
def undercutting(given: Arguments) -> Plan:
    """Reports a bound, and after the file ``release`` a plan that is better, with another bound."""
    stages = given.problem
    given.on_progress(Progress(9.0, 8.5, 0.5 / 8.5, "first", 0.0, orders_of(stages), stages))
    started_and_released(lambda: False, 1)
    given.on_progress(Progress(8.0, 8.0, 0.0, "second", 0.0, orders_of(stages), stages))
    while not given.cancelled():
        time.sleep(0.01)
    return plan_of(stages)


@dataclass(frozen=True)
class InDirectory:
    """A fake that sets its directory itself, for processes that started before the test."""

    search: Callable[..., Any]
    directory: Path

    def __call__(self, *arguments: Any) -> Any:
        os.environ["ZBV_TEST_DIRECTORY"] = str(self.directory)
        return self.search(*arguments)


class Listener:
    """A reporter without a service: keeps the reports, and stops the search on demand."""

    def __init__(self, *, stops: bool = False):
        self.reports: list[Update] = []
        self.is_stopped = lambda: stops

    def report(self, make: Callable[[], Update]) -> None:
        self.reports.append(make())
