"""The search for the best cut under one schedule: a local search, a bound, and all cuts if they are few."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import product

import numpy as np
from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables
from zbv_solver.partition.descent import CutDescent
from zbv_solver.partition.first_cuts import histogram_cut, level_cut
from zbv_solver.partition.fixed_order import FixedOrder, Terms
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed, Runs
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, OPTIMAL_GAP, ROUNDING
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import Effort

from zbv_models.fixed_orders.relaxation import Relaxed, relax
from zbv_models.fixed_orders.schedules import Schedule, inner_sizes, placed_on

SCREENED = {"quick": 2_000_000, "standard": 4_000_000, "thorough": 20_000_000}
"""Actions that a first local search may time."""
ACTIONS = {"quick": 20_000_000, "standard": 80_000_000, "thorough": 2_000_000_000}
"""Actions that the full local search may time."""
ROUNDS = {"quick": 150, "standard": 300, "thorough": 1000}
"""Linear programs."""
MOST_SWEPT = {"quick": 100_000_000, "standard": 500_000_000, "thorough": 10_000_000_000}
"""Actions times ranks that all linear programs together may time."""
MOST_TERMS = 32
"""Critical paths by which all cuts are compared."""
FEW_ROUNDS, FEW_SWEPT = 12, 10_000_000
"""Linear programs, and actions times ranks that they may time, to rank many schedules."""
MOST_CUTS = 200_000
"""Most cuts, with what is recomputed, that are listed."""
AT_ONCE = 4_000
"""Cuts whose bounds are computed together."""


class OrderSearch:
    """Cuts under one schedule, recomputed as given, or with stages that the search chooses (None)."""

    def __init__(
        self,
        problem: LayeredProblem,
        schedule: Schedule,
        recompute: Recomputed | First | None,
        latest: dict[int, int],
        effort: Effort,
        seed: int,
        deadline: float = math.inf,
        even: Boundaries | None = None,
        sizes: dict[int, int] | None = None,
    ):
        self.problem, self.schedule, self.recompute = problem, schedule, recompute
        self.effort, self.seed, self.deadline = effort, seed, deadline
        tables = CutTables.of(problem)
        self.space = CutSpace(problem, schedule.placement, tables)
        others = recompute.others if isinstance(recompute, First) else frozenset()
        self.runs = Runs.of(self.space, latest, sizes, others)
        level = level_cut(self.space)
        sample = problem.cut_into(schedule.placement, self.space.cut(level, (False,) * self.space.n_stages))
        self.order = FixedOrder.of(sample, schedule.orders())
        self.local = CutDescent(self.runs, self.order, SCREENED[effort], seed, recompute)
        self.cancelled: Cancelled | None = None
        """Asked often: whether to end early."""
        self.local.is_over = lambda: self.is_over
        self.bound = max(least_worst_load(problem, tables), self._mean_load()) * problem.microbatches
        """Over all cuts; inf if it is proved that none fits."""
        self.even = math.inf
        """The objective of the executor's own cut, without the memory limit; inf if it is not known."""
        self.is_searched = False
        self.terms: dict[bytes, Terms] = {}
        self.simple = (histogram_cut(self.space), level)
        self.own_cut = None if even is None else self._in_parts(even)

    @property
    def best(self) -> Choice | None:
        """The best cut that fits."""
        return self.local.best

    @property
    def value(self) -> float:
        """The objective of the best cut, or inf."""
        return self.local.value

    @property
    def is_infeasible(self) -> bool:
        """Whether it is proved that no cut fits."""
        return self.best is None and math.isinf(self.bound)

    def recompute_name(self, choice: Choice | None) -> str:
        """How stages of a cut are recomputed; None if no cut is known."""
        if self.recompute is None:
            return "per-stage"
        if isinstance(self.recompute, tuple):
            return "all" if self.recompute[0] else "none"
        if choice is None:
            return "block"
        bounds, (chosen, *_) = choice
        most = int((np.diff(self.runs.counts(bounds), axis=0) @ self.runs.can_recompute).max())
        return "none" if chosen == 0 else "all" if chosen >= most and not self.recompute.others else "block"

    def _mean_load(self) -> float:
        """The mean work of a rank for one microbatch, if it is known which stages are recomputed."""
        if not isinstance(self.recompute, tuple):
            return 0.0
        forward, inputs, weights, fused = self.runs.duration[int(bool(self.recompute[0]))]
        work = (forward + np.minimum(inputs + weights, fused)) @ self.runs.size
        return float(work) / self.problem.pp_degree * (1 - ROUNDING)

    def screen(self, also: Iterable[Boundaries] = ()) -> None:
        """A short local search from the usual cuts, and from others with boundaries in layers."""
        self.is_searched = True
        starts = []
        for bounds in (self.own_cut, *self.simple, *map(self._in_parts, also)):
            start = None if bounds is None else self.runs.repaired(bounds)
            if start is not None:
                starts.append(self.local.at(start))
                self.local.consider(starts[-1])
        if self.own_cut is not None:
            self.even = self.runs.value(self.order, self.local.at(self.own_cut))
        if starts:
            first = min(starts, key=self.local.consider)
            self.local.run(first)

    def bound_loads(self) -> None:
        """A better bound from the loads and the memory of ranks alone, as fractions of parts."""
        start = self.runs.repaired(self.simple[-1])
        if start is not None:
            self._take(self._relaxed(self.local.at(start), 0, does_fit=False))

    def estimate(self) -> None:
        """A bound with little effort: few programs, and the last one's solution as a cut."""
        start = self.runs.repaired(self.simple[-1])
        if start is not None:
            rounds = max(2, min(FEW_ROUNDS, FEW_SWEPT // (len(self.order.orders) * self.problem.pp_degree)))
            relaxed = self._relaxed(self.local.at(start), rounds, does_fit=False)
            self._take(relaxed)
            if relaxed.counts is not None:
                rounded = self.runs.repaired(tuple(np.rint(relaxed.counts.sum(axis=1)).astype(int).tolist()))
                if rounded is not None:
                    self.local.consider(self.local.at(rounded))

    def seek_cut(self) -> None:
        """A good cut with little effort: few moves, and more of them if nothing fits."""
        self.screen(() if self.best is None else (self._at(self.best[0]),))
        if self.best is None:
            self._make_fit()

    def _in_parts(self, bounds: Boundaries) -> Boundaries | None:
        """Boundaries in parts; None if they are inside parts, or those of another number of stages."""
        places = {int(place): part for part, place in enumerate(self.problem.places)}
        if len(bounds) != self.space.n_stages + 1 or not set(bounds) <= set(places):
            return None
        return tuple(places[bound] for bound in bounds)

    def _at(self, bounds: Boundaries) -> Boundaries:
        """Boundaries in layers."""
        return tuple(int(self.problem.places[bound]) for bound in bounds)

    def _relaxed(
        self, start: Choice, rounds: int, *, does_fit: bool = True, deadline: float = math.inf
    ) -> Relaxed:
        arguments = self.runs, self.order, start, rounds, self.recompute, does_fit, deadline
        return relax(*arguments, self.cancelled)

    def _take(self, relaxed: Relaxed) -> None:
        """Keep a relaxation's bound and terms."""
        self.terms |= relaxed.terms
        self.bound = max(self.bound, relaxed.bound)
        if self.bound > self._serial() * (1 + OPTIMAL_GAP):
            self.bound = math.inf  # no cut that fits can reach the bound, so none fits

    def finish(self, below: float, share: float) -> None:
        """Search in full, and prove a bound up to ``below``, the value of the best cut of any search.

        ``share`` scales the budget; below 1 there is no full local search.
        """
        if self.best is None:
            self._make_fit()
        if self.best is not None:
            actions = len(self.order.orders) * self.problem.pp_degree
            rounds = math.ceil(share * min(ROUNDS[self.effort], MOST_SWEPT[self.effort] / actions))
            self._take(self._relaxed(self.best, rounds, deadline=self.deadline))
            if share >= 1 and self._target(below) > self.bound:
                self.local.left = ACTIONS[self.effort]
                self.local.run(self.best)
        if self._target(below) > self.bound:
            self._time_all(below, share)

    def closest_peaks(self) -> tuple[float, ...]:
        """The memory that the cut closest to the limits needs."""
        if self.local.closest is None:
            return self.problem.limit or ()
        return tuple(self.runs.peaks(self.order, self.local.closest).tolist())

    @property
    def is_over(self) -> bool:
        """Whether the deadline is over, or the search was cancelled."""
        return time.monotonic() >= self.deadline or (self.cancelled is not None and self.cancelled())

    def _make_fit(self) -> None:
        """Seek a cut that fits for longer; a bound may prove that there is none."""
        self.bound_loads()
        if self.local.closest is not None and not self.is_infeasible:
            self.local.left = ACTIONS[self.effort]
            self.local.run(self.local.closest)

    def _serial(self) -> float:
        """An upper bound on the objective of every cut: no two actions or transfers overlap."""
        m, runs = self.problem.microbatches, self.runs
        work = (runs.duration.max(axis=(0, 1)) * 3 * runs.size).sum()
        transfers = [self.problem.transfer(int(place)) for place in self.problem.places]
        return float(m * (work + 2 * len(runs.lower) * max(transfers))) or 1.0

    def tight_terms(self) -> list[Terms]:
        """The terms that are largest for the best cut: a few prove nearly as much of other cuts as all."""
        if self.best is None:
            return []
        counts = self.runs.counts(self.best[0])
        costs = self.runs.costs(counts, self.runs.again(counts, self.best[1]))
        return sorted(self.terms.values(), key=lambda terms: -terms.value(*costs))[:MOST_TERMS]

    def _target(self, below: float) -> float:
        """Only cuts up to this objective are better than the best known cut."""
        return min(self.value, below) * (1 - OPTIMAL_GAP)

    def _time_all(self, below: float, share: float) -> None:
        """Time all cuts, if they are few: first those of which least is proved, which bounds the others."""
        most_load = min(self.value, below) / self.problem.microbatches
        cuts = listed_cuts(self.runs, self.recompute, self.tight_terms(), most_load)
        self.local.left = math.ceil(share * ACTIONS[self.effort])
        # The verifier may accept cuts that exceed the memory by so little that the search does not.
        accepted = math.inf
        for bound, choice in cuts or ():
            if not self.local.may_go_on():
                return
            self.bound = max(self.bound, min(bound * (1 - ROUNDING), self.value, below, accepted))
            if self._target(below) <= self.bound:
                return
            excess, _ = self.local.consider(choice)
            if 0 < excess <= 2 * MEMORY_TOLERANCE:
                accepted = min(accepted, self.runs.value(self.order, choice))
        if cuts is not None:
            self.bound = max(self.bound, min(self.value, below, accepted))


def order_search(
    own: OwnUnit,
    schedule: Schedule,
    recompute: Recomputed | First | None,
    *,
    allow_empty: bool,
    late: str | None,
    effort: Effort,
    seed: int = 0,
    deadline: float = math.inf,
    even: Boundaries | None = None,
) -> OrderSearch:
    """The search for cuts under one schedule, not yet begun.

    Raises :class:`InvalidInput` when no cut under this schedule keeps the rules.
    """
    placed = placed_on(own.problem, schedule, allow_empty)
    sizes = inner_sizes(placed, schedule)
    latest = _latest(placed, schedule, late) | _behind(placed, sizes)
    search = OrderSearch(placed, schedule, recompute, latest, effort, seed, deadline, even, sizes)
    if search.runs.allow_none:
        raise InvalidInput.at("/layers", f"found {placed.n_atoms} separable layers, which are too few.")
    return search


def _behind(placed: LayeredProblem, sizes: dict[int, int]) -> dict[int, int]:
    """Stages of prescribed sizes have only transformer layers, so they end with the last of them."""
    model = placed.model
    end = int(np.searchsorted(placed.places, model.place_behind(model.blocks_before[-1])))
    return {stage + 1: end for stage in sizes}


def _latest(problem: LayeredProblem, schedule: Schedule, late: str | None) -> dict[int, int]:
    """The last place of the boundary before the last chunk, in parts."""
    placement = schedule.placement
    if late is None or placement.chunks == 1:
        return {}
    place = problem.model.place[late]
    at = int(np.searchsorted(problem.places, place, side="right")) - 1
    return {placement.n_stages - placement.pp_degree: at}


def all_bounds(runs: Runs, most_load: float = np.inf, most: int = MOST_CUTS) -> IntArray | None:
    """(n, S+1) the boundaries of all cuts that the rules allow; None if there are more than ``most``.

    Cuts are left out if a rank works longer than ``most_load`` for one microbatch.
    """
    forward, inputs, weights, fused = runs.duration.transpose(1, 0, 2)
    work = np.repeat((forward + np.minimum(inputs + weights, fused)).min(axis=0), runs.size)
    before = np.append(0.0, np.cumsum(work))
    most_load = most_load * (1 + ROUNDING)
    rank_of = runs.space.placement.rank_of
    found, loads = np.zeros((1, 1), np.int64), np.zeros((1, runs.space.placement.pp_degree))
    for stage, (low, high) in enumerate(zip(runs.lower[1:], runs.upper[1:], strict=True)):
        places = np.arange(low, high + 1)
        steps = places[None, :] - found[:, -1:]
        size = runs.sizes.get(stage)
        is_allowed = steps >= runs.least if size is None else steps == size
        own = loads[:, rank_of[stage], None] + before[places][None, :] - before[found[:, -1:]]
        # Later stages can take what is left of every rank whose last stage is not behind.
        later = list({rank_of[after] for after in range(stage + 1, runs.space.n_stages)})
        room = (most_load - loads[:, later]).sum(axis=1)[:, None]
        if rank_of[stage] in later:
            room = room - (own - loads[:, rank_of[stage], None])
        is_allowed &= (own <= most_load) & (before[-1] - before[places][None, :] <= room)
        rows, at = np.nonzero(is_allowed)
        if len(rows) > most:
            return None
        loads = loads[rows]
        loads[:, rank_of[stage]] = own[rows, at]
        found = np.concatenate([found[rows], places[at][:, None]], axis=1)
    return found


def proved_of(runs: Runs, terms: Collection[Terms], bounds: IntArray, recompute: Recomputed) -> FloatArray:
    """(n,) what cuts with these boundaries (n, S+1) take at least: the largest of the terms. Lemma 52."""
    found = np.zeros(len(bounds))
    if not terms:
        return found
    rows = [runs.row_of_terms(each).scaled(1 / each.length) for each in terms]
    # A row is a sum of functions of one boundary each, and of two for first layers that are recomputed.
    places = runs.counts(tuple(range(int(runs.begin[-1]) + 1)))
    slopes = np.array([places @ row.slope.T for row in rows])  # (K, n+1, S+1)
    again = np.array([row.again for row in rows])
    fixed = np.array([row.fixed for row in rows])[:, None]
    numbers = np.arange(bounds.shape[1])
    for begin in range(0, len(bounds), AT_ONCE):
        some = bounds[begin : begin + AT_ONCE]
        values = fixed + slopes[:, some, numbers].sum(axis=2)
        if any(recompute):
            counts = places[some]
            able = np.diff(counts, axis=1) * runs.can_recompute
            before = np.cumsum(able, axis=2) - able
            repeated = np.clip(np.array(recompute)[None, :, None] - before, 0.0, able)
            values += np.tensordot(again, repeated, ((1, 2), (1, 2)))
        found[begin : begin + AT_ONCE] = values.max(axis=0)
    return found


def listed_cuts(
    runs: Runs, recompute: Recomputed | First | None, terms: Collection[Terms], most_load: float
) -> Iterator[tuple[float, Choice]] | None:
    """All cuts with what is proved of each, the least first; None if there are too many.

    ``most_load`` is as in :func:`all_bounds`.
    """
    stages = runs.space.n_stages
    variants: list[Recomputed] = [recompute] if isinstance(recompute, tuple) else []
    if recompute is None:
        variants = [*product((0, WHOLE), repeat=stages)] if 2**stages <= MOST_CUTS else []
    elif isinstance(recompute, First):
        most = min(recompute.most, max(recompute.least, int(runs.can_recompute @ runs.size)))
        variants = [(number,) * stages for number in range(recompute.least, most + 1)]
    bounds = all_bounds(runs, most_load, MOST_CUTS // max(1, len(variants))) if variants else None
    if bounds is None:
        return None
    proved = np.concatenate([proved_of(runs, terms, bounds, each) for each in variants])
    order = np.argsort(proved, kind="stable").tolist()
    return (
        (float(proved[at]), (tuple(bounds[at % len(bounds)].tolist()), variants[at // len(bounds)]))
        for at in order
    )
