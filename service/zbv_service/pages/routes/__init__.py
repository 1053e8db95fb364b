"""The pages for people, and the files they load. What they show is made in :mod:`zbv_service.pages`."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from zbv_service.pages.assets import assets_app
from zbv_service.pages.routes import (
    compare,
    frontier,
    home,
    lists,
    new_search,
    plans,
    runs,
    searches,
    thumbnails,
)
from zbv_service.pages.shell import STATIC_DIRECTORIES, assets

ROUTERS: tuple[APIRouter, ...] = (
    home.router,
    new_search.router,
    lists.router,
    searches.router,
    plans.router,
    compare.router,
    frontier.router,
    runs.router,
    thumbnails.router,
)
"""All of them; the order is that in which addresses are compared."""


def mount_static(app: FastAPI) -> None:
    """Serve the style sheets and scripts of the pages."""
    app.mount("/static", assets_app(STATIC_DIRECTORIES, assets()), name="static")
