"""The plan's page as one file: style, scripts and data inside it, so that it opens from disk, offline."""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from zbv_solver._version import __version__
from zbv_solver.export import report
from zbv_solver.export.timeline import timeline
from zbv_solver.plans.plan import Plan


def render(plan: Plan) -> str:
    """The same content as the service's page of the plan, without links to the service."""
    from bokeh.resources import Resources
    from jinja2 import Environment, StrictUndefined

    from zbv_solver.export.timeline_data import timeline_text

    environment = Environment(
        loader=report.template_loader(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    bokeh = Resources(mode="inline", components=["bokeh"], minified=True)
    theme, *own = (_text_of(name) for name in ("theme.js", *report.SCRIPTS))
    return environment.get_template("standalone.html.j2").render(
        view=replace(
            report.plan_view(plan),
            chart=report.script_json(report.chart_document(plan)),
            data=timeline_text(timeline(plan)),
        ),
        version=__version__,
        style=Markup("".join(_text_of(name) for name in ("zbv.css", "chart.css"))),
        theme=Markup(theme),
        scripts=[Markup(script) for script in (*own, *bokeh.js_raw)],
    )


def _text_of(name: str) -> str:
    return (report.STATIC / name).read_text(encoding="utf-8")
