"""Looks at what runs measure, and has a better plan searched where costs are not as planned.

One look at a run: its newest traces give measured costs; where they differ from those that its plan was
made for (or was last searched anew for) by more than the run's threshold, the measured problem is searched.
When that search has ended, its plan is held against the running one, both under the measured costs, and
offered if it is better. All that is remembered is in the database, so a service that dies takes no look
along; and a run has one open search at most.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace
from zbv_solver.measure.refit import largest_change, refit, relative_change
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json

from zbv_service.compute.computations import Computations
from zbv_service.database import DatabaseAway, PartTable, RunPlanTable, RunTable
from zbv_service.documents.packing import unpack
from zbv_service.plans.plans import Plans
from zbv_service.records.runs import Replanning, RunRecord
from zbv_service.records.searches import FINISHED
from zbv_service.runs.parts import RunParts
from zbv_service.searches.searches import Searches

FRESH_STEPS = 3
"""Steps since the last look that a new one needs: a median of fewer is an accident …"""
MOST_PATIENCE = 10
"""Every search of a run doubles the steps until its next look, at most so often: measuring is noisy."""
MANY_MICROBATCHES = 1000
"""… unless they are so large; traces of such steps hold fewer of them."""
WORTHWHILE = 0.01
"""By which share a plan must be better to be offered."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredCosts:
    """A plan under measured costs.

    Attributes
    ----------
    objective
        Of the plan's orders under these costs.
    change
        The largest relative difference, of that objective or of a stage's cost, from what was known before.
    """

    problem: Problem
    objective: float
    change: float


def measure(plan: Plan, known: Problem, traces: tuple[RankTrace, ...]) -> MeasuredCosts:
    """A plan under the costs of its traces, held against the costs that are known; takes a while."""
    problem = refit(plan.problem, traces)
    before, now = objective_of(known, plan), objective_of(problem, plan)
    return MeasuredCosts(problem, now, max(relative_change(before, now), largest_change(known, problem)))


def _patience(searches: int) -> int:
    """How many steps must have passed since the last look."""
    return int(FRESH_STEPS * 2 ** min(searches, MOST_PATIENCE))


def _is_enough(steps: int, microbatches: int) -> bool:
    return steps >= FRESH_STEPS or steps * microbatches >= MANY_MICROBATCHES


def objective_of(problem: Problem, plan: Plan) -> float:
    """What a plan's orders achieve under the costs of another problem of its shape."""
    # Imported here: it compiles, or loads, machine code.
    from zbv_solver.timing.start_times import evaluate

    timing = evaluate(problem, plan.orders)
    return timing.span if problem.objective == "span" else timing.makespan


def parse_packed_problem(packed: bytes) -> Problem:
    """The problem of a packed document."""
    return parse_problem(unpack(packed))


class Replanner:
    """Carries out looks; called over and over by the dispatcher."""

    def __init__(
        self,
        runs: RunTable,
        run_plans: RunPlanTable,
        parts: PartTable,
        plans: Plans,
        searches: Searches,
        computations: Computations,
    ):
        self._computations = computations
        self._runs = runs
        self._run_plans = run_plans
        self._part_table = parts
        self._parts = RunParts(parts, computations)
        self._plans = plans
        self._searches = searches

    async def step(self) -> None:
        """Look at every run that asks for it."""
        for run_id in await self._run_plans.replanned():
            run = await self._runs.brief(run_id)
            if run is None or run.plan_id is None:
                continue
            try:
                await self._look(run, run.plan_id)
            except DatabaseAway:
                raise
            except Exception:
                # The other runs are looked at all the same.
                logger.exception("run %s: its measured costs could not be looked at", run_id)

    async def _look(self, run: RunRecord, plan_id: str) -> None:
        known = None if run.replanning is None else Replanning(**run.replanning)
        if known is not None and known.plan_id != plan_id:
            # Whatever was searched for a former plan, this one is newer.
            known = Replanning(plan_id, run.generation, -1, searches=known.searches)
        if known is not None and known.is_open and known.search_id is not None:
            await self._judge(run, known, known.search_id)
        elif run.offer is None and run.target_plan_id in (None, plan_id):
            try:
                await self._measure(run, plan_id, known)
            except InvalidInput as error:
                # Of traces that do not fit the plan; others will follow.
                logger.warning("run %s: its traces cannot be used: %s", run.id, error)

    async def _measure(self, run: RunRecord, plan_id: str, known: Replanning | None) -> None:
        """Look at the newest steps, if there are enough, and search the problem that they show if need be."""
        plan = await self._plans.plan(plan_id)
        known = known or Replanning(plan_id, run.generation, -1)
        after = known.step if known.generation == run.generation else -1
        traces = await self._fresh_traces(run, plan, after, known.searches)
        if not traces:
            return
        searched = known.search_id
        before = plan.problem if searched is None else await self._problem(searched, plan)
        found = await self._computations.run(partial(measure, plan, before), traces)
        looked = replace(known, generation=run.generation, step=max(traces[0].numbers))
        if found.change > run.options["replan_threshold"]:
            options = run.search_options or {}
            search = await self._searches.submit({"problem": problem_json(found.problem), "options": options})
            logger.info("run %s: costs differ by %.1f %%", run.id, 100 * found.change)
            looked = replace(looked, search_id=search.id, is_open=True, searches=known.searches + 1)
        stored = None if run.replanning is None else Replanning(**run.replanning)
        await self._run_plans.remember(run.id, stored, looked)

    async def _fresh_traces(
        self, run: RunRecord, plan: Plan, after: int, searches: int
    ) -> tuple[RankTrace, ...]:
        """The first replica's newest common steps after one, of this plan; nothing unless they are enough."""
        p, patience = plan.problem.pp_degree, _patience(searches)
        known = await self._part_table.first_replica(run.id, run.generation, plan.plan_id)
        if any(known.get(place, (0, -1))[1] - after < patience for place in range(p)):
            return ()
        ranks = [known[place][0] for place in range(p)]
        traces = await self._parts.traces(run.id, run.generation, ranks)
        common = frozenset.intersection(*(trace.numbers for trace in traces))
        fresh = frozenset(step for step in common if step > after)
        is_one_plan = {trace.plan_id for trace in traces} == {plan.plan_id}
        if not is_one_plan or max(fresh, default=after) - after < patience:
            return ()
        if not _is_enough(len(fresh), plan.problem.microbatches):
            return ()
        return tuple(trace.only(fresh) for trace in traces)

    async def _judge(self, run: RunRecord, known: Replanning, search_id: str) -> None:
        """Offer what a search has found, once it has ended, if it is better."""
        search = await self._searches.find(search_id)
        if search is not None and search.state not in FINISHED:
            return
        closed = replace(known, is_open=False)
        # A search that was discarded has as much to offer as one that found nothing.
        if search is None or search.plan_id is None or search.plan_id == known.plan_id:
            await self._run_plans.remember(run.id, known, closed)
            return
        problem = await self._problem(search_id, await self._plans.plan(search.plan_id))
        running, found = await self._plans.plan(known.plan_id), await self._plans.plan(search.plan_id)
        now = await self._computations.run(partial(objective_of, problem), running)
        then = found.objective
        if then > (1 - WORTHWHILE) * now:
            await self._run_plans.remember(run.id, known, closed)
            return
        offer: dict[str, Any] = {"plan_id": search.plan_id, "objective_now": now, "objective_then": then}
        take = run.options["replan"] == "auto"
        await self._run_plans.offer(run.id, known, closed, offer, take=take)

    async def _problem(self, search_id: str, plan: Plan) -> Problem:
        """The problem of a search; of one that was discarded, that of a plan."""
        packed = await self._searches.problem(search_id)
        if packed is None:
            return plan.problem
        return await self._computations.run(parse_packed_problem, packed)
