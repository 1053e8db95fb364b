"""Signs of life, for those who restart services and those who send them work."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request, Response

from zbv_service.documents import Health
from zbv_service.http.problems import NOT_READY, ProblemError, documented
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import ANYBODY

PING_SECONDS = 5.0
RETRY_SECONDS = 1

logger = logging.getLogger(__name__)
router = APIRouter(tags=["health"])


@router.get(
    "/healthz",
    operation_id="get_health",
    dependencies=[ANYBODY],
    summary="Whether the process is alive",
    responses=documented(),
)
async def get_health(response: Response) -> Health:
    """Answers as long as the process can answer at all."""
    response.headers["Cache-Control"] = "no-store"
    return Health()


@router.get(
    "/readyz",
    operation_id="get_readiness",
    dependencies=[ANYBODY],
    summary="Whether it can work",
    responses=documented(NOT_READY),
)
async def get_readiness(request: Request, response: Response) -> Health:
    """Answers 200 while the database answers, and searches and runs are looked after.

    Otherwise ``errors`` has one entry for each check that failed: ``database``, ``searches``, ``runs``.
    """
    failed = await _failed_checks(request)
    if failed:
        raise ProblemError(
            NOT_READY,
            " ".join(entry["detail"] for entry in failed),
            failed,
            {"Retry-After": str(RETRY_SECONDS), "Cache-Control": "no-store"},
        )
    response.headers["Cache-Control"] = "no-store"
    return Health()


async def _failed_checks(request: Request) -> list[dict[str, str]]:
    found = rooms(request)
    failed = []
    try:
        async with asyncio.timeout(PING_SECONDS):
            await found.database.ping()
    except Exception as error:
        logger.warning("the database does not answer", exc_info=error)
        failed.append({"check": "database", "detail": "The database does not answer; the log says why."})
    if not found.runner.is_working:
        failed.append({"check": "searches", "detail": "Searches are not run: the service starts or stops."})
    elif (trouble := found.runner.trouble) is not None:
        failed.append({"check": "searches", "detail": f"Searches wait: {trouble}"})
    if not found.dispatcher.is_working:
        failed.append({"check": "runs", "detail": "Runs are not looked after: the service starts or stops."})
    return failed
