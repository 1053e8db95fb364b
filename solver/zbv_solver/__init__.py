"""Plans zero-bubble V schedules for pipeline-parallel training.

The library in five lines::

    import zbv_solver as zbv

    plan = zbv.plan(zbv.load_problem("problem.json"), effort="standard")
    print(plan.metrics.span, plan.metrics.lower_bound, plan.rank(0))
    plan.save("plan.json")

A problem gives the costs of its stages (:class:`Problem`), or of a model's layers that zbv cuts into stages
(:class:`LayeredProblem`). Every function except :func:`compare` takes both. docs/formats.md describes the
documents. Importing the package is fast: functions import their dependencies when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbv_solver._version import __version__
from zbv_solver.errors import (
    ContradictedBound,
    InfeasibleMemory,
    InvalidInput,
    InvalidPlan,
    Issue,
    MissingDependency,
    ZbvError,
)

if TYPE_CHECKING:
    from zbv_solver.frontiers.frontier import FrontierPoint
    from zbv_solver.packing.batch import Batch, load_batch, parse_batch
    from zbv_solver.packing.packing import Packing
    from zbv_solver.plans.orders import Orders
    from zbv_solver.plans.plan import Baseline, Metrics, Plan, Simulation
    from zbv_solver.problem.jitter import Jitter
    from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
    from zbv_solver.problem.problem import Problem
    from zbv_solver.problem.reading import load_problem
    from zbv_solver.problem.reading import parse_any_problem as parse
    from zbv_solver.search.assemble import compare
    from zbv_solver.search.claims import CheckedPlan, load_plan
    from zbv_solver.search.incumbent import Progress
    from zbv_solver.search.options import Effort
    from zbv_solver.search.step_planner import StepPlanner

__all__ = [
    "Baseline",
    "Batch",
    "CheckedPlan",
    "ContradictedBound",
    "FrontierPoint",
    "InfeasibleMemory",
    "InvalidInput",
    "InvalidPlan",
    "Issue",
    "Jitter",
    "LayeredProblem",
    "Metrics",
    "MissingDependency",
    "Orders",
    "Packing",
    "Plan",
    "Problem",
    "Progress",
    "Simulation",
    "StepPlanner",
    "ZbvError",
    "__version__",
    "check",
    "compare",
    "frontier",
    "load_batch",
    "load_plan",
    "load_problem",
    "pack",
    "parse",
    "parse_batch",
    "plan",
    "simulate",
]

_HOMES = {
    "Baseline": "plans.plan.Baseline",
    "Batch": "packing.batch.Batch",
    "CheckedPlan": "search.claims.CheckedPlan",
    "FrontierPoint": "frontiers.frontier.FrontierPoint",
    "Jitter": "problem.jitter.Jitter",
    "LayeredProblem": "problem.layered_problem.LayeredProblem",
    "Metrics": "plans.plan.Metrics",
    "Orders": "plans.orders.Orders",
    "Packing": "packing.packing.Packing",
    "Plan": "plans.plan.Plan",
    "Problem": "problem.problem.Problem",
    "Progress": "search.incumbent.Progress",
    "Simulation": "plans.plan.Simulation",
    "StepPlanner": "search.step_planner.StepPlanner",
    "compare": "search.assemble.compare",
    "load_batch": "packing.batch.load_batch",
    "load_plan": "search.claims.load_plan",
    "load_problem": "problem.reading.load_problem",
    "parse_batch": "packing.batch.parse_batch",
    "parse": "problem.reading.parse_any_problem",
}


def __getattr__(name: str) -> Any:
    """Import a class or function when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, own_name = _HOMES[name].rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), own_name)


def __dir__() -> list[str]:
    return __all__


def plan(
    problem: AnyProblem,
    effort: Effort = "standard",
    *,
    time_limit: float | None = None,
    seed: int = 0,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    start_from: Plan | None = None,
    jitter: Jitter | str | None = None,
    quantile: float | None = None,
) -> Plan:
    """Search a plan, prove a lower bound, and verify the plan.

    The same problem, effort and seed give the same plan on every machine, unless ``time_limit`` or
    ``cancelled`` ends the search early.

    Parameters
    ----------
    effort
        ``"quick"``, ``"standard"`` or ``"thorough"``; ``zbv plan --help`` says how long they take.
    time_limit
        Seconds; None is no limit.
    workers
        Threads. Their number does not change the plan.
    on_progress
        Called with every better plan or bound.
    cancelled
        Polled twenty times a second from another thread. When it returns True, the best plan so far is
        returned.
    start_from
        A plan of the same problem to improve.
    jitter
        Choose the plan for durations that vary: what :func:`simulate` takes. The lower bound and the gap
        remain those of planned durations.
    quantile
        With ``jitter``, the quantile of the simulated times to choose for, from 0.5 to 0.99; None is their
        mean.

    Raises
    ------
    InvalidInput
        When an option is out of range.
    InfeasibleMemory
        When no plan fits the memory limit.
    InvalidPlan
        When ``start_from`` is a plan of another problem.
    ContradictedBound
        When the plan undercuts the lower bound, which is a bug in zbv.
    """
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    options = SearchOptions(effort, time_limit, seed, workers)
    if jitter is None and quantile is None:
        return search(problem, options, on_progress, cancelled, start_from)
    from zbv_solver.problem.jitter import parse_jitter
    from zbv_solver.search.jitter import search_for_jitter

    varies = parse_jitter(jitter) if isinstance(jitter, str) else jitter
    return search_for_jitter(
        problem, options, on_progress, cancelled, start_from, jitter=varies, quantile=quantile
    )


def check(document: Any, problem: AnyProblem | None = None, *, prove: bool = False) -> CheckedPlan:
    """Verify a decoded plan document, and list which of its claims are verified.

    Parameters
    ----------
    problem
        The problem that the plan must be for; None accepts the plan's own problem.
    prove
        Prove the stated lower bounds again, which may take as long as a thorough search. Otherwise lower
        bounds are listed as not verified.

    Raises
    ------
    InvalidInput
        When the document is not a plan, or is a plan for another problem.
    InvalidPlan
        When a claim is false, or a lower bound cannot be proved.
    """
    from zbv_solver.search.claims import check_plan

    return check_plan(document, problem, prove=prove)


def frontier(
    problem: AnyProblem,
    effort: Effort = "quick",
    *,
    time_limit: float | None = None,
    seed: int = 0,
    workers: int = 1,
) -> tuple[FrontierPoint, ...]:
    """The best plan within every memory limit, from the smallest feasible one to twice the memory of 1F1B.

    Parameters
    ----------
    effort, time_limit, seed, workers
        As in :func:`plan`, for the search at every limit.

    Raises
    ------
    InvalidInput
        When an option is out of range, or when the problem's stages or layers hold no memory.
    ContradictedBound
        When a plan undercuts a lower bound, which is a bug in zbv.
    """
    from zbv_solver.frontiers.frontier import frontier_points
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

    options = SearchOptions(effort, time_limit, seed, workers)
    return frontier_points(problem, lambda limited: search(limited, options))


def pack(
    batch: Batch,
    effort: Effort = "quick",
    *,
    time_limit: float | None = None,
    seed: int = 0,
    workers: int = 1,
    compare: bool = False,
) -> Packing:
    """Choose the microbatches of a global batch, the replica of each, their order and the plans together.

    Parameters
    ----------
    effort, time_limit, seed, workers
        As in :func:`plan`, for the search of every replica's plan.
    compare
        Plan the usual packing too, with the same effort.

    Raises
    ------
    InvalidInput
        When an option is out of range.
    ContradictedBound
        When a plan undercuts a lower bound, which is a bug in zbv.
    """
    from zbv_solver.packing.packing import pack
    from zbv_solver.search.options import SearchOptions

    return pack(batch, SearchOptions(effort, time_limit, seed, workers), compare=compare)


def simulate(plan: Plan, jitter: Jitter | str, *, scenarios: int = 256, seed: int = 0) -> Simulation:
    """How a plan and the classical schedules behave when durations vary.

    The orders are fixed and the times are not: every action and transfer takes longer or shorter than
    planned, by random factors that all schedules share.

    Parameters
    ----------
    jitter
        Relative standard deviations: ``Jitter.of(action=0.05, transfer=0.2)``, or text such as
        ``"action=5%,transfer=20%"``.
    scenarios
        Number of simulated iterations.

    Raises
    ------
    InvalidInput
        When the jitter is not one of this plan's ranks, or a number is out of range.
    """
    from zbv_solver.problem.jitter import parse_jitter
    from zbv_solver.search.jitter import simulate

    return simulate(
        plan, parse_jitter(jitter) if isinstance(jitter, str) else jitter, scenarios=scenarios, seed=seed
    )
