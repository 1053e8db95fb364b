"""A layout whose forwards may run together with backwards, next to what it achieves without that.

The comparison has the plan of the same layout without pairs, and the orders that are made for pairs, with the
cuts that suit them best. All of these are plans of the problem with pairs, so the answer is never longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.construct.pairs import joined
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import classical, fits, make_plan
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import evaluate

from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    PlannedLayout,
    layers_on_ranks,
    plan_layout,
    with_plan,
)
from zbv_models.layouts.setting import SECONDS

MADE_FOR_PAIRS = ("dualpipe-v", "1f1b-overlap", "interleaved-1f1b-overlap")
"""Baselines whose steady state has a backward for every forward."""


@dataclass(frozen=True)
class BaselineStep:
    """A known order on a layout, with the best cut that was found for it."""

    name: str
    step_time: float
    """Seconds."""
    fits: bool
    """Whether it keeps the memory of the devices."""


@dataclass(frozen=True, eq=False)
class PairedLayout(PlannedLayout):
    """A layout with the plan of its pipeline, which may have pairs."""

    alone: PlannedLayout | None
    """The plan of the same layout without pairs; None if none was found that fits."""
    baselines: tuple[BaselineStep, ...]
    """The orders made for pairs that its ranks and microbatches allow."""


def compared(
    planned: PlannedLayout, options: SearchOptions | None = None, cancelled: Cancelled | None = None
) -> PairedLayout:
    """A planned layout with its comparison; with a better plan, if one of those compared is better.

    Parameters
    ----------
    options
        As for the plan of the layout, so that the plan without pairs has the same effort.
    """
    alone = _alone(planned, options, cancelled)
    known = [(name, *classical(name, planned.plan.problem)) for name in _names(planned.plan.problem)]
    steps, candidates = [], [planned.plan]
    for name, problem, orders in known:
        timing = evaluate(problem, orders)
        is_fitting = fits(problem, timing.peak_memory)
        step = timing.span * SECONDS + planned.estimated.once(layers_on_ranks(problem))
        steps.append(BaselineStep(name, step, is_fitting))
        if is_fitting and step < planned.step_time:
            candidates.append(_plan_of(planned.plan, problem, orders, name))
    if alone is not None and alone.step_time < planned.step_time and (cut := alone.plan.problem.model):
        given = planned.estimated.problem
        problem = given.cut_into(alone.plan.problem.placement, cut.cut)
        orders = joined(problem, alone.plan.orders)
        if fits(problem, evaluate(problem, orders).peak_memory):
            candidates.append(_plan_of(planned.plan, problem, orders, "pairs"))
    best = min((with_plan(planned.estimated, plan) for plan in candidates), key=lambda each: each.step_time)
    return PairedLayout(best.estimated, best.plan, best.step_time, planned.lower_bound, alone, tuple(steps))


def _alone(
    planned: PlannedLayout, options: SearchOptions | None, cancelled: Cancelled | None
) -> PlannedLayout | None:
    """The plan of the same layout without pairs."""
    setting = planned.estimated.setting
    without = replace(setting, training=replace(setting.training, pairs="none"))
    try:
        return plan_layout(EstimatedLayout.of(planned.layout, without), options, cancelled)
    except InfeasibleMemory:
        return None


def _names(problem: Problem) -> Iterator[str]:
    return (name for name in baseline_names(problem) if name in MADE_FOR_PAIRS)


def _plan_of(found: Plan, problem: Problem, orders: Orders, method: str) -> Plan:
    """A plan of known orders, with the bounds over all cuts and orders that were proved before."""
    return replace(make_plan(problem, orders, method=method), cut=found.cut)
