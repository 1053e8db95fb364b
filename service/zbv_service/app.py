"""The application factory: builds the parts of the service and connects them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from zbv_solver import __version__

from zbv_service.api import openapi
from zbv_service.api.bodies import BodyMemory
from zbv_service.api.error_handlers import install as install_error_handlers
from zbv_service.api.error_handlers import on_crash
from zbv_service.api.limits import Limited
from zbv_service.api.rank_fetches import RankFetches
from zbv_service.api.readiness import Readiness
from zbv_service.api.routers import agents as agent_routes
from zbv_service.api.routers import health, problem_checks
from zbv_service.api.routers import plans as plan_routes
from zbv_service.api.routers import runs as run_routes
from zbv_service.api.routers import search_events as search_event_routes
from zbv_service.api.routers import searches as search_routes
from zbv_service.api.state import ApplicationState
from zbv_service.compute.computations import Computations
from zbv_service.compute.processes import preload
from zbv_service.database import (
    AgentTable,
    Database,
    HeartbeatTable,
    Keep,
    ListenerTable,
    PartTable,
    PlanTable,
    Retention,
    RunPlanTable,
    RunTable,
    SearchEventTable,
    SearchTable,
    TokenTable,
)
from zbv_service.database.sweeper import Sweeper
from zbv_service.frontier.frontier import Frontiers
from zbv_service.observability.metrics import Metrics
from zbv_service.observability.requests import Observed
from zbv_service.pages import routes as pages
from zbv_service.pages.routes import problems, sign_in
from zbv_service.pages.shell import assets
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
from zbv_service.runs.replanner import Replanner
from zbv_service.runs.runs import Runs
from zbv_service.runs.steps import RunSteps
from zbv_service.runs.watch import AgentWatch
from zbv_service.searches.events import SearchEvents
from zbv_service.searches.executors.task import SearchFunction, solver_search
from zbv_service.searches.runner import Runner
from zbv_service.searches.searches import Searches
from zbv_service.security.access import Access
from zbv_service.security.headers import SecurityHeaders
from zbv_service.security.hosts import KnownHosts, host_names
from zbv_service.security.scheme import require_declared
from zbv_service.security.sign_in import SignIn
from zbv_service.security.token_text import TokenText
from zbv_service.security.tokens import Tokens
from zbv_service.settings import Settings

_ROUTERS = (
    search_routes.router,
    search_event_routes.router,
    problem_checks.router,
    problem_checks.former_router,
    plan_routes.router,
    run_routes.router,
    agent_routes.router,
    health.router,
    *pages.ROUTERS,
)
"""Every route of the service.

``include_router`` would build each route again for every application and search for it twice for every
request, so the application gets the routes themselves.
"""


def create_app(
    settings: Settings | None = None,
    *,
    search: SearchFunction = solver_search,
    local_token: TokenText | None = None,
) -> FastAPI:
    """The service as an ASGI application. Its lifespan migrates the database and runs the searches.

    Parameters
    ----------
    search
        The function that search processes run; tests replace it.
    local_token
        A token with all scopes that is in no database, for commands on this machine.
    """
    settings = settings or Settings()
    metrics = Metrics()
    for router in _ROUTERS:
        require_declared(router)
    preload("zbv_service.api.preload")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(settings.database)
        try:
            await database.migrate()
            app.state.application = application = _build_state(
                database, settings, search, metrics, local_token
            )
            runner, dispatcher = application.runner, application.dispatcher
            await application.events.start()
            await runner.start()
            await dispatcher.start()
            await application.sweeper.start()
            try:
                yield
            finally:
                await dispatcher.stop()
                await application.heartbeats.stop()
                await runner.stop()
                await application.sweeper.stop()
                await application.access.tokens.close()
                await application.events.stop()
                application.computations.stop()
        finally:
            await database.close()

    app = FastAPI(
        title="zbv",
        version=__version__,
        summary="Plans zero-bubble V schedules for pipeline-parallel training.",
        lifespan=lifespan,
        routes=[route for router in _ROUTERS for route in router.routes],
        middleware=[
            Middleware(Observed, metrics),
            Middleware(SecurityHeaders),
            Middleware(Limited),
            Middleware(KnownHosts, host_names(settings)),
            # Starlette's own handler of crashes is outside of all middleware, so its response would lack the
            # request's id and the security headers.
            Middleware(ExceptionMiddleware, handlers={Exception: problems.as_page(on_crash)}),
            Middleware(RankFetches),
        ],
        openapi_url=None,  # replaced by a route that requires a token
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # The service has its own metrics and logs. Looking for providers would cost every request more time.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.metrics = metrics
    app.state.settings = settings
    app.state.body_memory = BodyMemory()
    install_error_handlers(app)
    sign_in.install(app)
    pages.mount_static(app)
    problems.install(app)
    openapi.install(app)
    return app


def _build_state(
    database: Database,
    settings: Settings,
    search: SearchFunction,
    metrics: Metrics,
    local_token: TokenText | None,
) -> ApplicationState:
    """The parts of the service on an open database."""
    agents, runs, run_plans = AgentTable(database), RunTable(database), RunPlanTable(database)
    plan_table, parts = PlanTable(database), PartTable(database)
    events = SearchEvents(SearchEventTable(database))
    searches_table = SearchTable(database, events.changed)
    runner = Runner(searches_table, settings, search, metrics)
    computations = Computations()
    searches = Searches(searches_table, runner, settings, computations)
    plans = Plans(plan_table, settings, computations)
    replanner = Replanner(runs, run_plans, parts, plans, searches, computations)
    watch = AgentWatch(agents, ListenerTable(database), settings.agent_timeout_seconds)
    dispatcher = Dispatcher(runs, run_plans, replanner, watch, settings)
    heartbeats = Heartbeats(HeartbeatTable(database))
    token_table = TokenTable(database)
    schedules = Schedules(computations)
    tokens = Tokens(token_table, local_token)
    keep = Keep(
        ended=settings.keep_days,
        failed=settings.keep_failed_days,
        plans=settings.keep_plan_days,
        runs=settings.keep_run_days,
        agents=settings.keep_agent_days,
        tokens=settings.keep_token_days,
    )
    return ApplicationState(
        settings=settings,
        database=database,
        runner=runner,
        searches=searches,
        events=events,
        computations=computations,
        comparisons=Comparisons(plan_table, computations, settings),
        estimates=Estimates(computations, settings),
        schedules=schedules,
        frontiers=Frontiers(plan_table, searches_table, searches, schedules, computations),
        compared=ComparedPlans(plans, schedules),
        plans=plans,
        dispatcher=dispatcher,
        heartbeats=heartbeats,
        agents=Agents(agents, runs, heartbeats, dispatcher),
        runs=Runs(runs, run_plans, plan_table, plans, searches, dispatcher, computations, settings),
        parts=RunParts(parts, computations),
        steps=RunSteps(parts, computations),
        measurements=Measurements(parts, plans, computations),
        sweeper=Sweeper(Retention(database), keep, plans.used),
        metrics=metrics,
        readiness=Readiness(database, runner, dispatcher),
        assets=assets(),
        access=Access(tokens, is_open=settings.auth == "none"),
        sign_in=SignIn(token_table, tokens, 3600 * settings.session_hours),
    )
