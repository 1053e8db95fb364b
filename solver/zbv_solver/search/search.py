"""From a problem to a verified plan: the entry point of the search.

Budgets are counted in placed actions, moves and CP-SAT's deterministic time, never in seconds. So the same
problem, options and version give the same plan on every machine, unless a time limit or a cancellation ends
the search early; the plan's provenance records that.
"""

from __future__ import annotations

import time
from dataclasses import replace

from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, require_same_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.baselines import baseline_plan, compare
from zbv_solver.search.for_jitter import for_jitter, planned_options
from zbv_solver.search.options import BUDGETS, EFFORTS, STAGES, Budget, Effort, SearchOptions
from zbv_solver.search.pipeline import Pipeline
from zbv_solver.search.search_state import Cancelled, OnProgress, Progress

__all__ = [
    "BUDGETS",
    "EFFORTS",
    "STAGES",
    "Budget",
    "Cancelled",
    "Effort",
    "OnProgress",
    "Progress",
    "SearchOptions",
    "baseline_plan",
    "compare",
    "make_plan",
    "search",
]


def search(
    problem: Problem | LayeredProblem,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | Plan | None = None,
) -> Plan:
    """Find a plan, prove a bound, verify.

    Parameters
    ----------
    problem
        For layers, cut, placement and order are chosen together (:mod:`zbv_solver.search.layered`).
    on_progress
        Called at every better plan or bound, one call at a time.
    cancelled
        Polled from another thread twenty times a second; once true, the best plan so far is returned.
    incumbent
        An order to start from, such as that of an earlier search; for layers a plan, because orders alone do
        not define the cut.

    Raises
    ------
    InvalidInput
        When the jitter of the options is for another number of ranks.
    InfeasibleMemory
        When no plan fits the memory limit.
    InvalidPlan
        When ``incumbent`` is not an order of this problem, or is a plan of another problem.
    ContradictedBound
        When the plan undercuts a lower bound: one of the two is wrong, and neither is returned.
    """
    began, options = time.monotonic(), options or SearchOptions()
    if options.jitter is not None:
        try:
            options.jitter.require_ranks(problem.pp_degree)
        except InvalidInput as error:
            raise error.below("/jitter") from None
    if isinstance(problem, LayeredProblem):
        # Imported here because loading the kernels for layers takes a moment.
        from zbv_solver.search.layered import plan_layers

        if isinstance(incumbent, Orders):
            raise TypeError("for layers the incumbent must be a Plan: orders alone do not define the cut.")
        plan = plan_layers(problem, planned_options(options), on_progress, cancelled, incumbent)
        return for_jitter(plan, options, began=began, cancelled=cancelled)
    problem.require_feasible()
    if isinstance(incumbent, Plan):
        require_same_problem(problem, incumbent.problem)
        incumbent = incumbent.orders
    with Pipeline(problem, planned_options(options), on_progress, cancelled) as pipeline:
        if incumbent is not None:
            pipeline.resume_from(incumbent)
        pipeline.run()
        plan = replace(pipeline.finish(), baselines=compare(problem))
    return for_jitter(plan, options, began=began, cancelled=cancelled)
