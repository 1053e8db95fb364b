"""The routes of the pages, and of the files that they load."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from zbv_service.pages.assets import assets_app
from zbv_service.pages.routes import (
    compare,
    errors,
    frontier,
    home,
    layouts,
    lists,
    new_search,
    plans,
    runs,
    searches,
    sign_in,
)
from zbv_service.pages.shell import STATIC_DIRECTORIES, assets

ROUTERS: tuple[APIRouter, ...] = (
    home.router,
    new_search.router,
    lists.router,
    layouts.router,
    searches.router,
    plans.router,
    compare.router,
    frontier.router,
    runs.router,
    errors.router,
    sign_in.router,
)
"""The routers of all pages, in the order in which addresses are compared."""


def mount_static(app: FastAPI) -> None:
    """Serve the style sheets and scripts of the pages."""
    app.mount("/static", assets_app(STATIC_DIRECTORIES, assets()), name="static")
