"""The entry of the search: from a problem to a verified plan.

Budgets are counted in placed actions, moves and CP-SAT's deterministic time, never in seconds. So the same
problem, options and version give the same plan on every machine, unless a time limit or a cancellation ends
the search early; the plan's provenance records that.
"""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import require_same_problem
from zbv_solver.search.assemble import compare
from zbv_solver.search.incumbent import Cancelled, OnProgress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.phases import Search


def search(
    problem: AnyProblem,
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
    InfeasibleMemory
        When no plan fits the memory limit.
    InvalidPlan
        When ``incumbent`` is not an order of this problem, or is a plan of another problem.
    ContradictedBound
        When the plan undercuts the lower bound: one of the two is wrong, and neither is returned.
    """
    options = options or SearchOptions()
    if isinstance(problem, LayeredProblem):
        # Imported here because loading the kernels for layers takes a moment.
        from zbv_solver.search.layered import plan_layers

        return plan_layers(problem, options, on_progress, cancelled, incumbent)
    problem.require_feasible()
    if isinstance(incumbent, Plan):
        require_same_problem(problem, incumbent.problem)
        incumbent = incumbent.orders
    running = Search(problem, options, on_progress, cancelled)
    if incumbent is not None:
        running.resume_from(incumbent)
    running.run()
    return replace(running.plan(), baselines=compare(problem))
