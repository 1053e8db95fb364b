"""Signs of life, for those who restart services and those who send them work."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request

from zbv_service.documents import Health
from zbv_service.http.problems import NOT_READY, ProblemError, documented
from zbv_service.routers.rooms import rooms

PING_SECONDS = 5.0

logger = logging.getLogger(__name__)
router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="get_health", summary="Whether the process is alive")
async def get_health() -> Health:
    """Answers as long as the process can answer at all."""
    return Health()


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Whether it can work",
    responses=documented(NOT_READY),
)
async def get_readiness(request: Request) -> Health:
    """Answers 200 while the database answers and searches are being run."""
    found = rooms(request)
    try:
        async with asyncio.timeout(PING_SECONDS):
            await found.database.ping()
    except Exception as error:
        logger.warning("the database does not answer", exc_info=error)
        raise ProblemError(NOT_READY, "The database does not answer; the log says why.") from error
    if not (found.runner.is_working and found.dispatcher.is_working):
        raise ProblemError(NOT_READY, "Searches and runs are not looked after: the service starts or stops.")
    return Health()
