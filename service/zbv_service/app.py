"""The application factory: the rooms of the service, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from zbv_solver import __version__

from zbv_service import openapi, problems
from zbv_service.agents import Agents
from zbv_service.database import AgentTable, Database, PlanTable, RunTable, SearchTable
from zbv_service.dispatch import Dispatcher
from zbv_service.plans import Plans
from zbv_service.routers import agents, health, pages, plans, runs, searches
from zbv_service.runner import Runner
from zbv_service.runs import Runs
from zbv_service.searches import Searches
from zbv_service.settings import Settings
from zbv_service.task import SearchFunction, solver_search


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
            table = SearchTable(database)
            runner = Runner(table, settings, search)
            agent_table, run_table, plan_table = AgentTable(database), RunTable(database), PlanTable(database)
            dispatcher = Dispatcher(agent_table, run_table, settings)
            app.state.rooms = Rooms(
                settings,
                database,
                runner,
                Searches(table, runner, settings),
                Plans(plan_table, settings),
                dispatcher,
                Agents(agent_table, run_table, dispatcher),
                Runs(run_table, plan_table, dispatcher),
            )
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
    for router in (searches.router, plans.router, runs.router, agents.router, health.router, pages.router):
        app.include_router(router)
    pages.mount_static(app)
    openapi.install(app)
    return app
