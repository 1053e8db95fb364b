"""The service's HTML pages.

A module here is a page: its routes, which fetch data, and what it shows. A template of the same name in
``templates/`` writes it; what only the service's own pages load is in ``static/``. The plan's page is the
solver's, which also writes it as one file (:mod:`zbv_solver.export.report`): its style sheet and script are
shared by all pages.
"""

from __future__ import annotations

from fastapi import APIRouter

from zbv_service.pages import (
    api,
    compare,
    errors,
    frontier,
    home,
    layout_search,
    layouts,
    lists,
    measured,
    new_search,
    plan,
    run,
    search,
    sign_in,
)

ROUTERS: tuple[APIRouter, ...] = (
    home.router,
    new_search.router,
    lists.router,
    layouts.router,
    layout_search.router,
    search.router,
    plan.router,
    compare.router,
    frontier.router,
    run.router,
    measured.router,
    api.router,
    errors.router,
    sign_in.router,
)
"""The routers of all pages, in the order in which addresses are compared."""
