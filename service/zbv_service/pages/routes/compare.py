"""``/plans/{plan_id}/compare``: a plan, classical schedules and other plans on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.caching import derived
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.errors import NOT_FOUND, ApiError
from zbv_service.pages.answers import page
from zbv_service.pages.views.compare import CompareView, compare_view
from zbv_service.plans.compared import USUAL, ComparedPlan
from zbv_service.plans.renderings import actions_of, plan_of
from zbv_service.records.plans import PlanSummaryDocument
from zbv_service.security.scheme import READ

MOST_NAMES = 32
LONGEST_NAME = 100

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/compare", dependencies=[READ])
async def get_compare_page(
    request: Request,
    plan_id: str,
    chosen: Annotated[list[str] | None, Query(alias="with", max_length=MOST_NAMES)] = None,
) -> Response:
    """The comparison. The form always sends an empty name, so that choosing nothing differs from no form."""
    found = state_of(request)
    names = USUAL if chosen is None else [name.strip()[:LONGEST_NAME] for name in chosen if name.strip()]
    plan = await found.plans.facts(plan_id)
    compared = await found.compared.of(plan, names)
    offered = await found.compared.offered(plan)
    make = partial(_view, compared, offered, root_of(request))
    return await page(request, "compare.html.j2", view=await found.plans.compute(make, plan_id))


@router.get("/plans/{plan_id}/baselines/{name}/actions", dependencies=[READ])
async def get_baseline_actions(request: Request, plan_id: str, name: str) -> Response:
    """A classical schedule's packed actions: see :mod:`zbv_solver.export.timeline`."""
    found = state_of(request)
    baseline = await found.compared.baseline(await found.plans.facts(plan_id), name)
    if baseline is None:
        raise ApiError(NOT_FOUND, f"found no classical schedule {name[:LONGEST_NAME]!r}.")
    headers, known = derived(request, f"{plan_id}-{name}-actions")
    return known or Response(
        await found.computations.run(actions_of, baseline),
        headers=headers,
        media_type="application/octet-stream",
    )


def _view(
    compared: Sequence[ComparedPlan],
    offered: tuple[Sequence[PlanSummaryDocument], Sequence[PlanSummaryDocument]],
    root: str,
    packed: bytes,
) -> CompareView:
    return compare_view(plan_of(packed), compared, offered, root)
