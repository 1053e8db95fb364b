"""The page of a plan as one file with style, scripts and data, which opens from disk without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from zbv_solver._version import __version__
from zbv_solver.export import report
from zbv_solver.export.timeline import timeline
from zbv_solver.export.timeline_data import timeline_text
from zbv_solver.plans.plan import Plan

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def render(plan: Plan) -> str:
    """The content of the service's page of the plan, without links to the service."""
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


def one_module(names: Sequence[str] = report.MODULES) -> str:
    """Modules of the page as one, because browsers refuse to import modules from files on disk.

    No two modules define the same name at top level, which a test checks.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _text_of(name))) for name in names)


def _text_of(name: str) -> str:
    return (report.STATIC / name).read_text(encoding="utf-8")
