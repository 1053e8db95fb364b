"""What a caller accepts (RFC 9110, section 12.5.1: ``Accept``), and where the application is mounted."""

from __future__ import annotations

from fastapi import Request

HTML, JSON, EVENT_STREAM = "text/html", "application/json", "text/event-stream"
VARY = {"Vary": "Accept"}
"""Sent with every response of an address that has several representations, for caches."""


def accepts(request: Request, media_type: str) -> bool:
    """Whether the caller names this media type; browsers do so with HTML. Weights are ignored."""
    ranges = ",".join(request.headers.getlist("accept")).split(",")
    return any(part.partition(";")[0].strip().lower() == media_type for part in ranges)


def wants_page(request: Request) -> bool:
    """Whether an error may be a page, as browsers want it."""
    return accepts(request, HTML)


def root_of(request: Request) -> str:
    """The prefix under which a proxy serves the application, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")
