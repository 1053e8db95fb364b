"""Requests of browsers: the cookie of a session, and whether a page of this service sent the request.

Browsers add cookies to requests of any page, so requests that change something must prove their origin.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import Request, Response

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def cookie_name(request: Request) -> str:
    """The name of the session cookie.

    With TLS, the name makes browsers accept the cookie from this host only. Without TLS it contains the
    port, because cookies are shared by all ports of a host.
    """
    if request.url.scheme == "https":
        return "__Host-zbv-session"
    return f"zbv-session-{request.url.port or 80}"


def session_of(request: Request) -> str | None:
    """The token in the session cookie."""
    return request.cookies.get(cookie_name(request))


def set_session(response: Response, request: Request, text: str, max_age: int) -> None:
    """Set the session cookie. Scripts cannot read it, and browsers do not send it from other sites.

    An empty text and ``max_age`` 0 delete the cookie.
    """
    response.set_cookie(
        cookie_name(request),
        text,
        max_age=max_age,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def is_same_origin(request: Request) -> bool:
    """Whether the browser declares that the request comes from a page of this service or from no page.

    Every browser does so in one of two headers; a request without either is rejected.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = urlsplit(request.headers.get("origin", ""))
    return origin.netloc == request.headers.get("host", "") and origin.scheme in ("http", "https")


def is_from_elsewhere(request: Request) -> bool:
    """Whether the browser declares that a page of another site sent the request; commands declare nothing."""
    is_browser = "sec-fetch-site" in request.headers or "origin" in request.headers
    return is_browser and not is_same_origin(request)
