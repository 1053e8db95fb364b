"""The files that pages load: style sheets and scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

VERSIONED = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"
_WORTH_PACKING = 500
_VERSION = re.compile(r"[0-9a-f]{12}")


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
