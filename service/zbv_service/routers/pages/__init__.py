"""The pages for people, and the files they load. What they show is made in :mod:`zbv_service.pages`."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.staticfiles import StaticFiles

from zbv_service.pages.shell import STATIC_DIRECTORIES
from zbv_service.routers.pages import home, plans, searches

ROUTERS: tuple[APIRouter, ...] = (home.router, searches.router, plans.router)
"""All of them; the order is that in which addresses are compared."""


def mount_static(app: FastAPI) -> None:
    """Serve the style sheets and scripts of the pages."""
    for path, directory in STATIC_DIRECTORIES.items():
        app.mount(path, StaticFiles(directory=directory), name=path.removeprefix("/"))
