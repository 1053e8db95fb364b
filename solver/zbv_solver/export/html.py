"""The page of a plan as one file, which opens from disk without a network, and its part for a notebook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from markupsafe import Markup

from zbv_solver._version import __version__
from zbv_solver.export import quantities, report, svg
from zbv_solver.export.timeline import timeline, timeline_text
from zbv_solver.plans.plan import Plan

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def render(plan: Plan) -> str:
    """The content of the service's page of the plan, with style, scripts and data, without links to it."""
    return (
        report.environment()
        .get_template("standalone.html.j2")
        .render(
            view=replace(report.plan_view(plan), data=timeline_text(timeline(plan))),
            version=__version__,
            style=Markup("".join(_text_of(name) for name in ("zbv.css", "chart.css"))),
            theme=Markup(_text_of("theme.js")),
            script=Markup(one_module()),
        )
    )


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
    return f'<div style="max-width: 100%">{svg.render(plan)}<table>{cells}</table></div>'


def one_module(names: Sequence[str] = report.MODULES) -> str:
    """Modules of the page as one, because browsers refuse to import modules from files on disk.

    No two modules define the same name at top level, which a test checks.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _text_of(name))) for name in names)


def _text_of(name: str) -> str:
    return (report.STATIC / name).read_text(encoding="utf-8")
