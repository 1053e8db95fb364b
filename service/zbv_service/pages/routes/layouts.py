"""``/layouts``: the form and the list of searches for layouts, and the page of one."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from zbv_solver.errors import InvalidInput

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.documents.packing import unpack
from zbv_service.pages.answers import page
from zbv_service.pages.views.layout_form import LayoutForm, form_of
from zbv_service.pages.views.layout_search import LayoutSearchView, layout_view
from zbv_service.records.lists import LayoutListQuery
from zbv_service.records.searches import FINISHED, LayoutSearchDocument
from zbv_service.security.quotas import STORES
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 256 * 1024
"""Most bytes of a form, which may have a model and a cluster as JSON."""
LISTED = 20
"""Searches below the form."""

router = APIRouter(include_in_schema=False)


@router.get("/layouts", dependencies=[READ])
async def get_layouts_page(request: Request) -> HTMLResponse:
    """The form, empty or with the request of an earlier search (``from``), and the newest searches."""
    source = request.query_params.get("from", "")
    form = LayoutForm()
    if source:
        _, packed = await state_of(request).layouts.asked(source)
        form = await state_of(request).computations.write(_former_form, packed)
    return await _form_page(request, form)


@router.post("/layouts", dependencies=[needs("search"), STORES["searches"]])
async def post_layouts(request: Request) -> Response:
    """Start a search, and show its page; a form with mistakes comes back with what is wrong."""
    form = LayoutForm.parse(parse_qs(await read_form(request, MAX_FORM_BYTES)))
    found = state_of(request)
    try:
        record = await found.layouts.submit(
            form.document(), caller=caller_of(request), most=most_searches(request)
        )
    except InvalidInput as error:
        return await _form_page(request, form.with_issues(error), 422)
    return RedirectResponse(f"{root_of(request)}/layouts/{quote(record.id)}", 303)


@router.get("/layouts/{search_id}", dependencies=[READ])
async def get_layout_search(request: Request, search_id: str) -> HTMLResponse:
    """The page of a search for layouts."""
    found = state_of(request).layouts
    record, packed = await found.asked(search_id)
    both = (packed, await found.answer(record))
    view = await state_of(request).computations.run(partial(_view, record, root_of(request)), both)
    is_open = record.state not in FINISHED
    return await page(request, "layout_search.html.j2", view=view, row=record, is_open=is_open)


@router.get("/layouts/{search_id}/layouts.json", dependencies=[READ])
async def get_layouts_json(request: Request, search_id: str) -> Response:
    """The search as JSON, with its answer."""
    found = state_of(request).layouts
    text = await found.text(await found.get(search_id))
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.post("/layouts/{search_id}/cancel", dependencies=[needs("search")])
async def post_cancel(request: Request, search_id: str) -> Response:
    """Stop a search; the layouts planned so far are kept."""
    await state_of(request).layouts.cancel(search_id)
    return RedirectResponse(f"{root_of(request)}/layouts/{quote(search_id)}", 303)


async def _form_page(request: Request, form: LayoutForm, status: int = 200) -> HTMLResponse:
    listed = await state_of(request).layouts.page(LayoutListQuery(limit=LISTED))
    return await page(request, "layouts.html.j2", status, form=form, rows=listed.items)


def _former_form(packed: bytes) -> LayoutForm:
    return form_of(unpack(packed))


def _view(record: LayoutSearchDocument, root: str, packed: tuple[bytes, bytes | None]) -> LayoutSearchView:
    request, answer = packed
    return layout_view(record, {} if answer is None else unpack(answer), unpack(request), root)
