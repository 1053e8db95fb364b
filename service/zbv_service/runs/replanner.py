"""Compares the measured costs of runs with the planned ones, and searches a better plan if they drift.

A look at a run takes measured costs from its newest traces. If they differ by more than the run's threshold
from the costs of its plan (or of the latest search), the measured problem is searched. When that search has
ended, both plans are evaluated with the measured costs, and the new plan is offered if it is better. The
whole state is in the database, so it survives a crash of the service; a run has at most one open search.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

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
from zbv_service.runs.parts import parse_traces
from zbv_service.searches.searches import Searches

FRESH_STEPS = 3
"""New steps that a look needs, because the median of fewer is unreliable."""
MANY_MICROBATCHES = 1000
"""Fewer steps suffice if they have this many microbatches; traces of such large steps hold fewer steps."""
MOST_DOUBLINGS = 10
"""Each search of a run doubles the steps until its next look, at most this often: measurements are noisy."""
WORTHWHILE = 0.01
"""A plan is offered if its objective is better by at least this share."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredCosts:
    """A plan with measured costs.

    Attributes
    ----------
    objective
        The objective of the plan's orders with these costs.
    change
        The largest relative difference of that objective, or of a stage's cost, from the known costs.
    """

    problem: Problem
    objective: float
    change: float


def measure(plan: Plan, known: Problem, traces: tuple[RankTrace, ...]) -> MeasuredCosts:
    """Compare the costs that traces of a plan show with the known costs; takes a while."""
    problem = refit(plan.problem, traces)
    before, now = evaluate(known, plan), evaluate(problem, plan)
    return MeasuredCosts(problem, now, max(relative_change(before, now), largest_change(known, problem)))


def evaluate(problem: Problem, plan: Plan) -> float:
    """The objective of a plan's orders with the costs of another problem of the same shape."""
    from zbv_solver.timing.start_times import objective_of  # loads numba

    return objective_of(problem, plan.orders)


def _patience(searches: int) -> int:
    """The steps from one look to the next, after this many searches of the run."""
    return int(FRESH_STEPS * 2 ** min(searches, MOST_DOUBLINGS))


def _is_enough(steps: int, microbatches: int) -> bool:
    return steps >= FRESH_STEPS or steps * microbatches >= MANY_MICROBATCHES


def parse_packed_problem(packed: bytes) -> Problem:
    """Parse a packed problem document."""
    return parse_problem(unpack(packed))


class Replanner:
    """Looks at runs; the dispatcher calls it repeatedly."""

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
        self._parts = parts
        self._plans = plans
        self._searches = searches

    async def step(self) -> None:
        """Look at every run with the option ``replan``."""
        for run_id in await self._run_plans.replanned():
            run = await self._runs.brief(run_id)
            if run is None or run.plan_id is None:
                continue
            try:
                await self._look(run, run.plan_id)
            except DatabaseAway:
                raise
            except InvalidInput as error:
                # These traces do not fit the plan; later ones may.
                logger.warning("run %s: its measured costs cannot be used: %s", run.id, error)
            except Exception:
                # One run must not keep the replanner from the others.
                logger.exception("run %s: its measured costs could not be checked", run_id)

    async def _look(self, run: RunRecord, plan_id: str) -> None:
        stored = None if run.replanning is None else Replanning(**run.replanning)
        known = stored or Replanning(plan_id, run.generation, -1)
        if known.plan_id != plan_id:
            # The plan was changed after the latest search, whose result is now outdated.
            known = Replanning(plan_id, run.generation, -1, searches=known.searches)
        if known.is_open and known.search_id is not None:
            await self._judge(run, known, known.search_id)
        elif run.offer is None and run.target_plan_id in (None, plan_id):
            await self._measure(run, stored, known)

    async def _measure(self, run: RunRecord, stored: Replanning | None, known: Replanning) -> None:
        """Look at the newest steps, if there are enough, and search the measured problem if costs drifted."""
        plan = await self._plans.plan(known.plan_id)
        after = known.step if known.generation == run.generation else -1
        traces = await self._fresh_traces(run, plan, after, known.searches)
        if not traces:
            return
        before = plan.problem if known.search_id is None else await self._problem(known.search_id, plan)
        found = await self._computations.run(partial(measure, plan, before), traces)
        looked = replace(known, generation=run.generation, step=max(traces[0].numbers))
        if found.change > run.options["replan_threshold"]:
            packed = await self._runs.search_options(run.id)
            options = {} if packed is None else unpack(packed)
            search = await self._searches.submit({"problem": problem_json(found.problem), "options": options})
            logger.info("run %s: costs differ by %.1f %%", run.id, 100 * found.change)
            looked = replace(looked, search_id=search.id, is_open=True, searches=known.searches + 1)
        await self._run_plans.remember(run.id, stored, looked)

    async def _fresh_traces(
        self, run: RunRecord, plan: Plan, after: int, searches: int
    ) -> tuple[RankTrace, ...]:
        """The first replica's common steps after a given one; empty if there are too few."""
        ranks = range(plan.problem.pp_degree)
        patience = _patience(searches)
        known = await self._parts.first_replica(run.id, run.generation, plan.plan_id)
        if any(known.get(rank, (0, -1))[1] - after < patience for rank in ranks):
            return ()
        parts = await self._parts.read(run.id, run.generation, "trace", [known[rank][0] for rank in ranks])
        traces = await self._computations.run(parse_traces, [part.body for part in parts])
        common = frozenset.intersection(*(trace.numbers for trace in traces))
        fresh = frozenset(step for step in common if step > after)
        has_passed = max(fresh, default=after) - after >= patience
        is_enough = _is_enough(len(fresh), plan.problem.microbatches)
        if {trace.plan_id for trace in traces} != {plan.plan_id} or not (has_passed and is_enough):
            return ()
        return tuple(trace.only(fresh) for trace in traces)

    async def _judge(self, run: RunRecord, known: Replanning, search_id: str) -> None:
        """Offer the plan of a search that has ended, if it is better."""
        search = await self._searches.find(search_id)
        if search is not None and search.state not in FINISHED:
            return
        closed = replace(known, is_open=False)
        # A discarded search has no more to offer than one without a plan.
        if search is not None and search.plan_id is not None and search.plan_id != known.plan_id:
            running, found = await self._plans.plan(known.plan_id), await self._plans.plan(search.plan_id)
            problem = await self._problem(search_id, found)
            now = await self._computations.run(partial(evaluate, problem), running)
            if found.objective <= (1 - WORTHWHILE) * now:
                offer = {
                    "plan_id": search.plan_id,
                    "objective_now": now,
                    "objective_then": found.objective,
                }
                take = run.options["replan"] == "auto"
                await self._run_plans.offer(run.id, known, closed, offer, take=take)
                return
        await self._run_plans.remember(run.id, known, closed)

    async def _problem(self, search_id: str, plan: Plan) -> Problem:
        """The problem of a search; the problem of the plan if the search was discarded."""
        packed = await self._searches.problem(search_id)
        if packed is None:
            return plan.problem
        return await self._computations.run(parse_packed_problem, packed)
