"""The surroundings of all pages, their content security policy, and the files that they load."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment
from zbv_solver import __version__
from zbv_solver.export import quantities, report

from zbv_service.pages.views import layers, measured_rows, words
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
"""Nothing inline, no eval, nothing from other origins."""

STATIC_DIRECTORIES: tuple[Path, ...] = (Path(__file__).parent / "static", report.STATIC)
"""Directories of files that pages load, served as one; the solver's has the picture of a plan."""


@dataclass(frozen=True)
class Shell:
    """The surroundings of a page."""

    root: str = ""
    """The prefix under which a proxy serves the application (ASGI's ``root_path``); no trailing slash."""
    base_url: str = "http://127.0.0.1:8000"
    """The address that the reader's browser uses, for examples of commands; no trailing slash."""
    account: str | None = None
    """The name of the signed-in reader; None if the service needs no sign-in."""
    may: frozenset[str] = frozenset()
    """The scopes of the reader, which decide what a page offers; empty if there was no sign-in."""
    path: str = "/"
    """The path of the page, without ``root``."""

    @property
    def may_search(self) -> bool:
        """Whether to offer actions that need the scope ``search``."""
        return self.allows("search")

    @property
    def may_launch(self) -> bool:
        """Whether to offer actions that need the scope ``launch``."""
        return self.allows("launch")

    def allows(self, scope: str) -> bool:
        """Whether the reader has a scope; without a sign-in, everybody has all."""
        return not self.may or allows(self.may, [scope])


@cache
def assets() -> str:
    """A digest of the version and of all style sheets and scripts: twelve hexadecimal digits.

    It is part of addresses that browsers cache without asking again.
    """
    digest = sha256(__version__.encode())
    for directory in STATIC_DIRECTORIES:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def render(template: str, shell: Shell, **values: Any) -> str:
    """Render a template of ``templates/``, with ``shell``, ``root`` and ``static`` added."""
    surroundings = {
        "shell": shell,
        "root": shell.root,
        "static": f"{shell.root}/static/{assets()}",
        "assets": assets(),
        "version": __version__,
    }
    return _environment().get_template(template).render(**surroundings, **values)


@cache
def _environment() -> Environment:
    environment = report.environment(Path(__file__).parent / "templates")
    environment.filters.update(
        moment=words.moment,
        ago=words.ago,
        grouped=words.grouped,
        reached_step=words.reached_step,
        recomputed=layers.recomputed,
        tone=measured_rows.tone,
        time_unit=quantities.time_unit,
    )
    environment.globals["bytes"] = layers.BYTES
    return environment
