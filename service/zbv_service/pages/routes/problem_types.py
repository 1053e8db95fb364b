"""``/problems/{name}``: what a type of error means and what to do; where the ``type`` of errors leads."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.api.caching import HOUR
from zbv_service.api.problem_advice import ADVICE
from zbv_service.errors import NOT_FOUND, ProblemError, kinds
from zbv_service.pages.answers import page, shell_of
from zbv_service.pages.views.problem import problem_type_page
from zbv_service.security.scheme import ANYBODY

router = APIRouter(include_in_schema=False)


@router.get("/problems/{name}", dependencies=[ANYBODY])
async def get_problem_type(request: Request, name: str) -> HTMLResponse:
    """The page of one type."""
    kind = kinds().get(name)
    if kind is None:
        raise ProblemError(NOT_FOUND, f"found no type of error {name!r}; there are {', '.join(kinds())}.")
    advice = ADVICE[name]
    text = problem_type_page(
        name, kind.status, kind.title, shell_of(request), meaning=advice.meaning, remedy=advice.remedy
    )
    return page(text, headers={"Cache-Control": HOUR})
