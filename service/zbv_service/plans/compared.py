"""Comparisons of a plan with classical schedules of its problem and with other stored plans."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import plan_json

from zbv_service.compute.waiting import Cache, wait_a_while
from zbv_service.documents.problems import pack, require_stages
from zbv_service.errors import ApiError
from zbv_service.plans.plans import CACHED_BYTES, Plans
from zbv_service.plans.renderings import PlanFacts, plan_of
from zbv_service.records.lists import PlanListQuery
from zbv_service.records.plans import PlanSummaryDocument

CACHED_SCHEDULES = 24


USUAL = ("1f1b", "interleaved-1f1b", "zb-h1")
"""The default schedules for a comparison."""
MOST = 12
"""Largest number of schedules in a comparison, besides the plan itself."""
PATIENCE_SECONDS = 2.0
"""How long a page waits for schedules; it loads again for those that take longer."""
OFFERED = 60
"""Number of stored plans to choose from."""


@dataclass(frozen=True, eq=False)
class ComparedPlan:
    """One of the schedules that a plan is compared with."""

    name: str
    """The name of a classical schedule, or the id of a stored plan."""
    is_baseline: bool
    packed: bytes | None
    """The plan; None while it is computed, or if ``complaint`` says why there is none."""
    complaint: str = ""

    @property
    def is_awaited(self) -> bool:
        """Whether the schedule is still being computed."""
        return self.packed is None and not self.complaint


class ComparedPlans:
    """Finds the stored plans and computes the schedules for comparisons."""

    def __init__(self, plans: Plans):
        self._plans = plans
        # A large schedule takes half a second.
        self._made: Cache[bytes] = Cache(CACHED_SCHEDULES, CACHED_BYTES, len)

    async def of(self, plan: PlanFacts, names: Sequence[str]) -> tuple[ComparedPlan, ...]:
        """The named schedules, in this order and without repetitions; waits for those that take long."""
        wanted = [name for name in dict.fromkeys(names) if name != plan.plan_id]
        tasks = {name: asyncio.ensure_future(self._one(plan, name)) for name in wanted[:MOST]}
        await wait_a_while(tasks.values(), PATIENCE_SECONDS)
        baselines = plan.schedules
        too_many = f"a plan is compared with at most {MOST} schedules at once; leave some out."
        found = []
        for name in wanted:
            if name not in tasks:
                found.append(ComparedPlan(name, name in baselines, None, too_many))
            elif tasks[name].done():
                found.append(tasks[name].result())
            else:  # it continues, and is ready when the page is loaded again
                found.append(ComparedPlan(name, name in baselines, None))
        return tuple(found)

    async def baseline(self, plan: PlanFacts, name: str) -> bytes | None:
        """A classical schedule of a plan's problem, packed; None if no schedule has this name."""
        return await self._schedule(plan.plan_id, name) if name in plan.schedules else None

    async def offered(self, plan: PlanFacts) -> tuple[list[PlanSummaryDocument], list[PlanSummaryDocument]]:
        """Stored plans to choose from, newest first: plans of the same shape, and others."""
        shape = PlanListQuery(pp_degree=plan.pp_degree, microbatches=plan.microbatches, limit=OFFERED)
        alike = (await self._plans.page(shape)).items
        known = {plan.plan_id, *(each.plan_id for each in alike)}
        others = await self._plans.newest(OFFERED)
        return (
            [each for each in alike if each.plan_id != plan.plan_id],
            [each for each in others if each.plan_id not in known],
        )

    async def _schedule(self, plan_id: str, name: str) -> bytes:
        make = partial(baseline_of, name)
        return await self._made.get(f"{plan_id} {name}", lambda: self._plans.compute(make, plan_id))

    async def _one(self, plan: PlanFacts, name: str) -> ComparedPlan:
        is_baseline = name in plan.schedules
        mine = theirs = plan.units.time
        try:
            if is_baseline:
                packed = await self._schedule(plan.plan_id, name)
            else:
                theirs = (await self._plans.facts(name)).units.time
                packed = await self._plans.packed(name)
        except ApiError as error:
            return ComparedPlan(name, is_baseline, None, error.detail)
        except InvalidInput as error:
            return ComparedPlan(name, is_baseline, None, error.issues[0].detail)
        if mine != theirs:
            complaint = (
                f"its times are in {theirs or 'no unit'}, those of this plan in {mine or 'no unit'}, so they "
                f"cannot share an axis."
            )
            return ComparedPlan(name, is_baseline, None, complaint)
        return ComparedPlan(name, is_baseline, packed)


def baseline_of(name: str, packed: bytes) -> bytes:
    """A classical schedule of the problem of a packed plan; runs in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.search.assemble import baseline_plan

    problem = plan_of(packed).problem
    require_stages(problem)
    return pack(plan_json(baseline_plan(name, problem)))
