"""A layout whose plan may copy activations to the host, next to what it achieves without that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_solver.errors import InfeasibleMemory
from zbv_solver.problem.problem import COPY_LETTERS
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import SearchOptions
from zbv_solver.verify.copies import BACKWARDS, entries_of

from zbv_models.layouts.estimated_layout import EstimatedLayout, PlannedLayout, plan_layout, with_plan


@dataclass(frozen=True, eq=False)
class CopiedLayout(PlannedLayout):
    """A layout with the plan of its pipeline, which may have copies."""

    alone: PlannedLayout | None
    """The plan of the same layout without copies; None if none was found that fits."""

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


def compared_without_copies(
    planned: PlannedLayout, options: SearchOptions | None = None, cancelled: Cancelled | None = None
) -> CopiedLayout:
    """A planned layout next to the plan of the same layout without copies, with the same effort."""
    setting = replace(planned.estimated.setting, copies="none")
    try:
        alone = plan_layout(EstimatedLayout.of(planned.layout, setting), options, cancelled)
    except InfeasibleMemory:
        alone = None
    if planned.plan.orders.copies is None and (alone is None or planned.step_time <= alone.step_time):
        alone = planned  # it needs no copies
    elif alone is not None and alone.step_time < planned.step_time and (cut := alone.plan.problem.model):
        problem = planned.estimated.problem.cut_into(alone.plan.problem.placement, cut.cut)
        plan = make_plan(problem, alone.plan.orders, method=alone.plan.provenance.method)
        planned = replace(
            with_plan(planned.estimated, replace(plan, cut=planned.plan.cut)), lower_bound=planned.lower_bound
        )
    return CopiedLayout(planned.estimated, planned.plan, planned.step_time, planned.lower_bound, alone)
