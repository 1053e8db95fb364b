"""The cookie of a browser session."""

from __future__ import annotations

from fastapi import Request, Response


def cookie_name(request: Request) -> str:
    """Its name. Over TLS one that only this host can set; else the port is in it: cookies know no ports."""
    if request.url.scheme == "https":
        return "__Host-zbv-session"
    return f"zbv-session-{request.url.port or 80}"


def session_of(request: Request) -> str | None:
    """The token in a browser's cookie."""
    return request.cookies.get(cookie_name(request))


def set_session(response: Response, request: Request, text: str, max_age: int) -> None:
    """Set the cookie of a session. Scripts cannot read it, and other sites cannot send it."""
    response.set_cookie(
        cookie_name(request),
        text,
        max_age=max_age,
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def end_session(response: Response, request: Request) -> None:
    """Delete the cookie of a session."""
    response.delete_cookie(
        cookie_name(request),
        path="/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
