"""``/searches``, ``/plans``, ``/runs``, ``/agents``: the lists of ``/v1``, as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_origin

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import ValidationError

from zbv_service.http.cursors import neighbours, position_of
from zbv_service.pages.lists import Asked, agents_page, plans_page, runs_page, searches_page
from zbv_service.records import Page, Position
from zbv_service.routers.answers import page, shell_of
from zbv_service.routers.listing import (
    AgentListQuery,
    PageQuery,
    PlanListQuery,
    RunListQuery,
    SearchListQuery,
)
from zbv_service.routers.pages.rows import agent_row, plan_row, run_row, search_row
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

LISTED = 50
"""Rows on a page, unless the address says otherwise."""
_FRESH = {"Cache-Control": "no-store"}

Q = TypeVar("Q", bound=PageQuery)
T = TypeVar("T")

router = APIRouter(include_in_schema=False)


@router.get("/searches", dependencies=[READ])
async def get_searches(request: Request) -> HTMLResponse:
    """The searches."""
    query, table = _query(request, SearchListQuery), rooms(request).searches
    found = await _page(query, lambda limit, after: table.page(query.filter, limit, after))
    rows = [search_row(record) for record in found.items]
    return page(searches_page(rows, _asked(request, found), shell_of(request)), headers=_FRESH)


@router.get("/plans", dependencies=[READ])
async def get_plans(request: Request) -> HTMLResponse:
    """The plans."""
    query, table = _query(request, PlanListQuery), rooms(request).plans
    found = await _page(query, lambda limit, after: table.page(query.filter, limit, after))
    rows = [plan_row(summary) for summary in found.items]
    return page(plans_page(rows, _asked(request, found), shell_of(request)), headers=_FRESH)


@router.get("/runs", dependencies=[READ])
async def get_runs(request: Request) -> HTMLResponse:
    """The runs."""
    query, table = _query(request, RunListQuery), rooms(request).runs
    found = await _page(query, lambda limit, after: table.page(query.filter, limit, after))
    rows = [run_row(record) for record in found.items]
    return page(runs_page(rows, _asked(request, found), shell_of(request)), headers=_FRESH)


@router.get("/agents", dependencies=[READ])
async def get_agents(request: Request) -> HTMLResponse:
    """The agents."""
    query, table = _query(request, AgentListQuery), rooms(request).agents
    found = await _page(query, lambda limit, after: table.page(query.filter, limit, after))
    rows = [agent_row(record) for record in found.items]
    return page(agents_page(rows, _asked(request, found), shell_of(request)), headers=_FRESH)


def _given(request: Request) -> dict[str, list[str]]:
    """The parameters of an address by name; a form sends those that nobody filled in, too."""
    params = request.query_params
    return {name: values for name in params if (values := [*filter(None, params.getlist(name))])}


def _query(request: Request, model: type[Q]) -> Q:
    """What an address asks of a list, by the rules of the API; raises :class:`RequestValidationError`."""
    given: dict[str, Any] = {"limit": [str(LISTED)], **_given(request)}
    for name, values in given.items():
        known = model.model_fields.get(name)
        is_list = known is not None and get_origin(known.annotation) is list
        given[name] = values if is_list else values[-1]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        places = [{**entry, "loc": ("query", *entry["loc"])} for entry in error.errors()]
        raise RequestValidationError(places) from None


async def _page(query: PageQuery, load: Callable[[int, Position | None], Awaitable[Page[T]]]) -> Page[T]:
    """A page of a list. Going back to newer ones, the first page is a full one."""
    after = position_of(query.cursor)
    found = await load(query.limit, after)
    if after is not None and after.is_newer and found.previous is None:
        return await load(query.limit, None)
    return found


def _asked(request: Request, found: Page[Any]) -> Asked:
    around = neighbours(request, found)
    return Asked(_given(request), newer=around.previous, older=around.next)
