"""Files that pages load: kept for good by browsers when their address says which version they are."""

from __future__ import annotations

import gzip
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

import anyio.to_thread
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.types import Scope

VERSIONED = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"
"""Without a version, as modules import each other: an old one must not meet a new one."""
MAX_KEPT_BYTES = 2 * 2**20
"""Of a file that is kept in memory."""
_TEXTS = ("text/", "application/javascript", "application/json", "image/svg+xml")
_WORTH_PACKING = 500


@dataclass(frozen=True)
class _Kept:
    """A file that does not change any more; ``packed`` is its gzip form, None where that gains nothing."""

    plain: bytes
    packed: bytes | None
    headers: dict[str, str]

    @classmethod
    def of(cls, answer: FileResponse) -> _Kept:
        """The file of an answer, read from disk."""
        plain = Path(answer.path).read_bytes()
        kind = answer.headers["content-type"]
        is_packed = kind.startswith(_TEXTS) and len(plain) >= _WORTH_PACKING
        headers = {name: answer.headers[name] for name in ("content-type", "etag", "last-modified")}
        if is_packed:
            headers["vary"] = "Accept-Encoding"
        return cls(plain, gzip.compress(plain, 6, mtime=0) if is_packed else None, headers)

    def answer(self, request: Headers) -> Response:
        """The file as the caller takes it."""
        if self.packed is None or not _takes_gzip(request.get("accept-encoding", "")):
            return Response(self.plain, headers=self.headers)
        # Weak: the same content in other bytes.
        changed = {"content-encoding": "gzip", "etag": f"W/{self.headers['etag']}"}
        return Response(self.packed, headers={**self.headers, **changed})


class Assets(StaticFiles):
    """A directory of files. Of an address with ``?v=`` and one of the versions the answer never changes.

    Such files are answered from memory, packed: a page loads a dozen of them before it draws anything, and
    reading each from disk takes several turns of a thread, in a process that may be drawing meanwhile.
    """

    def __init__(self, directory: Path, versions: Set[str]):
        super().__init__(directory=directory)
        self._versions = {version.encode() for version in versions}
        self._kept: dict[str, _Kept] = {}

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or 404."""
        headers = Headers(scope=scope)
        is_versioned = not self._versions.isdisjoint(parse_qs(scope["query_string"]).get(b"v", []))
        is_whole = is_versioned and scope["method"] == "GET" and _is_unconditional(headers)
        kept = self._kept.get(path) if is_whole else None
        if kept is not None:
            answer = kept.answer(headers)
        else:
            answer = await super().get_response(path, scope)
            if is_whole and isinstance(answer, FileResponse) and _is_small(answer):
                kept = self._kept[path] = await anyio.to_thread.run_sync(_Kept.of, answer)
                answer = kept.answer(headers)
        if answer.status_code in (200, 304):
            answer.headers["Cache-Control"] = VERSIONED if is_versioned else ASK_AGAIN
        return answer


def _is_unconditional(headers: Headers) -> bool:
    return not {"if-none-match", "if-modified-since", "range"} & set(headers.keys())


def _is_small(answer: FileResponse) -> bool:
    return answer.status_code == 200 and int(answer.headers["content-length"]) <= MAX_KEPT_BYTES


def _takes_gzip(accepted: str) -> bool:
    """Whether a field ``Accept-Encoding`` has gzip, and not with a weight of 0."""
    for entry in accepted.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
