"""Which of several forms of an answer a caller wants (RFC 9110, section 12.5.1: ``Accept``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import Request

HTML, JSON, EVENT_STREAM = "text/html", "application/json", "text/event-stream"
_WEIGHT = re.compile(r"0?\.\d{1,3}|0\.?|1(?:\.0{0,3})?", re.ASCII)
VARY = {"Vary": "Accept"}
"""Every answer of an address that has several forms says so, whichever form it has: caches need to know."""


def preferred(request: Request, offered: Sequence[str]) -> str:
    """The media type that the caller wants most; of equally wanted ones, the first that is offered.

    A caller who accepts none of them, or whose header cannot be read, gets the first: that is more use to
    it than an error.
    """
    header = ",".join(request.headers.getlist("accept"))
    ranges = [found for part in header.split(",") if (found := _media_range(part)) is not None]
    if not ranges:
        return offered[0]
    best = max(offered, key=lambda media_type: _quality(media_type, ranges))  # the first of equals
    return best if _quality(best, ranges) > 0 else offered[0]


def wants_page(request: Request) -> bool:
    """Whether the caller would rather have a page than JSON: a browser does."""
    return preferred(request, (JSON, HTML)) == HTML


def _media_range(part: str) -> tuple[str, float] | None:
    """A media range in lower case and its quality; None when the part is neither."""
    media_type, *parameters = (piece.strip().lower() for piece in part.split(";"))
    kind, slash, subtype = media_type.partition("/")
    if not (kind and slash and subtype):
        return None
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            return media_type, _weight(value.strip())
    return media_type, 1.0


def _weight(text: str) -> float:
    """A quality value, 0 to 1 with up to three digits; anything else counts for nothing."""
    return float(text) if _WEIGHT.fullmatch(text) else 0.0


def _quality(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    """The weight of the most specific range that a media type is in; 0 when it is in none."""
    kind = media_type.partition("/")[0]
    for candidate in (media_type, f"{kind}/*", "*/*"):
        found = [weight for accepted, weight in ranges if accepted == candidate]
        if found:
            return max(found)
    return 0.0
