"""The application state: it builds and connects the parts of the service for the routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fastapi import Request

from zbv_service.api.readiness import Readiness
from zbv_service.compute.computations import Computations
from zbv_service.database import (
    AgentTable,
    Database,
    HeartbeatTable,
    Keep,
    ListenerTable,
    PartTable,
    PlanTable,
    Retention,
    RunEventTable,
    RunPlanTable,
    RunTable,
    SearchEventTable,
    SearchTable,
)
from zbv_service.database.events import EventFeed
from zbv_service.database.retention import Sweeper
from zbv_service.frontier.frontier import Frontiers
from zbv_service.observability.metrics import Metrics
from zbv_service.plans.compared import ComparedPlans
from zbv_service.plans.plans import Plans
from zbv_service.problems.compare import Comparisons
from zbv_service.problems.estimate import Estimates
from zbv_service.records.searches import SearchKind
from zbv_service.runs.agents import Agents, Heartbeats
from zbv_service.runs.dispatch import AgentWatch, Dispatcher
from zbv_service.runs.measurements import Measurements, RunSteps
from zbv_service.runs.parts import RunParts
from zbv_service.runs.replanner import Replanner
from zbv_service.runs.runs import Runs
from zbv_service.searches.kinds import Kind
from zbv_service.searches.runner import Runner
from zbv_service.searches.searches import Searches
from zbv_service.security.access import Access
from zbv_service.security.quotas import Quotas
from zbv_service.security.sign_in import SignIn
from zbv_service.security.tokens import TokenTable
from zbv_service.settings import Settings


class ApplicationState:
    """The parts of a service on an open database; routes get it from :func:`state_of`.

    Parameters
    ----------
    kinds
        What search processes run for each kind of search.
    assets
        A text that changes with every version of the service; see
        :func:`zbv_service.api.routers.plans.derived`.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        access: Access,
        kinds: Mapping[SearchKind, Kind],
        metrics: Metrics,
        assets: str,
    ):
        self.database, self.settings = database, settings
        self.metrics, self.assets = metrics, assets
        self.computations = computations = Computations(settings.computation_seconds, settings.memory)

        self.events = EventFeed(SearchEventTable(database))
        self.run_events = EventFeed(RunEventTable(database))
        plan_table, search_table = PlanTable(database), SearchTable(database, self.events.changed)
        self.runner = Runner(search_table, settings, metrics, kinds)
        self.searches = Searches(search_table, self.runner, kinds, settings, computations)

        self.plans = Plans(plan_table, settings, computations)
        self.compared = ComparedPlans(self.plans)
        self.frontiers = Frontiers(plan_table, search_table, self.searches, self.plans, settings)
        self.comparisons = Comparisons(plan_table, computations, settings)
        self.estimates = Estimates(computations, settings)

        agents, runs, run_plans = AgentTable(database), RunTable(database), RunPlanTable(database)
        parts = PartTable(database)
        replanner = Replanner(runs, run_plans, parts, self.plans, self.searches, computations, settings)
        watch = AgentWatch(agents, ListenerTable(database), settings.agent_timeout_seconds)
        self.dispatcher = dispatcher = Dispatcher(runs, run_plans, replanner, watch, settings)
        self.heartbeats = Heartbeats(HeartbeatTable(database))
        self.agents = Agents(agents, runs, self.heartbeats, dispatcher)
        self.runs = Runs(
            runs, run_plans, plan_table, self.plans, self.searches, dispatcher, computations, settings
        )
        self.parts = RunParts(parts, computations)
        self.steps = RunSteps(parts, computations)
        self.measurements = Measurements(parts, self.plans, computations)

        keep = Keep(others=settings.keep_days, plans=settings.keep_plan_days)
        self.sweeper = Sweeper(Retention(database), keep, self.plans.used)
        self.readiness = Readiness(database, self.runner, dispatcher)
        self.access = access
        self.quotas = Quotas(database, settings)
        self.sign_in = SignIn(TokenTable(database), access, 3600 * settings.session_hours, self.quotas)

    async def start(self) -> None:
        """Start the parts that work in the background."""
        await self.events.start()
        await self.run_events.start()
        await self.runner.start()
        await self.dispatcher.start()
        await self.sweeper.start()

    async def stop(self) -> None:
        """Stop them. Searches that are still running return to the queue."""
        await self.dispatcher.stop()
        await self.heartbeats.stop()
        await self.runner.stop()
        await self.sweeper.stop()
        await self.access.close()
        await self.events.stop()
        await self.run_events.stop()
        self.computations.stop()


def state_of(request: Request) -> ApplicationState:
    """The state of the application that received the request."""
    return cast("ApplicationState", request.app.state.application)
