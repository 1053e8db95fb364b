"""``/plans/{plan_id}/thumbnail.png``: a plan at a glance, for lists."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from zbv_service.api.caching import derived
from zbv_service.api.state import state_of
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/thumbnail.png", dependencies=[READ])
async def get_thumbnail(request: Request, plan_id: str) -> Response:
    """Its schedule as a small picture."""
    picture = await state_of(request).plans.thumbnail(plan_id)
    headers, known = derived(request, f"{plan_id}-thumbnail")
    return known or Response(picture, headers=headers, media_type="image/png")
