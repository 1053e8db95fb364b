"""What an answer says about the executor of a layout (docs/formats.md, Layouts)."""

from __future__ import annotations

from typing import Any

from zbv_models.layouts.executor_layouts import ExecutorLayout
from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.search import PlannedLayout


def executor_json(planned: PlannedLayout) -> dict[str, Any]:
    """The keys of a layout that depend on its executor."""
    if not isinstance(planned, ExecutorLayout):
        return {"executor": FREE}
    schedule, free = planned.best.schedule, planned.free
    return {
        "executor": planned.executor,
        "schedule": schedule.name,
        "virtual_stages": schedule.placement.chunks,
        "group_size": schedule.group,
        "settings": planned.settings,
        "remark": planned.remark,
        "free_order": None
        if free is None
        else {"step_time": free.step_time, "lower_bound": free.lower_bound},
    }


def schedule_name(planned: PlannedLayout) -> str:
    """The schedule in a few words."""
    if not isinstance(planned, ExecutorLayout):
        return "searched"
    schedule = planned.best.schedule
    return schedule.name if schedule.group is None else f"{schedule.name}, groups of {schedule.group}"


def free_step(planned: PlannedLayout) -> str:
    """The step in a free order, and by how much it is shorter."""
    if not isinstance(planned, ExecutorLayout):
        return f"{planned.step_time:.4g} s"
    if planned.free is None:
        return "does not fit"
    gain = 1 - planned.free.step_time / planned.step_time
    return f"{planned.free.step_time:.4g} s" + (f" (-{gain:.1%})" if gain >= 0.0005 else "")
