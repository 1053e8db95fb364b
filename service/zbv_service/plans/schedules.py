"""Classical schedules as whole plans, for comparison on pages."""

from __future__ import annotations

from functools import partial

from zbv_solver.plans.plan import plan_json

from zbv_service.compute.cache import Cache
from zbv_service.documents.packing import pack
from zbv_service.documents.problems import require_stages
from zbv_service.plans.plans import CACHED_BYTES, Plans
from zbv_service.plans.renderings import plan_of

CACHED_PLANS = 24


class Schedules:
    """Computes schedules in other processes, and caches them; a large one takes half a second."""

    def __init__(self, plans: Plans):
        self._plans = plans
        self._made: Cache[bytes] = Cache(CACHED_PLANS, CACHED_BYTES, len)

    async def baseline(self, plan_id: str, name: str) -> bytes:
        """The classical schedule with this name for the problem of a stored plan, as a packed plan.

        Raises
        ------
        InvalidInput
            The problem has too many stages.
        ApiError
            404: there is no such plan. 503: too many computations are waiting.
        """
        make = partial(baseline_of, name)
        return await self._made.get(f"{plan_id} {name}", lambda: self._plans.compute(make, plan_id))


def baseline_of(name: str, packed: bytes) -> bytes:
    """A classical schedule of the problem of a packed plan; runs in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.search.assemble import baseline_plan

    problem = plan_of(packed).problem
    require_stages(problem)
    return pack(plan_json(baseline_plan(name, problem)))
