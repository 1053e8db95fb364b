"""Lists by pages: query parameters, cursors, and responses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request, Response

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.errors import INVALID_PARAMETER, ApiError
from zbv_service.records.lists import (
    Page,
    PageQuery,
    Position,
)
from zbv_service.records.shared import json_with

_CURSOR = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{6})?\+00:00) ([0-9a-z]{1,64})", re.ASCII)

T = TypeVar("T")
Q = TypeVar("Q", bound=PageQuery)


def position_of(cursor: str | None) -> Position | None:
    """The position of a cursor, None without one; raises :class:`ApiError` 422 if it is invalid."""
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
        found = _CURSOR.fullmatch(text)
        if found is not None:
            return Position(datetime.fromisoformat(found[1]), found[2])
    except (binascii.Error, ValueError):
        pass  # invalid like any other text
    detail = f"found {cursor[:60]!r}; it must come from an earlier page. Leave it out to start at the newest."
    raise ApiError(INVALID_PARAMETER, f"cursor: {detail}", [{"parameter": "cursor", "detail": detail}])


def next_of(request: Request, page: Page[Any]) -> str | None:
    """The address of the page after the one that answers a request, None after the last.

    As in all bodies, it assumes a service at the root of its host.
    """
    if page.next is None:
        return None
    query = [
        (name, value) for name, value in request.query_params.multi_items() if name != "cursor" and value
    ]
    text = f"{page.next.created_at.isoformat()} {page.next.id}"
    cursor = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    path = request.scope["path"].removeprefix(root_of(request))
    return f"{path}?{urlencode([*query, ('cursor', cursor)])}"


async def list_response(
    request: Request,
    query: Q,
    load: Callable[[Q, Position | None], Awaitable[Page[T]]],
    name: str,
    write: Callable[[T], bytes],
) -> Response:
    """One page of a list, with the address of the next one also in the header ``Link`` (RFC 8288).

    Parameters
    ----------
    load
        Reads the entries of the query from a position on.
    name, write
        The member of the document that has the entries, and the JSON of an entry. Entries are written one by
        one, in a thread: pydantic would keep the interpreter while it writes the whole list.
    """
    computations = state_of(request).computations
    async with computations.listing(query.limit):
        page = await load(query, position_of(query.cursor))
    address = next_of(request, page)
    headers = {"Cache-Control": "no-store"}
    if address is not None:
        headers["Link"] = f'<{root_of(request)}{address}>; rel="next"'
    # The thread gets the context of the request, because errors in the list contain its root path.
    document = {name: None, "next": address}
    text = await computations.write(
        copy_context().run, lambda: json_with(document, **{name: [*map(write, page.items)]})
    )
    return Response(text, headers=headers, media_type="application/json")
