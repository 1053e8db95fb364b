"""Positions in lists as opaque text: what ``cursor`` is, and the address of a next page."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import datetime
from urllib.parse import urlencode

from fastapi import Request

from zbv_service.http.problems import INVALID_PARAMETER, ProblemError
from zbv_service.records import Position

_TEXT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{6})?\+00:00) ([0-9a-z]{1,64})", re.ASCII)


def cursor_of(position: Position) -> str:
    """A position as text for addresses."""
    text = f"{position.created_at.isoformat()} {position.id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def position_of(cursor: str | None) -> Position | None:
    """The position of a cursor, None of none; raises :class:`ProblemError` 422 when it is no cursor."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        found = _TEXT.fullmatch(text)
        if found is not None:
            return Position(datetime.fromisoformat(found[1]), found[2])
    except (binascii.Error, ValueError):
        pass  # as wrong as a text of another form
    detail = f"found {cursor[:60]!r}; it must be one from a page before. Leave it out to begin at the newest."
    raise ProblemError(INVALID_PARAMETER, f"cursor: {detail}", [{"parameter": "cursor", "detail": detail}])


def next_page(request: Request, position: Position | None) -> tuple[str | None, dict[str, str]]:
    """Where the page after this request's own is: its address, and the field ``Link`` (RFC 8288).

    As everywhere in bodies, the address is that of a service at the root of its host; the field has the
    prefix under which a proxy serves it.
    """
    if position is None:
        return None, {}
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    root = str(request.scope.get("root_path", ""))
    path = request.scope["path"].removeprefix(root)
    address = f"{path}?{urlencode([*query, ('cursor', cursor_of(position))])}"
    return address, {"Link": f'<{root}{address}>; rel="next"'}
