"""A plan in a notebook: its picture and its metrics."""

from __future__ import annotations

from html import escape

from zbv_solver.export import FORMATS, quantities
from zbv_solver.plans.plan import Plan


def plan_html(plan: Plan) -> str:
    """The plan's SVG and a table of its metrics, as an HTML fragment without scripts."""
    metrics, units = plan.metrics, plan.problem.units
    proved = "proved optimal" if metrics.status == "optimal" else f"at most {metrics.gap:.2%} above optimal"
    rows = {
        plan.problem.objective: f"{quantities.time(plan.objective, units)} ({proved})",
        "lower bound": quantities.time(metrics.lower_bound, units),
        "bubble rate": f"{metrics.bubble_rate:.2%}",
        "peak memory": quantities.memory(max(metrics.peak_memory), units),
        "method": plan.provenance.method,
        "plan": plan.plan_id[:12],
    }
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f'<div style="max-width: 100%">{FORMATS["svg"].render(plan)}<table>{cells}</table></div>'
