"""The page of one plan."""

from __future__ import annotations

from zbv_solver.export import FORMATS, report
from zbv_solver.plan import Plan

from zbv_service.pages.shell import Shell, render


def plan_page(plan: Plan, shell: Shell) -> str:
    """What the plan achieves, its Gantt chart, the baselines beside it, every action."""
    address = f"{shell.root}/v1/plans/{plan.plan_id}"
    exports = [
        report.ExportLink(name, f"{address}/export/{name}", entry.description)
        for name, entry in FORMATS.items()
    ]
    view = report.plan_view(plan, exports=exports, json_url=address)
    return render("plan.html.j2", shell, view=view)
