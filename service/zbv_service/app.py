"""The application factory: middleware, routes, and the lifespan of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from zbv_solver import __version__

from zbv_service import pages
from zbv_service.api import openapi
from zbv_service.api.bodies import BodyMemory
from zbv_service.api.error_handlers import install as install_error_handlers
from zbv_service.api.error_handlers import on_crash
from zbv_service.api.requests import Requests
from zbv_service.api.routers import (
    agents,
    health,
    plans,
    problem_checks,
    runs,
    searches,
)
from zbv_service.api.state import ApplicationState
from zbv_service.compute.processes import preload
from zbv_service.database import Database
from zbv_service.observability.metrics import Metrics
from zbv_service.pages import errors, sign_in
from zbv_service.pages.assets import STATIC_DIRECTORIES, assets, assets_app
from zbv_service.records.searches import SearchKind
from zbv_service.searches.kinds import KINDS, Kind
from zbv_service.security.access import Access, require_declared
from zbv_service.security.tokens import TokenTable, TokenText
from zbv_service.settings import Settings

_ROUTERS = (
    searches.router,
    problem_checks.router,
    plans.router,
    runs.router,
    agents.router,
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
    kinds: Mapping[SearchKind, Kind] = KINDS,
    local_token: TokenText | None = None,
) -> FastAPI:
    """The service as an ASGI application. Its lifespan migrates the database and runs the searches.

    Parameters
    ----------
    kinds
        What search processes run for each kind of search; tests replace it.
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
            access = Access(TokenTable(database), local_token, is_open=settings.auth == "none")
            application = ApplicationState(database, settings, access, kinds, metrics, assets())
            app.state.application = application
            await application.start()
            try:
                yield
            finally:
                await application.stop()
        finally:
            await database.close()

    app = FastAPI(
        title="zbv",
        version=__version__,
        summary="Plans zero-bubble V schedules for pipeline-parallel training.",
        lifespan=lifespan,
        routes=[route for router in _ROUTERS for route in router.routes],
        middleware=[
            Middleware(Requests, metrics),
            Middleware(TrustedHostMiddleware, settings.host_names, www_redirect=False),
            # Starlette's own handler of crashes is outside of all middleware, so its response would lack the
            # request's id and the security headers.
            Middleware(ExceptionMiddleware, handlers={Exception: errors.as_page(on_crash)}),
            Middleware(plans.RankFetches),
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
    app.mount("/static", assets_app(STATIC_DIRECTORIES, assets()), name="static")
    errors.install(app)
    openapi.install(app)
    return app
