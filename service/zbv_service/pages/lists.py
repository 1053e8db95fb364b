"""``/searches``, ``/plans``, ``/runs``, ``/agents``: the lists of ``/v1``, as pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_origin
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import ValidationError

from zbv_service.api.listing import next_of, position_of
from zbv_service.api.state import state_of
from zbv_service.pages.shell import html, render, shell_of
from zbv_service.records.lists import (
    AgentListQuery,
    Page,
    PlanListQuery,
    Position,
    RunListQuery,
    SearchListQuery,
)
from zbv_service.security.access import READ

LISTED = 50
"""Rows on a page, unless the address says otherwise."""

Query = SearchListQuery | PlanListQuery | RunListQuery | AgentListQuery
Load = Callable[[Any, Position | None], Awaitable[Page[Any]]]
"""Loads a page by its query and position."""

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class AskedList:
    """The query of a list, and the address of the next page."""

    values: Mapping[str, Sequence[str]]
    """The non-empty parameters of the address by name."""
    older: str | None
    """The address of the next page, without the prefix of a proxy; None on the last."""

    def one(self, name: str) -> str:
        """The value of a parameter; empty if it is missing."""
        return self.values.get(name, [""])[-1]

    def has(self, name: str, value: str) -> bool:
        """Whether a parameter has this value."""
        return value in self.values.get(name, ())

    @property
    def newest(self) -> str | None:
        """The parameters of the first page; None on that page."""
        query = [(name, value) for name, texts in self.values.items() for value in texts if name != "cursor"]
        return f"?{urlencode(query)}" if "cursor" in self.values else None

    @property
    def is_filtered(self) -> bool:
        """Whether a filter is set."""
        return bool(self.values.keys() - {"cursor", "limit"})


@router.get("/searches", dependencies=[READ])
async def get_searches(request: Request) -> HTMLResponse:
    """The searches for plans, newest first."""

    def load(query: SearchListQuery, after: Position | None) -> Awaitable[Page[Any]]:
        return state_of(request).searches.page(query.model_copy(update={"kind": "plan"}), after)

    return await _listed(request, SearchListQuery, load, "searches.html.j2")


@router.get("/plans", dependencies=[READ])
async def get_plans(request: Request) -> HTMLResponse:
    """The plans, newest first."""
    return await _listed(request, PlanListQuery, state_of(request).plans.page, "plans.html.j2")


@router.get("/runs", dependencies=[READ])
async def get_runs(request: Request) -> HTMLResponse:
    """The runs, newest first."""
    return await _listed(request, RunListQuery, state_of(request).runs.page, "runs.html.j2")


@router.get("/agents", dependencies=[READ])
async def get_agents(request: Request) -> HTMLResponse:
    """The agents, newest first."""
    return await _listed(request, AgentListQuery, state_of(request).agents.page, "agents.html.j2")


async def _listed(request: Request, model: type[Query], load: Load, template: str) -> HTMLResponse:
    given = _given(request)
    query = _parse(model, {"limit": [str(LISTED)], **given})
    computations = state_of(request).computations
    async with computations.listing(query.limit):
        found = await load(query, position_of(query.cursor))
    asked = AskedList(given, next_of(request, found))
    # Rendering many rows takes long, so it must not block the event loop.
    write = partial(render, template, shell_of(request), rows=found.items, asked=asked)
    return html(await computations.write(write))


def _given(request: Request) -> dict[str, list[str]]:
    """The parameters of an address by name, without the empty ones that forms send."""
    params = request.query_params
    return {name: values for name in params if (values := [*filter(None, params.getlist(name))])}


def _parse(model: type[Query], given: Mapping[str, list[str]]) -> Query:
    """The query of an address, by the rules of the API; raises :class:`RequestValidationError`."""
    values: dict[str, str | list[str]] = {}
    for name, texts in given.items():
        known = model.model_fields.get(name)
        is_list = known is not None and get_origin(known.annotation) is list
        values[name] = texts if is_list else texts[-1]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        places = [{**entry, "loc": ("query", *entry["loc"])} for entry in error.errors()]
        raise RequestValidationError(places) from None
