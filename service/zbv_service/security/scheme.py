"""Declares the scope that a route needs: ``dependencies=[needs("search")]``.

This module has no postponed annotations, because FastAPI reads those of a dependency that is an object
and cannot resolve them as text.
"""

from typing import cast

from fastapi import APIRouter, Depends, Request, Security, params
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase

from zbv_service.observability.context import CALLER
from zbv_service.security.access import Access
from zbv_service.security.scopes import SCOPES, Scope

SCHEME = "token"


class _TokenScheme(SecurityBase):
    """Checks that each request of a route has one of its declared scopes."""

    def __init__(self) -> None:
        self.scheme_name = SCHEME
        self.model = HTTPBearer(
            bearerFormat="zbv_<id>_<secret>",
            description="A token of `zbv-service token create`. A session cookie is accepted too.",
        )

    async def __call__(self, request: Request, scopes: SecurityScopes) -> None:
        """Store the grant in ``request.state``; raises the errors of :meth:`Access.require`."""
        access: Access = request.app.state.application.access
        request.state.grant = grant = await access.require(request, scopes.scopes)
        request.state.caller = grant.name
        CALLER.set(grant.name or (request.client.host if request.client else None))


_scheme = _TokenScheme()


async def _anybody() -> None:
    """Declares that a route needs no token."""


def needs(*scopes: Scope) -> params.Security:
    """A dependency that requires one of these scopes."""
    return cast("params.Security", Security(_scheme, scopes=list(scopes)))


READ_SCOPES: tuple[Scope, ...] = ("read",)
READ = needs(*READ_SCOPES)
ANY_TOKEN = needs(*SCOPES)
ANYBODY = cast("params.Depends", Depends(_anybody))
"""The declaration of a route that needs no token."""


def scopes_of(route: APIRoute) -> list[str] | None:
    """The scopes of a route, which needs one of them: [] for none, None if it declares nothing."""
    for found in route.dependant.dependencies:
        if found.call is _scheme:
            return list(found.own_oauth_scopes or [])
        if found.call is _anybody:
            return []
    return None


def require_declared(router: APIRouter) -> None:
    """Raise RuntimeError if a route declares neither a scope nor that it needs no token."""
    for route in router.routes:
        if not isinstance(route, APIRoute) or scopes_of(route) is None:
            raise RuntimeError(f"{route} declares no scope; give it dependencies=[needs(…)] or [ANYBODY].")
