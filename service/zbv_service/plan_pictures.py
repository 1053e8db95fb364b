"""What the pages of plans show, made once for each: drawing the largest takes longer than reading a page."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

from zbv_service.cache import Cache
from zbv_service.plans import Plans

if TYPE_CHECKING:
    from zbv_solver.export.report import PlanView

CACHED_VIEWS = 16
CACHED_ACTIONS = 4
"""Up to 5 MB each."""


class PlanPictures:
    """The contents of plans' pages, and what their scripts draw."""

    def __init__(self, plans: Plans):
        self._plans = plans
        self._loading: asyncio.Task[None] | None = None
        self._views: Cache[PlanView] = Cache(CACHED_VIEWS)
        self._charts: Cache[bytes] = Cache(CACHED_VIEWS)
        self._actions: Cache[bytes] = Cache(CACHED_ACTIONS)

    def start(self) -> None:
        """Load in the background what draws, so that who opens the first page does not wait for it."""
        self._loading = asyncio.create_task(asyncio.to_thread(_load))

    async def stop(self) -> None:
        """Wait for the background."""
        if self._loading is not None:
            await self._loading

    async def view(self, plan_id: str) -> PlanView:
        """A plan as its page shows it, without links; raises :class:`ProblemError` 404."""

        async def make() -> PlanView:
            # Imported here, as below: it takes a second.
            from zbv_solver.export.report import plan_view

            plan = await self._plans.plan(plan_id)
            return await asyncio.to_thread(plan_view, plan)

        return await self._views.get(plan_id, make)

    async def chart(self, plan_id: str) -> bytes:
        """What the script of a plan's page draws with, as JSON text; raises :class:`ProblemError` 404."""

        async def make() -> bytes:
            from zbv_solver.export.report import chart_document

            # Asked for at the same moment, but the reader sees the picture first: it has Python to itself.
            await self._plans.thumbnail(plan_id)
            plan = await self._plans.plan(plan_id)
            return await asyncio.to_thread(lambda: json.dumps(chart_document(plan)).encode())

        return await self._charts.get(plan_id, make)

    async def actions(self, plan_id: str) -> bytes:
        """A plan's actions as the script of its page takes them; raises :class:`ProblemError` 404."""

        async def make() -> bytes:
            from zbv_solver.export.timeline import timeline
            from zbv_solver.export.timeline_data import timeline_bytes

            plan = await self._plans.plan(plan_id)
            return await asyncio.to_thread(lambda: timeline_bytes(timeline(plan)))

        return await self._actions.get(plan_id, make)


def _load() -> None:
    """Bokeh, its models' definitions, and the machine code of the timing: drawing once loads all of it."""
    from zbv_solver.export.report import chart_document, plan_view
    from zbv_solver.export.thumbnail import thumbnail
    from zbv_solver.schema import parse_problem
    from zbv_solver.search import baseline_plan

    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    plan = baseline_plan("1f1b", parse_problem({"pp_degree": 2, "microbatches": 2, "costs": costs}))
    plan_view(plan)
    thumbnail(plan)
    chart_document(plan)
    # What was loaded stays: without this the collector goes through all of it, a quarter of a second, while
    # somebody waits for a page.
    gc.collect()
    gc.freeze()
