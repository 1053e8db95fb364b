"""``/``: the front page; and ``/example``, which has an example searched."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.database.tally import tally
from zbv_service.pages.answers import page, shell_of
from zbv_service.pages.routes.rows import plan_row, run_row, search_row
from zbv_service.pages.views.home import EXAMPLE, Now, home_page
from zbv_service.records.runs import RUN_ENDED, RUN_STATES, RunFilter
from zbv_service.records.searches import SearchFilter
from zbv_service.security.scheme import READ, needs

SHOWN_PLANS = 8
SHOWN = 5
_OPEN_SEARCHES = SearchFilter(states=frozenset({"queued", "running"}))
_OPEN_RUNS = RunFilter(states=frozenset(RUN_STATES) - RUN_ENDED)

router = APIRouter(include_in_schema=False)


@router.get("/", dependencies=[READ])
async def get_home(request: Request) -> HTMLResponse:
    """The newest plans, and what goes on."""
    found = state_of(request)
    counted = await tally(found.database)
    now = Now(
        searches=[search_row(r) for r in (await found.searches.page(_OPEN_SEARCHES, SHOWN, None)).items],
        runs=[run_row(record) for record in (await found.runs.page(_OPEN_RUNS, SHOWN)).items],
        searches_by_state=counted.searches,
        runs_by_state=counted.runs,
        agents_by_state=counted.agents,
    )
    plans = [plan_row(summary) for summary in await found.plans.newest(SHOWN_PLANS)]
    return page(home_page(plans, now, shell_of(request)), headers={"Cache-Control": "no-store"})


@router.post("/example", dependencies=[needs("search")])
async def search_example(request: Request) -> Response:
    """Search the example, or find the search of it, and show it."""
    record = await state_of(request).searches.submit(
        {"problem": EXAMPLE}, caller=caller_of(request), most=most_searches(request)
    )
    return RedirectResponse(f"{root_of(request)}/searches/{record.id}", 303, {"Cache-Control": "no-store"})
