"""The application state: the parts of the service that routes work with, and helpers of routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastapi import Request, Response

from zbv_service.api.caching import IMMUTABLE, REVALIDATED
from zbv_service.api.idempotency import key_hash_of
from zbv_service.api.readiness import Readiness
from zbv_service.compute.computations import Computations
from zbv_service.database import Database
from zbv_service.database.sweeper import Sweeper
from zbv_service.frontier.frontier import Frontiers
from zbv_service.observability.metrics import Metrics
from zbv_service.plans.compared import ComparedPlans
from zbv_service.plans.plans import Plans
from zbv_service.plans.schedules import Schedules
from zbv_service.problems.compare import Comparisons
from zbv_service.problems.estimate import Estimates
from zbv_service.runs.agents import Agents
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.heartbeats import Heartbeats
from zbv_service.runs.measurements import Measurements
from zbv_service.runs.parts import RunParts
from zbv_service.runs.runs import Runs
from zbv_service.runs.steps import RunSteps
from zbv_service.searches.events import SearchEvents
from zbv_service.searches.runner import Runner
from zbv_service.searches.searches import Searches
from zbv_service.security.access import Access
from zbv_service.security.grants import grant_of
from zbv_service.security.sign_in import SignIn
from zbv_service.settings import Settings


@dataclass(frozen=True)
class ApplicationState:
    """The parts of a running service; routes get it from :func:`state_of`.

    Attributes
    ----------
    assets
        A text that changes with every version of the service; see :func:`derived`.
    """

    settings: Settings
    assets: str
    database: Database
    runner: Runner
    searches: Searches
    events: SearchEvents
    computations: Computations
    comparisons: Comparisons
    estimates: Estimates
    schedules: Schedules
    frontiers: Frontiers
    compared: ComparedPlans
    plans: Plans
    dispatcher: Dispatcher
    heartbeats: Heartbeats
    agents: Agents
    runs: Runs
    parts: RunParts
    steps: RunSteps
    measurements: Measurements
    sweeper: Sweeper
    metrics: Metrics
    readiness: Readiness
    access: Access
    sign_in: SignIn


SEE_PAGE: dict[int | str, dict[str, Any]] = {
    303: {"description": "Of a caller who would rather have text/html: its page."}
}
"""The ``responses`` entry of what has a page, too."""


def state_of(request: Request) -> ApplicationState:
    """The state of the application that received the request."""
    return cast("ApplicationState", request.app.state.application)


def caller_of(request: Request) -> str | None:
    """The name of the token that a request came with; None where nobody has to say who they are."""
    return grant_of(request).name


def request_key(request: Request) -> str | None:
    """The hash of the caller and its Idempotency-Key, None without one; raises :class:`ProblemError` 400."""
    return key_hash_of(request, grant_of(request).owner)


def most_searches(request: Request) -> int:
    """How many unfinished searches may be the caller's."""
    own = grant_of(request).max_searches
    return state_of(request).settings.max_searches_per_token if own is None else own


def immutable(
    request: Request, etag: str, more: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Response | None]:
    """Headers of an answer that never changes, and ``more``; and the 304 when the caller has it already."""
    return cached(request, etag, IMMUTABLE, more)


def derived(request: Request, etag: str) -> tuple[dict[str, str], Response | None]:
    """As :func:`immutable`, of what this version of the service makes of something that never changes.

    A later version may make something else of it. Only where the address names this version (``?v=``) may
    the answer be kept without asking.
    """
    assets = state_of(request).assets
    is_versioned = request.query_params.get("v") == assets
    return cached(request, f"{etag}-{assets}", IMMUTABLE if is_versioned else REVALIDATED)


def cached(
    request: Request, etag: str, how_long: str, more: Mapping[str, str] | None = None
) -> tuple[dict[str, str], Response | None]:
    """Headers of an answer that may be kept, and ``more``; and the 304 when the caller has it already."""
    quoted = f'"{etag}"'
    headers = {"ETag": quoted, "Cache-Control": how_long, **(more or {})}
    asked = request.headers.get("if-none-match", "")
    known = {tag.strip().removeprefix("W/") for tag in asked.split(",")}
    if quoted in known or "*" in known:
        return headers, Response(status_code=304, headers=headers)
    return headers, None
