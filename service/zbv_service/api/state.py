"""The application state: the parts of the service, and what routes read from it about a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fastapi import Request

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
    """The parts of a running service, as returned by :func:`state_of`.

    Attributes
    ----------
    assets
        A text that changes with every version of the service; see :func:`zbv_service.api.caching.derived`.
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


def state_of(request: Request) -> ApplicationState:
    """The state of the application that received the request."""
    return cast("ApplicationState", request.app.state.application)


def caller_of(request: Request) -> str | None:
    """The name of the caller's token; None if the service requires no token."""
    return grant_of(request).name


def most_searches(request: Request) -> int:
    """The caller's limit of unfinished searches."""
    own = grant_of(request).max_searches
    return state_of(request).settings.max_searches_per_token if own is None else own
