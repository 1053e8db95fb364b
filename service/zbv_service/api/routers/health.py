"""``/healthz`` and ``/readyz`` for supervisors and load balancers, and ``/metrics`` for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from zbv_service.api.openapi import operation_id
from zbv_service.api.state import state_of
from zbv_service.database.tally import tally
from zbv_service.errors import NOT_READY, ApiError
from zbv_service.security.access import ANYBODY, READ

RETRY_SECONDS = 1
COUNT_SECONDS = 5.0

router = APIRouter(tags=["health"], generate_unique_id_function=operation_id)


class Health(BaseModel):
    """The process responds."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", dependencies=[ANYBODY], summary="Whether the process is alive")
async def get_health(response: Response) -> Health:
    """Responds as long as the process can respond at all."""
    response.headers["Cache-Control"] = "no-store"
    return Health()


@router.get("/readyz", dependencies=[ANYBODY], summary="Whether the service can work")
async def get_readiness(request: Request, response: Response) -> Health:
    """Responds with 200 while the database answers and takes writes, and searches and runs are advanced.

    Otherwise ``errors`` has one entry for each failed check: ``database``, ``searches``, ``runs``.
    """
    failed = await state_of(request).readiness.failed_checks()
    if failed:
        raise ApiError(
            NOT_READY,
            " ".join(failed.values()),
            [{"check": check, "detail": detail} for check, detail in failed.items()],
            {"Retry-After": str(RETRY_SECONDS), "Cache-Control": "no-store"},
        )
    response.headers["Cache-Control"] = "no-store"
    return Health()


@router.get(
    "/metrics",
    dependencies=[READ],
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {
            "description": "The text format, or OpenMetrics if the client accepts it.",
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        },
    },
)
async def get_metrics(request: Request) -> Response:
    """Numbers of stored resources are current; all others count from the start of this process."""
    found = state_of(request)
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            found.metrics.take(await tally(found.database))
    except TimeoutError:
        raise ApiError(NOT_READY, "The database does not answer in time; ask again.") from None
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    text = await found.computations.write(encode, found.metrics.registry)
    return Response(text, media_type=None, headers={"Content-Type": media_type})
