"""A fast path for the request that thousands of ranks send at once: a rank's part of a plan.

The framework's routing, parameters and dependencies take several times as long as the response itself.
This middleware serves rank plans that are in memory. It leaves all other requests (an unknown plan, a first
fetch, a wrong rank, other methods) to :func:`zbv_service.api.routers.plans.get_rank`. Both authorize requests
with :class:`zbv_service.security.access.Access`.
"""

from __future__ import annotations

import re

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from zbv_service.api.caching import REVALIDATED
from zbv_service.api.error_handlers import on_database_away
from zbv_service.api.routers.plans import get_rank, router
from zbv_service.database import DatabaseAway
from zbv_service.errors import ApiError, response_to
from zbv_service.plans.plans import rank_tag
from zbv_service.security.access import scopes_of

_PATH = re.compile(r"/v1/plans/([0-9a-f]{64})/ranks/(0|[1-9][0-9]{0,5})")
_ROUTE = next(route for route in router.routes if isinstance(route, APIRoute) and route.endpoint is get_rank)
_SCOPES = scopes_of(_ROUTE) or ()


class RankFetches:
    """Serves cached rank plans in place of the route; the caller needs the scopes of the route."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] != "GET" or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        application = scope["app"].state.application
        plan_id, rank = found[1], int(found[2])
        body = application.plans.known_rank(plan_id, rank)
        if body is None or any(name == b"if-none-match" for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        request = Request(scope)
        try:
            await application.access.require(request, _SCOPES)
        except ApiError as error:
            await response_to(error)(scope, receive, send)
            return
        except DatabaseAway as error:
            await (await on_database_away(request, error))(scope, receive, send)
            return
        application.metrics.rank_fetches.inc()
        headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            (b"etag", f'"{rank_tag(plan_id, rank)}"'.encode()),
            (b"cache-control", REVALIDATED.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
