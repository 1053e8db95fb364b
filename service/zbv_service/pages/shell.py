"""What every page has around it: where it is served, who looks at it, what a browser may load for it.

Routes serve pages as ``text/html; charset=utf-8`` with :data:`CONTENT_SECURITY_POLICY` and mount
:data:`STATIC_DIRECTORIES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from zbv_solver import __version__
from zbv_solver.export import report

from zbv_service.security.scopes import allows

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""What the pages need and no more: nothing inline, no eval, nothing from elsewhere."""

STATIC_DIRECTORIES: tuple[Path, ...] = (Path(__file__).parent / "static", report.STATIC)
"""Directories with the files that pages load, served as one: the pages' own, and the picture of a plan."""


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
    for directory in STATIC_DIRECTORIES:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def render(template: str, shell: Shell, **values: Any) -> str:
    """A template of ``templates/`` as text; ``shell`` and ``root`` are there for every one."""
    surroundings = {
        "shell": shell,
        "root": shell.root,
        "static": f"{shell.root}/static/{assets()}",
        "assets": assets(),
        "version": __version__,
    }
    return _environment().get_template(template).render(**surroundings, **values)


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
    environment.globals.update(report.GLOBALS)
    environment.filters["moment"] = _moment
    return environment
