"""The whole problem as an exact CP-SAT model: proves small cases optimal, improves larger ones.

The model is in :mod:`.exact_model`; this module runs it within a budget counted in CP-SAT's deterministic
time, with one worker, so that the same question gets the same answer on every machine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ortools.sat.python import cp_model

from zbv_solver.improve.exact_model import ExactModel
from zbv_solver.orders import Orders
from zbv_solver.problem import Problem

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ExactResult:
    """What CP-SAT found.

    Attributes
    ----------
    orders
        The best order, or None when none better than the incumbent was found.
    lower_bound
        A proven bound on the objective in the problem's unit.
    proved
        Whether the search space was exhausted: no order is better than the incumbent or ``orders``.
    """

    orders: Orders | None
    lower_bound: float
    proved: bool


def refine(
    problem: Problem,
    incumbent: Orders,
    *,
    lower_bound: float,
    effort: float,
    time_limit: float | None = None,
    seed: int = 0,
    cancelled: Callable[[], bool] | None = None,
) -> ExactResult:
    """Search the whole problem from a complete hint.

    Parameters
    ----------
    incumbent
        A verified order; only better ones are looked for.
    lower_bound
        A proven bound, in the problem's unit.
    effort
        CP-SAT's deterministic time: the same on every machine.
    time_limit
        Seconds; a cap on top, which makes the result depend on the machine.
    """
    model = ExactModel(problem, incumbent, lower_bound)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    solver.parameters.linearization_level = 0
    solver.parameters.use_precedences_in_disjunctive_constraint = True
    if time_limit is not None:
        solver.parameters.max_time_in_seconds = max(0.01, time_limit)
    with _stopped_when(cancelled, solver):
        status = solver.solve(model.model)
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"CP-SAT rejects the model: {model.model.validate()}")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    bound = lower_bound
    if found and math.isfinite(solver.best_objective_bound):
        bound = max(bound, model.bound_in_units(solver.best_objective_bound))
    return ExactResult(model.orders(solver) if found else None, bound, proved)


@contextmanager
def _stopped_when(cancelled: Callable[[], bool] | None, solver: cp_model.CpSolver) -> Iterator[None]:
    """Stop the solver soon after ``cancelled`` turns true; CP-SAT itself reports only at solutions."""
    if cancelled is None:
        yield
        return
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_SECONDS):
            if cancelled():
                solver.stop_search()

    watcher = threading.Thread(target=watch, name="cp-sat-cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join(timeout=1)
