"""What the pages of plans show, made once for each: drawing the largest takes longer than reading a page."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from zbv_service.compute.cache import Cache
from zbv_service.plans.plans import Plans, plan_of

if TYPE_CHECKING:
    from zbv_solver.export.report import PlanView

CACHED_VIEWS = 16
CACHED_BYTES = 32 * 1024**2


class PlanPictures:
    """The contents of plans' pages, and what their scripts draw."""

    def __init__(self, plans: Plans):
        self._plans = plans
        self._views: Cache[PlanView] = Cache(CACHED_VIEWS)
        self._actions: Cache[bytes] = Cache(CACHED_VIEWS, CACHED_BYTES, len)

    async def view(self, plan_id: str) -> PlanView:
        """A plan as its page shows it, without links; raises :class:`ProblemError` 404."""

        return await self._views.get(plan_id, lambda: self._plans.compute(view_of, plan_id))

    async def actions(self, plan_id: str) -> bytes:
        """A plan's actions as the script of its page takes them; raises :class:`ProblemError` 404."""

        return await self._actions.get(plan_id, lambda: self._plans.compute(actions_of, plan_id))


def view_of(packed: bytes) -> PlanView:
    """A packed plan as its page shows it; runs in a process of its own, as those below."""
    # Imported here, as below: it takes a second.
    from zbv_solver.export.report import plan_view

    return plan_view(plan_of(packed))


def actions_of(packed: bytes) -> bytes:
    """A packed plan's actions as the script of its page takes them."""
    from zbv_solver.export.timeline import timeline
    from zbv_solver.export.timeline_data import timeline_bytes

    return timeline_bytes(timeline(plan_of(packed)))


def load() -> None:
    """Load what pages are made of, and the machine code of the timing, by making one."""
    from zbv_solver.export.report import plan_view
    from zbv_solver.problem.reading import parse_problem
    from zbv_solver.search.search import baseline_plan

    from zbv_service.plans.thumbnail import thumbnail

    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    plan = baseline_plan("1f1b", parse_problem({"pp_degree": 2, "microbatches": 2, "costs": costs}))
    plan_view(plan)
    thumbnail(plan)
    # What was loaded stays: without this the collector of every forked process goes through all of it.
    gc.collect()
    gc.freeze()
