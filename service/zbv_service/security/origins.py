"""Whether a page of this service sent a request, for those that a browser signs with a cookie by itself."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_same_origin(request: Request) -> bool:
    """Whether a browser says that the request comes from a page of this service, or from no page.

    Every browser says it in one of two ways; a request that says nothing is not believed.
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
    """Whether a browser says that another site's page sent the request; commands say nothing of the kind."""
    says = "sec-fetch-site" in request.headers or "origin" in request.headers
    return says and not is_same_origin(request)
