"""A page as an answer."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import HTMLResponse

from zbv_service.http.problems import ProblemError
from zbv_service.pages.problem import problem_page
from zbv_service.pages.shell import CHART_POLICY, CONTENT_SECURITY_POLICY, Shell
from zbv_service.security.grants import Grant


def page(
    text: str, status: int = 200, headers: Mapping[str, str] | None = None, *, has_chart: bool = False
) -> HTMLResponse:
    """A page's text as an answer that lets a browser load what the page needs, and nothing else."""
    policy = CHART_POLICY if has_chart else CONTENT_SECURITY_POLICY
    return HTMLResponse(text, status, {"Content-Security-Policy": policy, **(headers or {})})


def problem_answer(
    error: ProblemError, request: Request, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """An error as a page."""
    kind = error.kind
    return page(problem_page(kind.status, kind.title, error.detail, shell_of(request)), kind.status, headers)


def shell_of(request: Request) -> Shell:
    """What a page knows of its surroundings. Pages for anybody know nobody."""
    grant: Grant | None = getattr(request.state, "grant", None)
    return Shell(
        root=root_of(request),
        base_url=str(request.base_url).rstrip("/"),
        account=grant.name if grant is not None and grant.means == "session" else None,
        may=frozenset() if grant is None else grant.scopes,
        path=request.url.path.removeprefix(root_of(request)),
    )


def root_of(request: Request) -> str:
    """The prefix under which a proxy serves the application, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")
