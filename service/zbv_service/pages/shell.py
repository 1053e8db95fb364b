"""What every page has around it: where it is served, who looks at it, what a browser may load for it.

Routes serve pages as ``text/html; charset=utf-8`` with the header ``Content-Security-Policy:``
:data:`CONTENT_SECURITY_POLICY`, or :data:`CHART_POLICY` for one with a chart, and mount the directories of
static files of :data:`STATIC_DIRECTORIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version as _distribution_version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from zbv_solver import __version__
from zbv_solver.export import report

from zbv_service.security.scopes import allows


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


BOKEH_VERSION = _distribution_version("bokeh")

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


STATIC_DIRECTORIES: Mapping[str, Path] = MappingProxyType(
    {
        "/static/bokeh": _bokeh_static(),
        "/static/pages": Path(__file__).parent / "static",
        "/static": report.STATIC,
    }
)
"""Directories of files that pages load, by the path at which they are served; the first that fits counts."""


@dataclass(frozen=True)
class Shell:
    """What a page knows of its surroundings.

    Attributes
    ----------
    root
        The prefix under which a proxy serves the application (ASGI's ``root_path``); no trailing slash.
    base_url
        The service's own address as the reader would type it, without a trailing slash; for examples.
    account
        Who is signed in; None when nobody has to be.
    may
        The scopes of who looks at it: what a page offers to do; none when nobody was asked.
    path
        The page's own, without ``root``.
    """

    root: str = ""
    base_url: str = "http://127.0.0.1:8000"
    account: str | None = None
    may: frozenset[str] = frozenset()
    path: str = "/"

    @property
    def may_search(self) -> bool:
        """Whether to offer what needs the scope ``search``; also where nobody was asked."""
        return not self.may or allows(self.may, ["search"])


@cache
def assets() -> str:
    """A text that changes with every version of the service and with every style sheet and script.

    It is part of addresses whose answers are kept for good.
    """
    digest = sha256(__version__.encode())
    for directory in (report.STATIC, STATIC_DIRECTORIES["/static/pages"]):
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def render(template: str, shell: Shell, **values: Any) -> str:
    """A template of ``templates/`` as text; ``shell`` and ``root`` are there for every one."""
    versions = {
        "version": __version__,
        "bokeh_version": BOKEH_VERSION,
        "assets": assets(),
    }
    return _environment().get_template(template).render(shell=shell, root=shell.root, **versions, **values)


def _moment(at: datetime) -> str:
    """A time as the lists show it, in UTC; a naive one is UTC already."""
    return (at if at.tzinfo is None else at.astimezone(UTC)).strftime("%Y-%m-%d %H:%M")


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
