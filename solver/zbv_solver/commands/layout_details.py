"""What ``zbv layout`` prints besides the ranking: the parts of the best step, and what changes do."""

from __future__ import annotations

from rich.table import Table
from zbv_models.layouts.composition import composition
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.search import PlannedLayout, Ranking
from zbv_models.layouts.sensitivity import MOST_PLANS, Change, Outcome

LEAST_SHARE = 5e-5
"""Parts below this share of the step are not shown."""
SHORT = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "data_parallel": "dp",
    "pipeline_parallel": "pp",
    "microbatch_size": "microbatch",
    "zero_stage": "ZeRO",
}


def composition_table(planned: PlannedLayout) -> Table:
    """The parts of a step, and their shares."""
    table = Table(title="the best step consists of", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, seconds in composition(planned).parts().items():
        share = seconds / planned.step_time
        if share >= LEAST_SHARE:
            table.add_row(name.replace("_", " "), f"{seconds:.4g} s", f"{share:.1%}")
    return table


def sensitivity_table(ranking: Ranking, found: list[Outcome]) -> Table:
    """A row per change."""
    base = ranking.best[0]
    table = Table(title="if these were different", title_justify="left")
    for name in ("change", "step of the best layout", "best layout then", "its step"):
        table.add_column(name, justify="left" if name in ("change", "best layout then") else "right")
    for each in found:
        step = "does not fit" if each.step_time is None else f"{each.step_time:.4g} s"
        if each.best is None or each.best_step_time is None:
            table.add_row(change_text(each.change), step, "none fits", "")
            continue
        is_same = each.best_step_time == each.step_time
        layout = "the same" if is_same else difference(each.best, base.layout)
        mark = "" if each.is_proved else " *"
        table.add_row(change_text(each.change), step, layout, f"{each.best_step_time:.4g} s{mark}")
    return table


def sensitivity_note(found: list[Outcome]) -> str:
    """What the table compares."""
    return (
        f"Among {max(each.among for each in found)} layouts: those with the shortest steps or least bounds, "
        f"and some that lack little memory. For each change, at most {MOST_PLANS} pipelines are planned (* a "
        "layout that was not planned may be better)."
    )


def change_text(change: Change) -> str:
    """A change in a few words."""
    name = {"device_flops": "device FLOP/s"}.get(change.of, change.of.replace("_", " "))
    return f"{name} x {change.factor:g}"


def difference(layout: Layout, before: Layout) -> str:
    """The parts of a layout that differ from another one's."""
    parts = [
        f"{short} {getattr(layout, name)}"
        for name, short in SHORT.items()
        if getattr(layout, name) != getattr(before, name)
    ]
    if layout.placement != before.placement:
        parts.append(layout.placement)
    return ", ".join(parts) or "the same"
