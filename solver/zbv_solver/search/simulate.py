"""Plans and their baselines when durations vary: the same random scenarios for all of them."""

from __future__ import annotations

import numpy as np

from zbv_solver.construct.baselines import baseline_names, without_limit
from zbv_solver.errors import InvalidInput
from zbv_solver.jitter.noise import MAX_SEED, Jitter
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.simulation import SimulatedBaseline, Simulation, Spans
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import compare, stated
from zbv_solver.timing.step_times import iteration_times

SCENARIOS = 256
P95 = 0.95
DEFAULT_JITTER = Jitter.of(action=0.05, transfer=0.2)
"""What a plan's page shows: compute that varies by a few percent, and transfers that share their links."""


def simulate(plan: Plan, jitter: Jitter, *, scenarios: int = SCENARIOS, seed: int = 0) -> Simulation:
    """Simulate a plan and the classical schedules of its problem.

    Raises
    ------
    InvalidInput
        When ``scenarios`` or ``seed`` is out of range, or the jitter is for another number of ranks.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput.at("/seed", f"found {seed}; must be from 0 to {MAX_SEED}.")
    problem = plan.problem
    own = _spans(problem, plan.orders, jitter, scenarios, seed)
    names = baseline_names(problem)
    rows = [each for each in plan.baselines if each.name in names] or compare(problem)
    others = [
        SimulatedBaseline(row.name, _spans(without_limit(of), orders, jitter, scenarios, seed), row.fits)
        for row in rows
        for of, orders in [stated(row, problem)]
    ]
    return Simulation(jitter, scenarios, seed, own, tuple(others))


def _spans(problem: Problem, orders: Orders, jitter: Jitter, scenarios: int, seed: int) -> Spans:
    times = iteration_times(problem, orders, jitter, scenarios=scenarios, seed=seed)
    return Spans(
        float(times.span.mean()),
        float(np.quantile(times.span, P95)),
        float(times.makespan.mean()),
        float(np.quantile(times.makespan, P95)),
    )
