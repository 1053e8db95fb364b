"""A page as an answer."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import HTMLResponse

from zbv_service import pages


def page(
    text: str, status: int = 200, headers: Mapping[str, str] | None = None, *, has_chart: bool = False
) -> HTMLResponse:
    """A page's text as an answer that lets a browser load what the page needs, and nothing else."""
    policy = pages.CHART_POLICY if has_chart else pages.CONTENT_SECURITY_POLICY
    return HTMLResponse(text, status, {"Content-Security-Policy": policy, **(headers or {})})
