"""Compares the measured costs of runs with the planned ones, and searches a better plan if they drift.

A look at a run takes measured costs from its newest traces. If they differ by more than the run's threshold
from the costs of its plan (or of the latest search), the measured problem is searched. When that search has
ended, both plans are evaluated with the measured costs, and the new plan is offered if it is better. The
whole state is in the database, so it survives a crash of the service; a run has at most one open search.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
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
from zbv_service.documents.problems import new_search, unpack
from zbv_service.plans.plans import Plans
from zbv_service.plans.renderings import plan_of
from zbv_service.records.runs import OfferDocument, Replanning, RunDocument
from zbv_service.records.searches import FINISHED, NewSearch
from zbv_service.runs.parts import parse_traces
from zbv_service.searches.searches import Searches
from zbv_service.settings import Settings

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
    """A plan with measured costs."""

    problem: Problem
    objective: float
    """The objective of the plan's orders with these costs."""
    change: float
    """The largest relative difference of that objective, or of a stage's cost, from the known costs."""


@dataclass(frozen=True)
class Look:
    """What a look at a run compares, in packed form."""

    plan: bytes
    known: bytes | None
    options: bytes | None
    """The plan, the problem with the known costs, and the options of the run's searches; the plan's own
    problem and the defaults if they are None."""
    traces: list[bytes]
    """Of the first replica, by pipeline rank."""
    after: int
    patience: int
    """Only steps after this one count, and the newest must be so many steps later."""
    threshold: float
    """The relative change from which on the measured problem is searched."""


@dataclass(frozen=True)
class Seen:
    """What a look has found: its newest step, the change, and the search of the measured problem, if any."""

    step: int
    change: float
    search: NewSearch | None


def measure(plan: Plan, known: Problem, traces: tuple[RankTrace, ...]) -> MeasuredCosts:
    """Compare the costs that traces of a plan show with the known costs; takes a while."""
    problem = refit(plan.problem, traces, plan.orders)
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


def look_at(settings: Settings, asked: Look) -> Seen | None:
    """Measure the costs in the newest common steps, if there are enough; runs in another process."""
    plan, traces = plan_of(asked.plan), parse_traces(asked.traces)
    fresh = frozenset(
        step for step in frozenset.intersection(*(each.numbers for each in traces)) if step > asked.after
    )
    has_passed = max(fresh, default=asked.after) - asked.after >= asked.patience
    is_enough = _is_enough(len(fresh), plan.problem.microbatches)
    if {trace.plan_id for trace in traces} != {plan.plan_id} or not (has_passed and is_enough):
        return None
    known = plan.problem if asked.known is None else parse_problem(unpack(asked.known))
    found = measure(plan, known, tuple(trace.only(fresh) for trace in traces))
    search = None
    if found.change > asked.threshold:
        options = {} if asked.options is None else unpack(asked.options)
        search = new_search(settings, {"problem": problem_json(found.problem), "options": options})
    return Seen(max(fresh), found.change, search)


def objective_with(asked: tuple[bytes | None, bytes, bytes]) -> float:
    """The objective of a running plan with measured costs; runs in another process.

    Parameters
    ----------
    asked
        Packed: the measured problem (None: that of the found plan), the found plan, and the running one.
    """
    measured, found, running = asked
    problem = plan_of(found).problem if measured is None else parse_problem(unpack(measured))
    return evaluate(problem, plan_of(running))


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
        settings: Settings,
    ):
        self._computations = computations
        self._runs = runs
        self._run_plans = run_plans
        self._parts = parts
        self._plans = plans
        self._searches = searches
        self._settings = settings

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

    async def _look(self, run: RunDocument, plan_id: str) -> None:
        stored = None if run.replanning is None else Replanning(**run.replanning)
        known = stored or Replanning(plan_id=plan_id, generation=run.generation, step=-1)
        if known.plan_id != plan_id:
            # The plan was changed after the latest search, whose result is now outdated.
            known = Replanning(plan_id=plan_id, generation=run.generation, step=-1, searches=known.searches)
        if known.is_open and known.search_id is not None:
            await self._judge(run, known, known.search_id)
        elif run.offer is None and run.target_plan_id in (None, plan_id):
            await self._measure(run, stored, known)

    async def _measure(self, run: RunDocument, stored: Replanning | None, known: Replanning) -> None:
        """Look at the newest steps, if there are enough, and search the measured problem if costs drifted."""
        after = known.step if known.generation == run.generation else -1
        patience, facts = _patience(known.searches), await self._plans.facts(known.plan_id)
        newest = await self._parts.first_replica(run.id, run.generation, known.plan_id)
        ranks = range(facts.pp_degree)
        if any(newest.get(rank, (0, -1))[1] - after < patience for rank in ranks):
            return
        sent = [newest[rank][0] for rank in ranks]
        parts = await self._parts.read(run.id, run.generation, "trace", sent)
        asked = Look(
            plan=await self._plans.packed(known.plan_id),
            known=None if known.search_id is None else await self._searches.problem(known.search_id),
            options=await self._runs.search_options(run.id),
            traces=[part.body for part in parts],
            after=after,
            patience=patience,
            threshold=run.options.replan_threshold,
        )
        seen = await self._computations.run(partial(look_at, self._settings), asked)
        if seen is None:
            return
        looked = known.model_copy(update={"generation": run.generation, "step": seen.step})
        if seen.search is not None:
            search = await self._searches.submit_read(seen.search)
            logger.info("run %s: costs differ by %.1f %%", run.id, 100 * seen.change)
            opened = {"search_id": search.id, "is_open": True, "searches": known.searches + 1}
            looked = looked.model_copy(update=opened)
        await self._run_plans.remember(run.id, stored, looked)

    async def _judge(self, run: RunDocument, known: Replanning, search_id: str) -> None:
        """Offer the plan of a search that has ended, if it is better."""
        search = await self._searches.find(search_id)
        if search is not None and search.state not in FINISHED:
            return
        closed = known.model_copy(update={"is_open": False})
        # A discarded search has no more to offer than one without a plan.
        if search is not None and search.plan_id is not None and search.plan_id != known.plan_id:
            then = (await self._plans.facts(search.plan_id)).value
            measured = await self._searches.problem(search_id)
            found = await self._plans.packed(search.plan_id)
            running = await self._plans.packed(known.plan_id)
            now = await self._computations.run(objective_with, (measured, found, running))
            if then <= (1 - WORTHWHILE) * now:
                offer = OfferDocument(plan_id=search.plan_id, objective_now=now, objective_then=then)
                take = run.options.replan == "auto"
                await self._run_plans.offer(run.id, known, closed, offer, take=take)
                return
        await self._run_plans.remember(run.id, known, closed)
