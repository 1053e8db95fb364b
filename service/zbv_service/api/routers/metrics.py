"""``/metrics`` for Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from zbv_service.api.error_handlers import documented
from zbv_service.api.state import state_of
from zbv_service.database.tally import tally
from zbv_service.errors import NOT_READY, ProblemError
from zbv_service.security.scheme import READ

COUNT_SECONDS = 5.0

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    operation_id="get_metrics",
    dependencies=[READ],
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "The text format, or OpenMetrics for those who accept it.",
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        },
        **documented(NOT_READY),
    },
)
async def get_metrics(request: Request) -> Response:
    """What the database holds is counted now; the rest is what this process has seen since its start."""
    found = state_of(request)
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            found.metrics.take(await tally(found.database))
    except TimeoutError:
        raise ProblemError(NOT_READY, "The database does not answer in time; ask again.") from None
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(found.metrics.registry), media_type=None, headers={"Content-Type": media_type})
