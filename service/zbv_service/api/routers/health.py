"""Signs of life, for those who restart services and those who send them work."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from zbv_service.api.error_handlers import documented
from zbv_service.api.state import state_of
from zbv_service.errors import NOT_READY, ProblemError
from zbv_service.security.scheme import ANYBODY

RETRY_SECONDS = 1

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """A sign of life."""

    status: Literal["ok"] = "ok"


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
    failed = await state_of(request).readiness.failed_checks()
    if failed:
        raise ProblemError(
            NOT_READY,
            " ".join(found.detail for found in failed),
            [asdict(found) for found in failed],
            {"Retry-After": str(RETRY_SECONDS), "Cache-Control": "no-store"},
        )
    response.headers["Cache-Control"] = "no-store"
    return Health()
