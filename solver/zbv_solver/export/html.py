"""The plan's page as one file: style, scripts and data inside it, so that it opens from disk, offline."""

from __future__ import annotations

from markupsafe import Markup

from zbv_solver import __version__
from zbv_solver.export import report
from zbv_solver.plan import Plan


def render(plan: Plan) -> str:
    """The same content as the service's page of the plan, without links to the service."""
    from bokeh.resources import Resources
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        loader=report.template_loader(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    bokeh = Resources(mode="inline", components=["bokeh"], minified=True)
    own = (report.STATIC / "plan.js").read_text(encoding="utf-8")
    style = (report.STATIC / "zbv.css").read_text(encoding="utf-8")
    return environment.get_template("standalone.html.j2").render(
        view=report.plan_view(plan),
        version=__version__,
        style=Markup(style),
        scripts=[Markup(script) for script in (*bokeh.js_raw, own)],
    )
