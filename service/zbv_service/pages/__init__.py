"""The service's HTML pages: pure functions from data to text. They know no HTTP and no database.

Routes serve what these return as ``text/html; charset=utf-8`` with the header
``Content-Security-Policy:`` :data:`CONTENT_SECURITY_POLICY`, or :data:`CHART_POLICY` for a plan, and mount
two directories of static files: :data:`STATIC` at ``/static`` and, before it, :data:`BOKEH_STATIC` at
``/static/bokeh``. ``root`` is the prefix under which a proxy serves the application (ASGI's ``root_path``),
without a trailing slash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from importlib.metadata import version as _distribution_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from zbv_solver import __version__
from zbv_solver.export import FORMATS, report
from zbv_solver.plan import Plan

STATIC: Path = report.STATIC
"""Our own style sheet and script; serve at ``/static``."""


def _policy(style: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src {style}",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )


CONTENT_SECURITY_POLICY = _policy("'self'")
"""What the pages need and no more: nothing inline, no eval, nothing from elsewhere."""

CHART_POLICY = _policy("'self' 'unsafe-inline'")
"""That of a page with a chart. BokehJS writes style elements into its shadow roots, and the style of every
place and size on its elements; it knows no nonces. Scripts stay as strict: a chart's data is in an element
that is none."""


def _bokeh_static() -> Path:
    spec = find_spec("bokeh")  # found, not imported: importing Bokeh takes half a second
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("The pages need bokeh. Run: pip install 'zbv[service]'", name="bokeh")
    return Path(spec.origin).parent / "server" / "static"


BOKEH_STATIC: Path = _bokeh_static()
"""Bokeh's own scripts, inside its wheel; serve at ``/static/bokeh``."""


@dataclass(frozen=True)
class SearchRow:
    """A search as the list shows it.

    Attributes
    ----------
    state
        queued, running, done, cancelled, failed or infeasible.
    value
        The incumbent's objective, in ``time_unit``; None while there is none.
    gap
        value / lower bound - 1; None when not known.
    plan_id
        The plan found; None while there is none.
    error
        Why it failed or is infeasible.
    """

    id: str
    state: str
    pp_degree: int
    microbatches: int
    objective: str
    created_at: datetime
    value: float | None = None
    gap: float | None = None
    plan_id: str | None = None
    error: str | None = None
    time_unit: str | None = None


@dataclass(frozen=True)
class PlanRow:
    """A stored plan as the list shows it; ``value`` is its objective, in ``time_unit``."""

    plan_id: str
    pp_degree: int
    microbatches: int
    objective: str
    value: float
    bubble_rate: float
    gap: float | None
    status: str
    created_at: datetime
    method: str = ""
    time_unit: str | None = None


def plan_page(plan: Plan, *, root: str = "", account: str | None = None) -> str:
    """The page of one plan: what it achieves, its Gantt chart, the baselines beside it, every action."""
    exports = [
        report.ExportLink(name, f"{root}/v1/plans/{plan.plan_id}/export/{name}", entry.description)
        for name, entry in FORMATS.items()
    ]
    view = report.plan_view(plan, exports=exports, json_url=f"{root}/v1/plans/{plan.plan_id}")
    return _render("plan.html.j2", root=root, account=account, view=view)


def search_page(
    row: SearchRow,
    *,
    is_open: bool,
    lower_bound: float | None,
    method: str | None,
    root: str = "",
    account: str | None = None,
) -> str:
    """The page of one search; while it is open, a browser reads it again every other second."""
    found = {"is_open": is_open, "lower_bound": lower_bound, "method": method}
    return _render("search.html.j2", root=root, account=account, row=row, **found)


def index_page(
    searches: Sequence[SearchRow],
    plans: Sequence[PlanRow],
    *,
    root: str = "",
    base_url: str = "http://127.0.0.1:8000",
    account: str | None = None,
) -> str:
    """The front page: latest searches and plans (newest first), and how to submit a problem.

    ``base_url`` is the service's own address as the reader would type it; it goes into the examples.
    ``account`` is who is signed in, None when nobody has to be.
    """
    return _render(
        "index.html.j2",
        root=root,
        account=account,
        searches=searches,
        plans=plans,
        base_url=base_url.rstrip("/"),
    )


def problem_page(status: int, title: str, detail: str, *, root: str = "") -> str:
    """An error as a page, with the same title and detail as the problem document (RFC 9457) of the API."""
    phrase = HTTPStatus(status).phrase if status in _KNOWN_STATUS else ""
    return _render("problem.html.j2", root=root, status=status, title=title, detail=detail, phrase=phrase)


def problem_type_page(
    name: str, status: int, title: str, *, meaning: str, remedy: str, root: str = ""
) -> str:
    """What a type of error means, and what to do: the page at the address that is its ``type``."""
    return _render(
        "problem_type.html.j2",
        root=root,
        name=name,
        status=status,
        title=title,
        meaning=meaning,
        remedy=remedy,
    )


def sign_in_page(
    destination: str,
    complaint: str = "",
    *,
    root: str = "",
    base_url: str = "http://127.0.0.1:8000",
    asks_again: bool = False,
) -> str:
    """The page on which a browser's session begins.

    Parameters
    ----------
    destination
        Path to go to afterwards.
    complaint
        What was wrong with the last try.
    asks_again
        Have the browser load it once more by itself.
    """
    return _render(
        "sign_in.html.j2",
        root=root,
        destination=destination,
        complaint=complaint,
        base_url=base_url.rstrip("/"),
        asks_again=asks_again,
    )


def _render(template: str, *, root: str, **values: Any) -> str:
    versions = {"version": __version__, "bokeh_version": _distribution_version("bokeh")}
    return (
        _environment().get_template(template).render(**{"root": root, "account": None, **versions, **values})
    )


def _moment(at: datetime) -> str:
    """A time as the lists show it, in UTC; a naive one is UTC already."""
    return (at if at.tzinfo is None else at.astimezone(UTC)).strftime("%Y-%m-%d %H:%M")


_KNOWN_STATUS = frozenset(map(int, HTTPStatus))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader(
            [FileSystemLoader(Path(__file__).parent / "templates"), report.template_loader()]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(report.FILTERS)
    environment.filters["moment"] = _moment
    return environment
