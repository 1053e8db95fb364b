"""The application factory: the rooms of the service, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from zbv_solver import __version__

from zbv_service.database import (
    AgentTable,
    Database,
    PartTable,
    PlanTable,
    RunPlanTable,
    RunTable,
    SearchTable,
)
from zbv_service.http import openapi, problems
from zbv_service.plans import Plans
from zbv_service.routers import agents as agent_routes
from zbv_service.routers import health, pages
from zbv_service.routers import plans as plan_routes
from zbv_service.routers import runs as run_routes
from zbv_service.routers import searches as search_routes
from zbv_service.runs.agents import Agents
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.parts import RunParts
from zbv_service.runs.replanner import Replanner
from zbv_service.runs.runs import Runs
from zbv_service.searches.runner import Runner
from zbv_service.searches.searches import Searches
from zbv_service.searches.task import SearchFunction, solver_search
from zbv_service.settings import Settings


@dataclass(frozen=True)
class Rooms:
    """What routes work with; they find it as ``request.app.state.rooms``."""

    settings: Settings
    database: Database
    runner: Runner
    searches: Searches
    plans: Plans
    dispatcher: Dispatcher
    agents: Agents
    runs: Runs
    parts: RunParts


def create_app(settings: Settings | None = None, *, search: SearchFunction = solver_search) -> FastAPI:
    """The service as an ASGI application. Its lifespan migrates the database and runs the searches.

    Parameters
    ----------
    search
        What search processes run; the solver's search unless a test has a better idea.
    """
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = Database(settings.database)
        try:
            await database.migrate()
            app.state.rooms = rooms = _furnish(database, settings, search)
            runner, dispatcher = rooms.runner, rooms.dispatcher
            await runner.start()
            await dispatcher.start()
            try:
                yield
            finally:
                await dispatcher.stop()
                await runner.stop()
        finally:
            await database.close()

    app = FastAPI(
        title="zbv",
        version=__version__,
        summary="Plans zero-bubble V schedules for pipeline-parallel training.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    for routes in (search_routes, plan_routes, run_routes, agent_routes, health, pages):
        app.include_router(routes.router)
    pages.mount_static(app)
    openapi.install(app)
    return app


def _furnish(database: Database, settings: Settings, search: SearchFunction) -> Rooms:
    """The rooms on an open database."""
    agents, runs, run_plans = AgentTable(database), RunTable(database), RunPlanTable(database)
    searches_table, plan_table, parts = SearchTable(database), PlanTable(database), PartTable(database)
    runner = Runner(searches_table, settings, search)
    searches, plans = Searches(searches_table, runner, settings), Plans(plan_table, settings)
    replanner = Replanner(runs, run_plans, parts, plans, searches)
    dispatcher = Dispatcher(agents, runs, run_plans, replanner, settings)
    return Rooms(
        settings=settings,
        database=database,
        runner=runner,
        searches=searches,
        plans=plans,
        dispatcher=dispatcher,
        agents=Agents(agents, runs, dispatcher),
        runs=Runs(runs, run_plans, plan_table, plans, searches, dispatcher),
        parts=RunParts(parts),
    )
