"""Content negotiation (RFC 9110, section 12.5.1: ``Accept``), and the redirect of browsers to pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

HTML, JSON, EVENT_STREAM = "text/html", "application/json", "text/event-stream"
_WEIGHT = re.compile(r"0?\.\d{1,3}|0\.?|1(?:\.0{0,3})?", re.ASCII)
MAX_ACCEPT = 1024
"""Characters of ``Accept`` that are read: it is parsed before a token is, and browsers send about 200."""
VARY = {"Vary": "Accept"}
"""Sent with every response of an address that has several representations, for caches."""
SEE_PAGE: dict[int | str, dict[str, Any]] = {303: {"description": "For callers that prefer HTML: the page."}}
"""The ``responses`` entry of resources that have a page."""


def preferred(request: Request, offered: Sequence[str]) -> str:
    """The media type that the caller prefers; ties go to the first one offered.

    A caller that accepts none of them, or sends an unreadable header, gets the first one, which is more
    useful than an error.
    """
    header = ",".join(request.headers.getlist("accept"))[:MAX_ACCEPT]
    ranges: dict[str, float] = {}
    for media_type, weight in filter(None, map(_media_range, header.split(","))):
        ranges[media_type] = max(weight, ranges.get(media_type, 0.0))
    if not ranges:
        return offered[0]
    best = max(offered, key=lambda media_type: _quality(media_type, ranges))  # ties: the first one
    return best if _quality(best, ranges) > 0 else offered[0]


def wants_page(request: Request) -> bool:
    """Whether the caller prefers an HTML page to JSON, as browsers do."""
    return preferred(request, (JSON, HTML)) == HTML


def to_page(request: Request) -> Response:
    """Redirect a browser from a resource to its page, which has the same address without ``/v1``."""
    root = root_of(request)
    path = request.url.path.removeprefix(root).removeprefix("/v1")
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{root}{path}{query}", 303, {**VARY, "Cache-Control": "no-store"})


def root_of(request: Request) -> str:
    """The prefix under which a proxy serves the application, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _media_range(part: str) -> tuple[str, float] | None:
    """A media range in lower case and its quality; None if the part is invalid."""
    media_type, *parameters = (piece.strip().lower() for piece in part.split(";"))
    kind, slash, subtype = media_type.partition("/")
    if not (kind and slash and subtype):
        return None
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            return media_type, float(value) if _WEIGHT.fullmatch(value.strip()) else 0.0
    return media_type, 1.0


def _quality(media_type: str, ranges: Mapping[str, float]) -> float:
    """The quality of the most specific range that contains a media type; 0 if none does."""
    kind = media_type.partition("/")[0]
    candidates = (media_type, f"{kind}/*", "*/*")
    return next((ranges[candidate] for candidate in candidates if candidate in ranges), 0.0)
