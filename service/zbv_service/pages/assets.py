"""The files that pages load: style sheets and scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope
from zbv_solver import __version__
from zbv_solver.export import report

STATIC_DIRECTORIES: tuple[Path, ...] = (Path(__file__).parent / "static", report.STATIC)
"""Directories of files that pages load, served as one; the solver's has the picture of a plan."""

VERSIONED = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"
_WORTH_PACKING = 500
_VERSION = re.compile(r"[0-9a-f]{12}")


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


def assets_app(directories: Sequence[Path], version: str) -> ASGIApp:
    """Serve directories as one, compressed for clients that accept it.

    Parameters
    ----------
    directories
        The first one that has a file wins.
    version
        Twelve hexadecimal digits. Below ``/{version}/`` answers never change, so that browsers keep them. The
        version is part of the path because modules import each other by relative addresses, which keep it.
    """
    return GZipMiddleware(_Assets(directories, version), minimum_size=_WORTH_PACKING)


class _Assets(StaticFiles):
    def __init__(self, directories: Sequence[Path], version: str):
        super().__init__(directory=directories[0])
        self.all_directories = list(directories)
        self._version = version

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 404."""
        first, _, rest = path.partition("/")
        # A page that was loaded before an upgrade asks for the old version: it gets today's file.
        answer = await super().get_response(rest if _VERSION.fullmatch(first) else path, scope)
        if answer.status_code in (200, 304):
            answer.headers["Cache-Control"] = VERSIONED if first == self._version else ASK_AGAIN
        return answer
