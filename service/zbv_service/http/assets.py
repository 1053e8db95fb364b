"""Files that pages load: kept for good by browsers when their address says which version they are."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from urllib.parse import parse_qs

from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

VERSIONED = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"
"""Without a version, as modules import each other: an old one must not meet a new one."""


class Assets(StaticFiles):
    """A directory of files. Of an address with ``?v=`` and one of the versions the answer never changes."""

    def __init__(self, directory: Path, versions: Set[str]):
        super().__init__(directory=directory)
        self._versions = {version.encode() for version in versions}

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 404."""
        answer = await super().get_response(path, scope)
        asked = parse_qs(scope["query_string"]).get(b"v", [])
        if answer.status_code in (200, 304):
            is_versioned = not self._versions.isdisjoint(asked)
            answer.headers["Cache-Control"] = VERSIONED if is_versioned else ASK_AGAIN
        return answer
