"""Checks whether a page of this service sent a request, because browsers add cookies to all requests."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_same_origin(request: Request) -> bool:
    """Whether the browser declares that the request comes from a page of this service or from no page.

    Every browser does so in one of two headers; a request without either is rejected.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return False
    parts = urlsplit(origin)
    return parts.netloc == request.headers.get("host", "") and parts.scheme in ("http", "https")


def is_from_elsewhere(request: Request) -> bool:
    """Whether the browser declares that a page of another site sent the request; commands declare nothing."""
    says = "sec-fetch-site" in request.headers or "origin" in request.headers
    return says and not is_same_origin(request)
