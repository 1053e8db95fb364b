"""``/``: the front page; and ``/example``, which searches an example."""

from __future__ import annotations

import json
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.database.tally import tally
from zbv_service.pages.shell import NO_STORE, page
from zbv_service.records.lists import RunListQuery, SearchListQuery
from zbv_service.records.runs import RUN_ENDED, RunState
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

SHOWN_PLANS = 8
SHOWN = 5
_OPEN_SEARCHES = SearchListQuery(kind="plan", state=["queued", "running"], limit=SHOWN)
_OPEN_RUNS = RunListQuery(
    state=[state for state in get_args(RunState) if state not in RUN_ENDED], limit=SHOWN
)

router = APIRouter(include_in_schema=False)


@router.get("/", dependencies=[READ])
async def get_home(request: Request) -> HTMLResponse:
    """The newest plans, and the open searches and runs."""
    found = state_of(request)
    return await page(
        request,
        "home.html.j2",
        plans=await found.plans.newest(SHOWN_PLANS),
        searches=(await found.searches.page(_OPEN_SEARCHES)).items,
        runs=(await found.runs.page(_OPEN_RUNS)).items,
        tally=await tally(found.database),
        example=example_text(),
    )


@router.post("/example", dependencies=[needs("search"), STORES["searches"]])
async def search_example(request: Request) -> Response:
    """Search the example, or find an earlier search of it, and show that search."""
    record = await state_of(request).searches.submit({"problem": EXAMPLE}, grant_of(request))
    return RedirectResponse(f"{root_of(request)}/searches/{record.id}", 303, NO_STORE)


EXAMPLE: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 16,
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16},
    "units": {"time": "us"},
}
"""Four ranks, an uneven backward, and the memory of 1F1B."""


def example_text() -> str:
    """The example as the body of a request: readable JSON, one line per member."""
    members = ",\n    ".join(f'"{name}": {json.dumps(value)}' for name, value in EXAMPLE.items())
    return f'{{"problem": {{\n    {members}}}}}'
