"""Positions in lists as opaque text for the parameter ``cursor``, and the addresses of neighbouring pages."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from fastapi import Request

from zbv_service.errors import INVALID_PARAMETER, ProblemError
from zbv_service.records.searches import Page, Position

_TEXT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{6})?\+00:00) ([0-9a-z]{1,64})( newer)?", re.ASCII)


def cursor_of(position: Position) -> str:
    """A position as text for an address."""
    text = f"{position.created_at.isoformat()} {position.id}{' newer' if position.is_newer else ''}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def position_of(cursor: str | None) -> Position | None:
    """The position of a cursor, None without one; raises :class:`ProblemError` 422 if it is invalid."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        found = _TEXT.fullmatch(text)
        if found is not None:
            return Position(datetime.fromisoformat(found[1]), found[2], found[3] is not None)
    except (binascii.Error, ValueError):
        pass  # invalid like any other text
    detail = f"found {cursor[:60]!r}; it must come from an earlier page. Leave it out to start at the newest."
    raise ProblemError(INVALID_PARAMETER, f"cursor: {detail}", [{"parameter": "cursor", "detail": detail}])


@dataclass(frozen=True)
class Neighbours:
    """Addresses of the previous and next page without the prefix of a proxy, None without such a page."""

    next: str | None
    previous: str | None
    root: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """The header ``Link`` (RFC 8288) if there are neighbours, with the prefix of a proxy."""
        found = (("prev", self.previous), ("next", self.next))
        links = [f'<{self.root}{address}>; rel="{name}"' for name, address in found if address is not None]
        return {"Link": ", ".join(links)} if links else {}


def neighbours(request: Request, page: Page[Any]) -> Neighbours:
    """The addresses of the pages around the one that answers a request.

    As in all bodies, the addresses assume a service at the root of its host.
    """
    query = [
        (name, value) for name, value in request.query_params.multi_items() if name != "cursor" and value
    ]
    root = str(request.scope.get("root_path", "")).rstrip("/")
    path = request.scope["path"].removeprefix(root)

    def address(position: Position | None) -> str | None:
        if position is None:
            return None
        return f"{path}?{urlencode([*query, ('cursor', cursor_of(position))])}"

    return Neighbours(address(page.next), address(page.previous), root)
