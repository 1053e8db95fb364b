"""A layout whose plan may have pairs or copies to the host, next to what it achieves without them.

The comparison has the plans of the same layout without pairs and without copies, and the orders that are made
for pairs, with the cuts that suit them best. All of these are plans of the layout, so the answer is never
longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.construct.pairs import joined
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.improve.copies import plan_copies
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import COPY_LETTERS, Problem
from zbv_solver.search.assemble import classical, fits, make_plan
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import SearchOptions
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.copies import BACKWARDS, entries_of

from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    PlannedLayout,
    layers_on_ranks,
    plan_layout,
    with_plan,
)
from zbv_models.layouts.setting import SECONDS, Setting

MADE_FOR_PAIRS = ("dualpipe-v", "1f1b-overlap", "interleaved-1f1b-overlap")
"""Baselines whose steady state has a backward for every forward."""


@dataclass(frozen=True)
class BaselineStep:
    """A known order on a layout, with the best cut that was found for it."""

    name: str
    step_time: float
    """Seconds."""
    fits: bool
    """Whether it keeps the memory of the devices without copies."""


@dataclass(frozen=True, eq=False)
class ComparedLayout(PlannedLayout):
    """A layout with the plan of its pipeline, and plans without what this one may have."""

    without_pairs: PlannedLayout | None
    without_copies: PlannedLayout | None
    """None if none was found that fits, or if the plan may not have them anyway."""
    baselines: tuple[BaselineStep, ...]
    """The orders made for pairs that its ranks and microbatches allow."""

    @property
    def copied(self) -> int:
        """F's whose activations are copied in a step, on all ranks."""
        rows = self.plan.orders.copies
        return 0 if rows is None else len(rows) // len(COPY_LETTERS)

    @property
    def on_host(self) -> list[float]:
        """(p,) most bytes of copies that the host holds at once for every rank."""
        problem, orders = self.plan.problem, self.plan.orders
        found, copies = [0.0] * problem.pp_degree, problem.copies
        if orders.copies is None or copies is None:
            return found
        for rank in range(problem.pp_degree):
            held, away = 0.0, set()
            for entry in entries_of(orders, rank):
                if entry.letter == "O":
                    away.add(entry.cell)
                    held += copies.offloadable[entry.stage]
                    found[rank] = max(found[rank], held)
                elif entry.letter in BACKWARDS and entry.cell in away:
                    held -= copies.offloadable[entry.stage]
        return found


def compared(
    planned: PlannedLayout, options: SearchOptions | None = None, cancelled: Cancelled | None = None
) -> ComparedLayout:
    """A planned layout with its comparison; with a better plan, if one of those compared is better.

    Parameters
    ----------
    options
        As for the plan of the layout, so that the plans without pairs and copies have the same effort.
    """
    setting = planned.estimated.setting
    has_pairs, has_copies = setting.training.pairs != "none", setting.copies != "none"
    without_pairs: PlannedLayout | None = None
    without_copies: PlannedLayout | None = None
    if has_pairs:
        single = replace(setting, training=replace(setting.training, pairs="none"))
        without_pairs = _plan_in(single, planned, options, cancelled)
    if has_copies:
        without_copies = _plan_in(replace(setting, copies="none"), planned, options, cancelled)
    steps, found = _baselines(planned) if has_pairs else ((), [])
    found += [
        (each.plan.provenance.method, each.plan.problem, each.plan.orders)
        for each in (without_pairs, without_copies)
        if each is not None and each.step_time < planned.step_time
    ]
    others = (with_plan(planned.estimated, plan) for each in found for plan in _plans(planned, *each))
    best = min((planned, *others), key=lambda each: each.step_time)
    if has_copies and best.plan.orders.copies is None:
        without_copies = best  # it needs none
    return ComparedLayout(
        best.estimated, best.plan, best.step_time, planned.lower_bound, without_pairs, without_copies, steps
    )


def _plan_in(
    setting: Setting, planned: PlannedLayout, options: SearchOptions | None, cancelled: Cancelled | None
) -> ComparedLayout | None:
    """The answer for the same layout in another setting; None if none was found that fits."""
    try:
        found = plan_layout(EstimatedLayout.of(planned.layout, setting), options, cancelled)
    except InfeasibleMemory:
        return None
    return compared(found, options, cancelled)


def _baselines(
    planned: PlannedLayout,
) -> tuple[tuple[BaselineStep, ...], list[tuple[str, Problem, Orders]]]:
    """The steps of the orders made for pairs, and those orders that may be shorter than the plan."""
    steps, found = [], []
    for name in (each for each in baseline_names(planned.plan.problem) if each in MADE_FOR_PAIRS):
        problem, orders = classical(name, planned.plan.problem)
        timing = evaluate(problem, orders)
        step = timing.span * SECONDS + planned.estimated.once(layers_on_ranks(problem))
        steps.append(BaselineStep(name, step, fits(problem, timing.peak_memory)))
        if step < planned.step_time:
            found.append((name, problem, orders))
    return tuple(steps), found


def _plans(planned: PlannedLayout, method: str, cut: Problem, orders: Orders) -> Iterator[Plan]:
    """The plan of an order on its cut, with pairs and copies that it may have; none if it does not fit.

    It has the bounds over all cuts and orders that were proved before.
    """
    if cut.model is None:
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    problem = planned.estimated.problem.cut_into(cut.placement, cut.model.cut)
    if problem.communication is not None and orders.paired is None:
        orders = joined(problem, orders)
    if problem.copies is not None and orders.copies is None:
        made = plan_copies(problem, orders)
        orders = orders if made is None else made[1]
    if fits(problem, evaluate(problem, orders).peak_memory):
        yield replace(make_plan(problem, orders, method=method), cut=planned.plan.cut)
