"""From layers to a verified plan: placement, cut and order are chosen together.

Cuts on every placement are estimated and improved (:mod:`zbv_solver.partition.joint_search`). The full
search then runs on the most promising cut, and on every other finalist that its lower bound does not rule
out. GPipe's histogram cut is always a finalist, so the plan is never worse than a plan of that cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.baselines import without_limit
from zbv_solver.errors import ContradictedBound, InfeasibleMemory
from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables, ScoredCut
from zbv_solver.partition.first_cuts import (
    EVEN,
    HISTOGRAM,
    even_cut,
    fitting_starts,
    histogram_cut,
    level_cut,
    roomy_cuts,
)
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.joint_search import Judge, improve_cut
from zbv_solver.partition.least_memory import least_memory_cut
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Baseline, CutCertificate, Plan, certify, verdict
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import PLACEMENT_KINDS, Placement
from zbv_solver.problem.writing import layered_json
from zbv_solver.search.assemble import OwnUnit, compare
from zbv_solver.search.incumbent import Cancelled, OnProgress, Progress
from zbv_solver.search.options import PHASES, SearchOptions
from zbv_solver.search.run import Search

JUDGED = {"quick": 1_500_000, "standard": 15_000_000, "thorough": 150_000_000}
"""Actions that may be placed to estimate cuts, on all placements together."""
FINALISTS = {"quick": 3, "standard": 4, "thorough": 6}
"""Cuts that the full search may run on."""
JUDGE_SHARE, SEARCH_SHARE = 0.25, 0.85
"""Shares of a time limit at which estimating cuts and searching finalists end; the rest is for baselines."""
LEAST_SECONDS = 0.01
Starts = dict[str, Cut]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A cut on a placement, as a problem."""

    name: str
    judged: float
    problem: Problem


def plan_layers(
    problem: LayeredProblem,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | Plan | None = None,
) -> Plan:
    """Cut the model, place and order its stages, prove a bound over all cuts, and verify the plan.

    Parameters
    ----------
    on_progress, cancelled
        As in :func:`zbv_solver.search.run.search`; every report has the problem of its orders.
    incumbent
        A plan of the same layers to start from.

    Raises
    ------
    InfeasibleMemory
        When no cut has a plan that fits the memory limit.
    InvalidPlan
        When the incumbent is not a plan of these layers, or its orders break a rule.
    ContradictedBound
        When a plan undercuts a bound.
    """
    if isinstance(incumbent, Orders):
        raise TypeError("for layers the incumbent must be a Plan: orders alone do not define the cut.")
    if _needs_copies(problem):
        # Loading the kernels for copies takes a moment.
        from zbv_solver.search.layered_copies import ALONE_SHARE, plan_with_copies

        chosen = options or SearchOptions()
        limit = chosen.time_limit
        alone, rest = (
            replace(chosen, time_limit=None if limit is None else share * limit)
            for share in (ALONE_SHARE, 1 - 2 * ALONE_SHARE)
        )
        return plan_with_copies(
            problem,
            bound_over_all_cuts(problem),
            _quick_planner(cancelled, chosen.workers),
            lambda layers: plan_layers(layers, replace(alone, effort="quick"), None, cancelled),
            rest,
            on_progress,
            cancelled,
            incumbent,
        )
    own = OwnUnit.of(problem)
    start = None if incumbent is None else own.incumbent(incumbent)
    report = None if on_progress is None else lambda progress: on_progress(own.progress(progress))
    try:
        plan = _LayersSearch(own.problem, options or SearchOptions(), report, cancelled).run(start)
        plan = own.plan(plan)
    except ContradictedBound as error:
        objective, bound = error.objective * own.length, error.bound * own.length
        raise ContradictedBound(layered_json(problem), objective, bound, error.source) from None
    # In the caller's unit, as everywhere else, so that the same problem has the same baselines.
    return replace(plan, baselines=(*compare(plan.problem), *plan.baselines))


def first_plan(
    problem: LayeredProblem,
    cancelled: Cancelled | None = None,
    workers: int = 1,
    useless: float = np.inf,
    *,
    is_exhaustive: bool = True,
) -> Plan:
    """A verified plan in less than a second, to compare many problems: orders are constructed for the best of
    the first cuts; cuts are not improved, and baselines are left out.

    Parameters
    ----------
    useless
        An objective from which on no plan is of use: cuts whose plans cannot be better are left out, except
        for the first.
    is_exhaustive
        Whether cuts are sought exhaustively if none of the first ones fits.

    Raises
    ------
    InfeasibleMemory
        No cut has a plan that fits the memory limit.
    """
    if _needs_copies(problem):
        from zbv_solver.search.layered_copies import plan_with_copies

        relaxed = problem.relaxed
        bound = least_worst_load(relaxed, CutTables.of(relaxed)) * problem.microbatches
        quickly = _quick_planner(cancelled, workers, useless)
        return plan_with_copies(problem, bound, quickly, quickly, cancelled=cancelled, useless=useless)
    own = OwnUnit.of(problem)
    options = SearchOptions("quick", without=PHASES, workers=workers)
    search = _LayersSearch(own.problem, options, None, cancelled, is_first=True)
    search.useless, search.is_exhaustive = useless / own.length, is_exhaustive
    return own.plan(search.run(None))


def bound_over_all_cuts(problem: LayeredProblem) -> float:
    """A lower bound on the objective of every plan of every cut, on all placements that the problem allows.

    Raises
    ------
    InfeasibleMemory
        When no cut has a plan that fits the memory limit.
    """
    own = OwnUnit.of(problem)
    search = _LayersSearch(own.problem, SearchOptions(), None, None)
    search.feasible()
    return min(search.floors.values()) * own.length


def _needs_copies(problem: LayeredProblem) -> bool:
    """Whether memory is limited and may be copied to the host."""
    return problem.host is not None and problem.limit is not None


def _quick_planner(
    cancelled: Cancelled | None, workers: int, useless: float = np.inf
) -> Callable[[LayeredProblem], Plan]:
    """First plans of layers without copies, as :func:`first_plan`, of cuts that fit without much search."""

    def plan(layers: LayeredProblem) -> Plan:
        return first_plan(layers, cancelled, workers, useless, is_exhaustive=False)

    return plan


class _LayersSearch:
    def __init__(
        self,
        problem: LayeredProblem,
        options: SearchOptions,
        on_progress: OnProgress | None,
        cancelled: Cancelled | None,
        *,
        is_first: bool = False,
    ):
        self.problem, self.options, self.is_first = problem, options, is_first
        self.on_progress, self.cancelled = on_progress, cancelled
        self.began = time.monotonic()
        # Bounds over all cuts must hold for plans with pairs and copies.
        relaxed = problem.relaxed
        tables = CutTables.of(relaxed)
        self.spaces = [CutSpace(relaxed, placement, tables) for placement in problem.placements]
        self.least = least_worst_load(relaxed, tables)
        self.floors: dict[Placement, float] = {}
        self.best: Plan | None = None
        self.useless = np.inf
        """An objective from which on no plan is of use."""
        self.is_exhaustive = True
        """Whether cuts are sought exhaustively if none of the first ones fits."""
        self.method = "resumed"
        self.is_late = False
        """Whether the time limit has ended a part of the search."""
        self.reported = np.inf

    def feasible(self) -> list[tuple[CutSpace, Starts]]:
        """First cuts on every placement with a cut that fits; also computes the bounds over all cuts."""
        starts = self._in_threads(self.spaces, lambda space: (space, self._starts(space, level_cut(space))))
        return [(space, found) for space, found in starts if found] or self._hard_starts()

    def _in_threads(self, items: Iterable[S], function: Callable[[S], T]) -> list[T]:
        """Call a function for every item; kernels run without the GIL."""
        with ThreadPoolExecutor(self.options.workers) as threads:
            return list(threads.map(function, items))

    def run(self, incumbent: Plan | None) -> Plan:
        self.best = incumbent
        feasible = self.feasible()
        if incumbent is None:
            self._begin(*feasible[0])
        entrants = self._entrants(feasible)
        if incumbent is not None:
            entrants.insert(0, _Entrant("resumed", incumbent.objective, incumbent.problem))
        self._search(entrants)
        return self._finish(entrants)

    def _starts(self, space: CutSpace, level: Boundaries) -> Starts:
        """First cuts that fit, by name; also stores the lower bound over all cuts on the placement."""
        found, worst = fitting_starts(space, level, self.options.seed)
        if worst is not None:
            self.floors[space.placement] = max(self.least, worst) * self.problem.microbatches
        return found

    def _hard_starts(self) -> list[tuple[CutSpace, Starts]]:
        """First cuts that need an exhaustive search to fit; raises :class:`InfeasibleMemory` without any."""
        limit, found = self.options.time_limit, []
        if not self.is_exhaustive:
            limits = self.problem.limit or ()
            raise InfeasibleMemory(limits, limits, of_cut=True, is_proved=False)
        for space in self.spaces:
            seconds = None if limit is None else JUDGE_SHARE * limit / len(self.spaces)
            least = least_memory_cut(
                space,
                level_cut(space),
                enough=0.0,
                seed=self.options.seed,
                seconds=seconds,
                cancelled=self.cancelled,
            )
            found.append((space, least))
        fits = [
            (space, self._starts(space, space.bounds_of(least.cut)))
            for space, least in found
            if least.value <= 0
        ]
        if fits:
            return fits
        space, best = min(found, key=lambda each: each[1].value)
        problem = self.problem.cut_into(space.placement, best.cut)
        raise InfeasibleMemory(
            problem.smallest_limit,
            problem.memory.limit or (),
            of_cut=True,
            is_proved=all(least.bound > 0 for _, least in found),
            unit=problem.units.memory,
            has_copies=problem.copies is not None,
        )

    def _begin(self, space: CutSpace, starts: Starts) -> None:
        """Find a first plan quickly, because estimating cuts takes a while."""
        name, cut = next(iter(starts.items()))
        problem = self.problem.cut_into(space.placement, cut)
        options = replace(self._limited(JUDGE_SHARE), effort="quick", without=PHASES)
        search = Search(problem, options, self._report, self.cancelled)
        search.run()
        self.best, self.method = search.plan(), name

    def _entrants(self, feasible: list[tuple[CutSpace, Starts]]) -> list[_Entrant]:
        """The candidates for the full search, the most promising first."""
        judges = [Judge(space) for space, _ in feasible]

        def estimates(number: int) -> list[ScoredCut]:
            cuts = self._judged(*feasible[number])
            judge = judges[number]
            return [
                ScoredCut(cut, judge.value(cut), name=name)
                for name, cut in cuts
                if judge.floor(cut) < self.useless
            ]

        judged = self._in_threads(range(len(judges)), estimates)
        lowest = min((each.value for candidates in judged for each in candidates), default=np.inf)
        climbing = [
            number for number, (space, _) in enumerate(feasible) if self.floors[space.placement] < lowest
        ]
        for number in () if self.is_first else climbing:
            placements = JUDGED[self.options.effort] // len(climbing)
            start = min(judged[number], key=lambda candidate: candidate.value)
            moved = improve_cut(
                judges[number], start, placements, self.options.seed, lambda: self._is_over(JUDGE_SHARE)
            )
            if moved is not start:
                judged[number].append(moved)
        entrants: dict[tuple[Placement, Cut], _Entrant] = {}
        for (space, _), candidates in zip(feasible, judged, strict=True):
            for each in sorted(candidates, key=lambda candidate: candidate.value):
                key = space.placement, each.cut
                if key not in entrants or each.name == HISTOGRAM:
                    problem = self.problem.cut_into(*key)
                    entrants[key] = _Entrant(each.name, each.value, problem)
        return sorted(entrants.values(), key=lambda entrant: entrant.judged)

    def _judged(self, space: CutSpace, found: Starts) -> Iterator[tuple[str, Cut]]:
        """The cuts to estimate on a placement: some that just fit, and some that have spare memory."""
        yield from found.items()
        start = space.bounds_of(next(iter(found.values())))
        least = self.floors[space.placement] / self.problem.microbatches
        for cut in roomy_cuts(space, start, least):
            if self._is_over(JUDGE_SHARE):
                return
            yield "roomy", cut

    def _search(self, entrants: list[_Entrant]) -> None:
        """Run the full search on the finalists, except those that cannot be better."""
        most = FINALISTS[self.options.effort]
        histograms = [entrant for entrant in entrants[most:] if entrant.name == HISTOGRAM]
        finalists = [*entrants[:most], *histograms]
        for number, entrant in enumerate(finalists):
            best, problem = self.best, entrant.problem
            bound: BoundEffort = "quick" if self.is_first else "full"
            if best is not None and (
                self._is_over(SEARCH_SHARE)
                or lower_bound(problem, bound).value >= min(best.objective * (1 - OPTIMAL_GAP), self.useless)
            ):
                continue
            share = (SEARCH_SHARE - self._spent()) / (len(finalists) - number)
            search = Search(problem, self._limited(share), self._report, self.cancelled)
            if best is not None and best.problem == problem:
                search.resume_from(best.orders)
            if self.is_first:
                plan = search.first_plan(np.inf if best is None else best.objective)
            else:
                search.run()
                plan = search.plan()
            self._accept(entrant.name, plan)

    def _accept(self, name: str, plan: Plan) -> None:
        """Keep a plan if it is the best, or equal and of the same cut: it has a better bound."""
        best = self.best
        if (
            best is None
            or plan.objective < best.objective * (1 - OPTIMAL_GAP)
            or (
                plan.problem == best.problem
                and plan.objective <= best.objective
                and plan.metrics.lower_bound >= best.metrics.lower_bound
            )
        ):
            self.best, self.method = plan, name

    def _limited(self, share: float) -> SearchOptions:
        """The options with a share of the time limit, if there is one."""
        limit = self.options.time_limit
        if limit is None:
            return self.options
        return replace(self.options, time_limit=max(LEAST_SECONDS, share * limit))

    def _spent(self) -> float:
        """Elapsed share of the time limit; 0 without one."""
        limit = self.options.time_limit
        return 0.0 if limit is None else (time.monotonic() - self.began) / limit

    def _finish(self, entrants: list[_Entrant]) -> Plan:
        if self.best is None:
            raise RuntimeError("no cut was searched; this is a bug in zbv, please report it.")
        is_cancelled = self.cancelled is not None and self.cancelled()
        # After a cancellation the caller waits for the plan, and baselines would take more searches.
        others = () if is_cancelled or self.is_first else tuple(self._other_cuts(entrants))
        best = self.best
        certificate = certify(self.problem, best.objective, min(self.floors.values()), "cuts")
        extra = {**best.provenance.extra, "effort": self.options.effort}
        if not self.options.without:
            extra.pop("without", None)
        if is_cancelled or self.is_late:
            extra["cut"] = "cancelled" if is_cancelled else "time limit"
        provenance = replace(best.provenance, seconds=time.monotonic() - self.began, extra=extra)
        return replace(
            best,
            baselines=others,
            cut=CutCertificate(self.method, certificate.lower_bound, certificate.gap),
            provenance=provenance,
        )

    def _other_cuts(self, entrants: list[_Entrant]) -> Iterator[Baseline]:
        """Baselines: the simple cuts on the plan's placement, and the best cut of every other placement."""
        if self.best is None:
            return
        chosen = self.best.problem.placement
        space = next(space for space in self.spaces if space.placement == chosen)
        others = {each.problem.placement: each for each in reversed(entrants)}
        others.pop(chosen, None)
        share = (1 - SEARCH_SHARE) / (2 + len(others))
        for name, bounds in ((EVEN, even_cut(space)), (HISTOGRAM, histogram_cut(space))):
            cut = space.fitting(bounds) or space.cut(bounds, (False,) * space.n_stages)
            yield self._baseline(name, self.problem.cut_into(chosen, cut), share)
        for placement in sorted(others, key=lambda each: (PLACEMENT_KINDS.index(each.kind), each.chunks)):
            name = placement.name
            yield self._baseline(name, others[placement].problem, share)

    def _baseline(self, name: str, problem: Problem, share: float) -> Baseline:
        """The result of a quick search for another cut, without the memory limit if the cut does not fit."""
        fits = True
        try:
            problem.require_feasible()
        except InfeasibleMemory:
            fits, problem = False, without_limit(problem)
        options = replace(self._limited(share), effort="quick")
        search = Search(problem, options, None, self.cancelled)
        search.run()
        plan = search.plan()
        if fits:
            self._accept(name, plan)  # with little time, it may be better than the plan
        metrics = plan.metrics
        return Baseline(name, metrics.span, metrics.makespan, metrics.bubble_rate, metrics.peak_memory, fits)

    def _report(self, progress: Progress) -> None:
        """Report progress that is better than that of all cuts before, with the bound over all cuts."""
        bound = min(self.floors.values())
        if self.on_progress is None or progress.objective >= self.reported * (1 - OPTIMAL_GAP):
            return
        if verdict(progress.objective, bound) == "contradicted":
            return  # _finish() raises
        self.reported = progress.objective
        certificate = certify(self.problem, progress.objective, bound, "cuts")
        self.on_progress(
            replace(
                progress,
                lower_bound=certificate.lower_bound,
                gap=certificate.gap,
                seconds=time.monotonic() - self.began,
            )
        )

    def _is_over(self, share: float) -> bool:
        """Whether a share of the time limit has elapsed, or the search was cancelled."""
        is_late = self._spent() >= share
        self.is_late |= is_late
        return is_late or (self.cancelled is not None and self.cancelled())
