"""Searches under a test's control; search processes import this module.

Each is a :class:`zbv_service.searches.executors.task.SearchFunction`. The test talks to it by files in the directory
that ``ZBV_TEST_DIRECTORY`` names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbv_service.documents.problems import Question
from zbv_service.searches.executors.task import ProgressLike, SearchFunction, solver_search
from zbv_solver.errors import ContradictedBound, InfeasibleMemory
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Metrics, Plan, Provenance
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.search import make_plan

DEADLINE = 120.0


def directory() -> Path:
    return Path(os.environ["ZBV_TEST_DIRECTORY"])


def stages_of(question: Question) -> Problem:
    """What was asked; layers are cut evenly."""
    if isinstance(question, Problem):
        return question
    placement = question.placements[0]
    stages, layers = placement.n_stages, question.model.n_layers
    return question.cut_into(placement, Cut.at(layers * stage // stages for stage in range(stages + 1)))


def orders_of(problem: Problem) -> Orders:
    """One microbatch after the other: always valid."""
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    rank_of, stages = problem.placement.rank_of, range(problem.n_stages)
    for j in range(problem.microbatches):
        for s in stages:
            ranks[rank_of[s]].append(Action(s, "F", j))
        for s in reversed(stages):
            ranks[rank_of[s]].append(Action(s, "B", j))
    return Orders.from_actions(ranks)


def plan_of(problem: Problem, method: str = "fake") -> Plan:
    """A plan whose stated metrics are made up: only for what the service does around plans."""
    peak = problem.smallest_limit
    metrics = Metrics(8.0, 8.0, 0.5, peak, 4.0, 1.0, "feasible")
    return Plan(problem, orders_of(problem), metrics, provenance=Provenance(method))


@dataclass(frozen=True)
class FakeProgress:
    objective: float
    lower_bound: float
    gap: float
    method: str
    orders: Orders
    problem: Problem


def immediate(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Ends at once."""
    return plan_of(stages_of(problem))


def honest(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Ends at once, and states what its plan really achieves."""
    return make_plan(stages_of(problem), orders_of(stages_of(problem)), method="honest")


def held(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Reports one incumbent, then waits for the file ``release`` or for cancellation."""
    here = directory()
    (here / f"started-{os.getpid()}").write_text(f"workers {options['workers']}")
    if incumbent is not None:
        orders = incumbent.orders if isinstance(incumbent, Plan) else incumbent
        (here / "resumed").write_text("\n".join(orders.text(0)))
    stages = stages_of(problem)
    on_progress(FakeProgress(9.0, 4.0, 1.25, "held", orders_of(stages), stages))
    until = time.monotonic() + DEADLINE
    while not (here / "release").exists() and not cancelled():
        if time.monotonic() > until:
            raise TimeoutError("the test neither released nor cancelled its search.")
        time.sleep(0.01)
    return plan_of(stages_of(problem), "cancelled" if cancelled() else "released")


def deaf(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Never asks whether it is cancelled."""
    return held(problem, options, on_progress, lambda: False, incumbent)


def dying(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Dies by SIGKILL while there is a file ``die-N`` left, each of which it uses up; then ends."""
    here = directory()
    fatal = sorted(here.glob(f"die-{problem.microbatches}-*"))
    if fatal:
        fatal[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return plan_of(stages_of(problem))


def broken(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Fails with an error that is nobody's input."""
    raise ZeroDivisionError("secret detail")


def tight(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Finds that nothing fits."""
    raise InfeasibleMemory((9.0,) * problem.pp_degree, (8.0,) * problem.pp_degree)


def contradicted(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Fails as the library does when a plan undercuts a bound; notes every start."""
    (directory() / f"started-{time.monotonic_ns()}").touch()
    raise ContradictedBound(problem_json(stages_of(problem)), 7.0, 8.0, "cp-sat")


def undercutting(
    problem: Question,
    options: dict[str, Any],
    on_progress: Callable[[ProgressLike], None],
    cancelled: Callable[[], bool],
    incumbent: Orders | Plan | None,
) -> Plan:
    """Reports a bound, and after the file ``release`` a plan that undercuts it; states the bound no more."""
    stages = stages_of(problem)
    on_progress(FakeProgress(9.0, 8.5, 0.5 / 8.5, "first", orders_of(stages), stages))
    until = time.monotonic() + DEADLINE
    while not (directory() / "release").exists():
        if time.monotonic() > until:
            raise TimeoutError("the test did not release its search.")
        time.sleep(0.01)
    on_progress(FakeProgress(8.0, 8.0, 0.0, "second", orders_of(stages), stages))
    while not cancelled() and time.monotonic() < until:
        time.sleep(0.01)
    return plan_of(stages)


@dataclass(frozen=True)
class InDirectory:
    """A fake whose directory is told to it, not inherited: for processes that were there before the test."""

    search: SearchFunction
    directory: Path

    def __call__(
        self,
        problem: Question,
        options: dict[str, Any],
        on_progress: Callable[[ProgressLike], None],
        cancelled: Callable[[], bool],
        incumbent: Orders | Plan | None,
    ) -> Plan:
        os.environ["ZBV_TEST_DIRECTORY"] = str(self.directory)
        return self.search(problem, options, on_progress, cancelled, incumbent)


BY_NAME: dict[str, SearchFunction] = {
    "immediate": immediate,
    "honest": honest,
    "held": held,
    "deaf": deaf,
    "dying": dying,
    "broken": broken,
    "tight": tight,
    "contradicted": contradicted,
    "undercutting": undercutting,
    "solver": solver_search,
}
"""The last is no fake: for what only the solver's answers show."""
