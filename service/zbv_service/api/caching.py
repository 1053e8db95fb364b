"""Responses that clients may keep: ``Cache-Control`` and ``ETag``."""

from __future__ import annotations

from fastapi import Request, Response

from zbv_service.api.state import state_of

IMMUTABLE = "private, max-age=31536000, immutable"
"""Resources stored under their hash. Private, because a shared cache would not check tokens."""
REVALIDATED = "private, no-cache"
"""Resources that this version derives from stored ones; clients revalidate them with the ETag."""
HOUR = "public, max-age=3600"
"""Resources that change only with the version of the service."""


def cached(request: Request, etag: str, control: str = IMMUTABLE) -> tuple[dict[str, str], Response | None]:
    """The headers of a response that may be kept, and the 304 response if the client has it already."""
    quoted = f'"{etag}"'
    headers = {"ETag": quoted, "Cache-Control": control}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    is_known = quoted in known or "*" in known
    return headers, Response(status_code=304, headers=headers) if is_known else None


def derived(request: Request, etag: str) -> tuple[dict[str, str], Response | None]:
    """As :func:`cached`, for content that this version derives from an immutable resource.

    A later version may derive something else. So clients must revalidate the response, unless its address
    names this version (``?v=``).
    """
    assets = state_of(request).assets
    is_versioned = request.query_params.get("v") == assets
    return cached(request, f"{etag}-{assets}", IMMUTABLE if is_versioned else REVALIDATED)
