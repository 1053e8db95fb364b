"""How a route gets at the rooms of its application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request, Response

from zbv_service.api.caching import IMMUTABLE, REVALIDATED
from zbv_service.api.idempotency import key_hash_of
from zbv_service.pages.shell import assets
from zbv_service.security.grants import grant_of

if TYPE_CHECKING:
    from zbv_service.app import Rooms

SEE_PAGE: dict[int | str, dict[str, Any]] = {
    303: {"description": "Of a caller who would rather have text/html: its page."}
}
"""The ``responses`` entry of what has a page, too."""


def rooms(request: Request) -> Rooms:
    """The rooms of the application that got the request."""
    return cast("Rooms", request.app.state.rooms)


def caller_of(request: Request) -> str | None:
    """The name of the token that a request came with; None where nobody has to say who they are."""
    return grant_of(request).name


def request_key(request: Request) -> str | None:
    """The hash of the caller and its Idempotency-Key, None without one; raises :class:`ProblemError` 400."""
    return key_hash_of(request, grant_of(request).owner)


def most_searches(request: Request) -> int:
    """How many unfinished searches may be the caller's."""
    own = grant_of(request).max_searches
    return rooms(request).settings.max_searches_per_token if own is None else own


def immutable(
    request: Request, etag: str, more: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Response | None]:
    """Headers of an answer that never changes, and ``more``; and the 304 when the caller has it already."""
    return cached(request, etag, IMMUTABLE, more)


def derived(request: Request, etag: str) -> tuple[dict[str, str], Response | None]:
    """As :func:`immutable`, of what this version of the service makes of something that never changes.

    A later version may make something else of it. Only where the address names this version (``?v=``) may
    the answer be kept without asking.
    """
    is_versioned = request.query_params.get("v") == assets()
    return cached(request, f"{etag}-{assets()}", IMMUTABLE if is_versioned else REVALIDATED)


def cached(
    request: Request, etag: str, how_long: str, more: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Response | None]:
    """Headers of an answer that may be kept, and ``more``; and the 304 when the caller has it already."""
    quoted = f'"{etag}"'
    headers = {"ETag": quoted, "Cache-Control": how_long, **(more or {})}
    asked = request.headers.get("if-none-match", "")
    known = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
    if quoted in known or "*" in known:
        return headers, Response(status_code=304, headers=headers)
    return headers, None
