"""Verified plans from orders, and from plan files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zbv_solver import bounds
from zbv_solver.documents.files import file_label
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.certificate import certify
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Metrics, Plan, Provenance
from zbv_solver.plans.reading import load_plan_document, parse_orders, to_plan
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify, verify_orders


def make_plan(
    problem: Problem,
    orders: Orders,
    *,
    method: str,
    lower_bound: float | None = None,
    source: str = "bounds",
    seed: int = 0,
    seconds: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> Plan:
    """A verified plan from orders, without baselines.

    Parameters
    ----------
    lower_bound, source
        A proven bound on the objective, and where it comes from; None computes one.

    Raises
    ------
    InvalidPlan
        When the orders break a rule of the problem.
    ContradictedBound
        When the orders undercut the bound.
    """
    verify_orders(problem, orders)
    timing = evaluate(problem, orders)
    bound = bounds.lower_bound(problem).value if lower_bound is None else lower_bound
    value = objective_value(problem.objective, timing)
    certificate = certify(problem, value, bound, source)
    metrics = Metrics(
        makespan=timing.makespan,
        span=timing.span,
        bubble_rate=timing.bubble_rate,
        peak_memory=timing.peak_memory,
        lower_bound=certificate.lower_bound,
        gap=certificate.gap,
        status=certificate.status,
    )
    plan = Plan(problem, orders, metrics, (), Provenance(method, seed, seconds, extra=extra or {}))
    verify(plan)
    return plan


def load_plan(path: str | Path) -> Plan:
    """Read and verify a plan file; metrics that it does not state are computed.

    Raises
    ------
    InvalidInput
        When the file is not JSON or not a plan.
    InvalidPlan
        When the orders cannot be executed, or a stated metric is wrong.
    OSError
        When the file cannot be read.
    """
    parsed = load_plan_document(path)
    try:
        if parsed.metrics is None:
            return make_plan(*parse_orders(parsed), method=parsed.provenance.method)
        plan = to_plan(parsed)
        verify(plan)
    except InvalidInput as error:
        raise error.found_in(file_label(path)) from None
    except InvalidPlan as error:
        raise InvalidPlan(f"{file_label(path)}: {error}") from None
    return plan
