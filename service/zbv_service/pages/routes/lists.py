"""``/searches``, ``/plans``, ``/runs``, ``/agents``: the lists of ``/v1``, as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_origin

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import ValidationError

from zbv_service.api.listing import (
    AgentListQuery,
    PageQuery,
    PlanListQuery,
    RunListQuery,
    SearchListQuery,
    neighbours,
    position_of,
)
from zbv_service.api.state import state_of
from zbv_service.pages.answers import page, shell_of
from zbv_service.pages.routes.rows import agent_row, plan_row, run_row, search_row
from zbv_service.pages.shell import Shell
from zbv_service.pages.views.lists import ListView, agents_page, plans_page, runs_page, searches_page
from zbv_service.records.searches import Page, Position
from zbv_service.security.scheme import READ

LISTED = 50
"""Rows on a page, unless the address says otherwise."""
_FRESH = {"Cache-Control": "no-store"}

Q = TypeVar("Q", bound=PageQuery)
T = TypeVar("T")
R = TypeVar("R")

router = APIRouter(include_in_schema=False)


@router.get("/searches", dependencies=[READ])
async def get_searches(request: Request) -> HTMLResponse:
    """The searches."""
    query, table = _query(request, SearchListQuery), state_of(request).searches
    found = await _page(request, query, lambda limit, after: table.page(query.filter, limit, after))
    return await _listed(request, found, search_row, searches_page)


@router.get("/plans", dependencies=[READ])
async def get_plans(request: Request) -> HTMLResponse:
    """The plans."""
    query, table = _query(request, PlanListQuery), state_of(request).plans
    found = await _page(request, query, lambda limit, after: table.page(query.filter, limit, after))
    return await _listed(request, found, plan_row, plans_page)


@router.get("/runs", dependencies=[READ])
async def get_runs(request: Request) -> HTMLResponse:
    """The runs."""
    query, table = _query(request, RunListQuery), state_of(request).runs
    found = await _page(request, query, lambda limit, after: table.page(query.filter, limit, after))
    return await _listed(request, found, run_row, runs_page)


@router.get("/agents", dependencies=[READ])
async def get_agents(request: Request) -> HTMLResponse:
    """The agents."""
    query, table = _query(request, AgentListQuery), state_of(request).agents
    found = await _page(request, query, lambda limit, after: table.page(query.filter, limit, after))
    return await _listed(request, found, agent_row, agents_page)


async def _listed(
    request: Request, found: Page[T], row: Callable[[T], R], write: Callable[[list[R], ListView, Shell], str]
) -> HTMLResponse:
    """The page of a list: of many entries, writing it takes long."""
    asked, shell = _asked(request, found), shell_of(request)
    text = await state_of(request).computations.write(lambda: write([*map(row, found.items)], asked, shell))
    return page(text, headers=_FRESH)


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


async def _page(
    request: Request, query: PageQuery, load: Callable[[int, Position | None], Awaitable[Page[T]]]
) -> Page[T]:
    """A page of a list. Going back to newer ones, the first page is a full one."""
    after = position_of(query.cursor)
    async with state_of(request).computations.listing(query.limit):
        found = await load(query.limit, after)
        if after is not None and after.is_newer and found.previous is None:
            return await load(query.limit, None)
        return found


def _asked(request: Request, found: Page[Any]) -> ListView:
    around = neighbours(request, found)
    return ListView(_given(request), newer=around.previous, older=around.next)
