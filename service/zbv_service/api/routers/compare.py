"""``/v1/compare``."""

from __future__ import annotations

from fastapi import APIRouter, Request

from zbv_service.api.bodies import read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.openapi import body_of
from zbv_service.api.state import state_of
from zbv_service.errors import BODY_TOO_LARGE, INVALID_BODY, MALFORMED_JSON, NOT_READY, UNSUPPORTED_MEDIA_TYPE
from zbv_service.problems.documents import CompareRequest, Comparison
from zbv_service.security.scheme import needs

router = APIRouter(prefix="/v1/compare", tags=["plans"])


@router.post(
    "",
    dependencies=[needs("search")],
    operation_id="compare",
    summary="The classical schedules of a problem",
    response_description="What each achieves, and the best stored plan.",
    openapi_extra=body_of(CompareRequest),
    responses=documented(MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, INVALID_BODY, NOT_READY),
)
async def compare(request: Request) -> Comparison:
    """Searches and stores nothing."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        return await found.comparisons.compare(body)
