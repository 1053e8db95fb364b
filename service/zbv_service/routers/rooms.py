"""How a route gets at the rooms of its application."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fastapi import Request, Response

if TYPE_CHECKING:
    from zbv_service.app import Rooms

IMMUTABLE = "public, max-age=31536000, immutable"
"""Caching of what is named by its hash."""


def rooms(request: Request) -> Rooms:
    """The rooms of the application that got the request."""
    return cast("Rooms", request.app.state.rooms)


def immutable(request: Request, etag: str) -> tuple[dict[str, str], Response | None]:
    """Headers of an answer that never changes, and the 304 when the caller has it already."""
    quoted = f'"{etag}"'
    headers = {"ETag": quoted, "Cache-Control": IMMUTABLE}
    asked = request.headers.get("if-none-match", "")
    known = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
    if quoted in known or "*" in known:
        return headers, Response(status_code=304, headers=headers)
    return headers, None
