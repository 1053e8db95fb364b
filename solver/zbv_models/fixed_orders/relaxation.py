"""A lower bound over all cuts, fractions of parts included, by linear programming.

The objective of a fixed order is a maximum of linear functions of the cut, one for every cycle of critical
paths. The loads of ranks come first, and others are added as they are found (Kelley 1960), like the moments
at which a rank exceeds its memory. The next is sought between the best known point and the solution of the
program, which needs far fewer steps than at the solution (Ben-Ameur and Neto 2007). Memory beyond a rank's
limit is allowed, but costs more than any objective.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.partition.fixed_order import FixedOrder, Terms
from zbv_solver.partition.runs import Choice, First, Recomputed, Row, Runs
from zbv_solver.search.incumbent import Cancelled

QUICK_PATHS = 3
"""Paths of a bound without rounds."""
STEPS = (0.1, 0.5, 1.0)
"""Where terms are sought, from the best known point (0) to the solution of the program (1)."""
ENOUGH = 1e-6
"""The bound is final if the best known point exceeds it by at most this share."""
SAFETY = 1e-11
"""By which share bounds are lowered: rounding of sums over terms and boundaries."""
PENALTY = 1e4
"""What memory beyond a limit costs, in values of a known cut for as much memory as the limit."""
FITS = 1e-7
"""Memory beyond limits, as a share, that is taken for rounding."""
MISSED = 1e-9
"""Memory beyond a limit, as a share, that the program must know."""


@dataclass(frozen=True)
class Relaxed:
    """A lower bound over all cuts that fit, and the terms that prove it."""

    bound: float
    terms: dict[bytes, Terms]
    counts: FloatArray | None = None
    """(S+1, R) the best known point: parts and fractions of parts before every boundary. None if no point
    is known that fits."""


def relax(
    runs: Runs,
    order: FixedOrder,
    start: Choice,
    rounds: int,
    recompute: Recomputed | First | None,
    does_fit: bool = True,
    deadline: float = math.inf,
    cancelled: Cancelled | None = None,
) -> Relaxed:
    """Bound the objective of all cuts that fit the memory limit from below. Lemma 52.

    Parameters
    ----------
    start
        A good cut.
    rounds
        Most programs to solve after the first, which has only the loads and the memory of ranks. With 0, the
        bound also has a few paths of the first rank.
    recompute
        What is recomputed; if that is not fixed (None: any stages), every share of every stage may be.
    does_fit
        Whether ``start`` fits.
    deadline
        When no further program is solved, by ``time.monotonic``.
    cancelled
        Asked often: whether to end, with the bound so far or 0.
    """
    value = runs.value(order, start)
    if value <= 0:
        return Relaxed(0.0, {})
    program = _Program(runs, order, value, recompute, cancelled or (lambda: False))
    terms: dict[bytes, Terms] = {}
    solved = program.solve()
    if solved is None:
        return Relaxed(0.0, {})
    if not does_fit and not program.has_room:
        return Relaxed(program.proven_bound() * (1 - SAFETY), {})
    bound, *best = solved
    if not rounds:
        return Relaxed(_with_paths(program, start) * (1 - SAFETY), {}, best[0])
    if does_fit:
        best = list(_point(runs, start))
    value = order.value(*runs.costs(*best))

    def learn(duration: FloatArray, latency: FloatArray, above: float, at: _Costs | None) -> int:
        fresh = 0
        for found in order.critical(duration, latency):
            if found.key not in terms and (at is None or found.value(*at) > above * (1 + ENOUGH / 10)):
                terms[found.key] = found
                program.add(runs.row_of_terms(found), found.length)
                fresh += 1
        return fresh

    learn(*runs.costs(*best), 0.0, None)
    for _ in range(rounds):
        solved = program.solve() if time.monotonic() < deadline else None
        if solved is None:
            break
        bound, counts, again = solved
        far = runs.costs(counts, again)
        for step in STEPS:
            point = tuple(
                step * new + (1 - step) * old for new, old in zip((counts, again), best, strict=True)
            )
            costs = runs.costs(*point)
            reached = order.value(*costs)
            if reached < value:
                best, value = [point[0], point[1]], reached
            fresh = learn(*costs, bound, far)
            if fresh:
                break
        if not fresh or value <= bound * (1 + ENOUGH):
            break
    return Relaxed(program.proven_bound() * (1 - SAFETY), terms, best[0])


def _with_paths(program: _Program, start: Choice) -> float:
    """The bound with the first rank's longest paths, of a cut and of solutions.

    A path goes through the whole pipeline, so it has the ramps and waits for transfers. One path takes less
    time than all cycles.
    """
    runs, point = program.runs, _point(program.runs, start)
    known = set()
    for _ in range(QUICK_PATHS):
        terms = program.order.path_of(0, *runs.costs(*point))
        if terms.key in known:
            break
        known.add(terms.key)
        program.add(runs.row_of_terms(terms), terms.length)
        solved = program.solve()
        if solved is None:
            break
        point = solved[1], solved[2]
    return program.proven_bound()


_Costs = tuple[FloatArray, FloatArray]


def _point(runs: Runs, choice: Choice) -> tuple[FloatArray, FloatArray]:
    """Counts (S+1, R) of a cut, and recomputed parts (S, R)."""
    counts = runs.counts(choice[0])
    return counts, runs.again(counts, choice[1])


class _Program:
    """The linear program: counts of parts before boundaries, and the objective in units of ``value``."""

    def __init__(
        self,
        runs: Runs,
        order: FixedOrder,
        value: float,
        recompute: Recomputed | First | None,
        cancelled: Cancelled,
    ):
        self.solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        # Every solve begins at the one before, which preprocessing would prevent.
        solver.SetSolverSpecificParametersAsString("use_dual_simplex: true use_preprocessing: false")
        self.runs, self.order, self.value, self.recompute = runs, order, value, recompute
        self.cancelled = cancelled
        self.fixed = recompute if isinstance(recompute, tuple) else None
        self.rows: list[tuple[Row, int, pywraplp.Constraint]] = []
        self.weights: list[float] = []
        self.memory: list[tuple[Row, pywraplp.Constraint]] = []
        self.prices: list[float] = []
        size, stages = runs.size.astype(float).tolist(), len(runs.lower) - 1
        self.objective = solver.NumVar(0.0, solver.infinity(), "")
        solver.Minimize(self.objective)
        low, high = runs.counts(tuple(runs.lower)), runs.counts(tuple(runs.upper))
        self.counts = [
            [solver.NumVar(float(a), float(b), "") for a, b in zip(*rows, strict=True)]
            for rows in zip(low, high, strict=True)
        ]
        for row in self.counts:
            for run in range(len(size) - 1):
                solver.Add(row[run + 1] * (1 / size[run + 1]) <= row[run] * (1 / size[run]))
        for row, after in zip(self.counts[:-1], self.counts[1:], strict=True):
            for one, other in zip(row, after, strict=True):
                solver.Add(one <= other)
        self.again: list[list[pywraplp.Variable]] = []
        if self.fixed is None:
            self.again = [[solver.NumVar(0.0, each, "") for each in size] for _ in range(stages)]
            for stage, row in enumerate(self.again):
                for run, chosen in enumerate(row):
                    solver.Add(chosen <= self.counts[stage + 1][run] - self.counts[stage][run])
                if isinstance(recompute, First):
                    able = zip(row, runs.can_recompute, strict=True)
                    solver.Add(sum(chosen for chosen, is_able in able if is_able) <= recompute.most)

        for rank in range(len(order.hosted)):
            terms = order.load_of(rank)
            self.add(runs.row_of_terms(terms), terms.length)
        self.room = runs.most_room(order, self.fixed)
        self.held, self.moments = order.moments(), set[int]()
        self.excess = self._add_excess()

    def add(self, row: Row, length: int) -> None:
        """``row <= length * objective``."""
        scale = 1 / (length * self.value)
        constraint = self._at_most(row, scale, -row.fixed * scale)
        constraint.SetCoefficient(self.objective, -1.0)
        self.rows.append((row, length, constraint))

    def _add_excess(self) -> list[pywraplp.Variable | None]:
        """By how much every rank is above its limit, in units of the limit; None for a limit of 0."""
        found: list[pywraplp.Variable | None] = []
        for limit in self.runs.space.problem.limit or ():
            found.append(self.solver.NumVar(0.0, self.solver.infinity(), "") if limit > 0 else None)
            if found[-1] is not None:
                self.solver.Objective().SetCoefficient(found[-1], PENALTY)
        return found

    def _add_memory(self) -> bool:
        """Add every rank's moment farthest above its limit in the solution; False if there is none."""
        if not any(self.excess):
            return False
        counts, again = self._solution()
        order, limits = self.order, np.array(self.runs.space.problem.limit)
        inside = np.diff(counts, axis=0)
        amounts = self.runs.memory[0] @ (inside - again).T + self.runs.memory[1] @ again.T
        ranks, numbers = self.held
        of_rank = amounts[:, order.hosted]  # (3, p, chunks)
        held = np.einsum("hkc,khc->h", numbers, of_rank[:2, ranks]) + of_rank[2].sum(axis=1)[ranks]
        known = np.array([0.0 if each is None else each.solution_value() for each in self.excess])
        limit = np.where(limits > 0, limits, np.inf)[ranks]
        above = (held - self.room[ranks]) / limit - known[ranks]
        fresh = 0
        for rank in np.unique(ranks[above > MISSED]).tolist():
            own = np.flatnonzero(ranks == rank)
            moment = int(own[above[own].argmax()])
            if moment not in self.moments:
                self.moments.add(moment)
                self._add_moment(rank, self.runs.row_of_memory(order.hosted[rank], numbers[moment]))
                fresh += 1
        return fresh > 0

    def _add_moment(self, rank: int, row: Row) -> None:
        """What a rank holds at a moment is at most its room and the excess."""
        if self.runs.space.problem.limit is None:
            return
        limit, room = self.runs.space.problem.limit[rank], float(self.room[rank])
        constraint = self._at_most(row, 1 / limit, (room - row.fixed) / limit)
        constraint.SetCoefficient(self.excess[rank], -1.0)
        self.memory.append((row._replace(fixed=row.fixed - room).scaled(1 / limit), constraint))

    def _at_most(self, row: Row, scale: float, most: float) -> pywraplp.Constraint:
        """The scaled row without its fixed part is at most a number."""
        slope, again = row.slope, row.again
        if self.fixed is not None:
            slope = row.with_stages(self.fixed)
        constraint = self.solver.RowConstraint(-self.solver.infinity(), most, "")
        for variables, factors in ((self.counts, slope), (self.again, again)):
            if variables:
                for one, other in np.argwhere(factors).tolist():
                    constraint.SetCoefficient(variables[one][other], float(factors[one, other]) * scale)
        return constraint

    @property
    def has_room(self) -> bool:
        """Whether the solution fits the memory limits."""
        return all(each is None or each.solution_value() <= FITS for each in self.excess)

    def solve(self) -> tuple[float, FloatArray, FloatArray] | None:
        """The objective, counts (S+1, R) and recomputed parts (S, R); None if it was not solved."""
        while True:
            if self.cancelled() or self.solver.Solve() != pywraplp.Solver.OPTIMAL:
                return None
            if not self._add_memory():
                break
        self.weights = [max(0.0, -constraint.dual_value()) for _, _, constraint in self.rows]
        self.prices = [max(0.0, -constraint.dual_value()) for _, constraint in self.memory]
        return self.objective.solution_value() * self.value, *self._solution()

    def _solution(self) -> tuple[FloatArray, FloatArray]:
        """Counts (S+1, R) and recomputed parts (S, R) of the solution."""
        counts = np.array([[each.solution_value() for each in row] for row in self.counts])
        if self.fixed is not None:
            return counts, self.runs.again(counts, self.fixed)
        return counts, np.array([[each.solution_value() for each in row] for row in self.again])

    def proven_bound(self) -> float:
        """The least weighted mean of the rows over all cuts, with the dual solution as weights.

        The objective of every cut is at least any weighted mean of its rows, also with memory beyond limits
        added, which is at most 0 for every cut that fits. So this bound does not depend on how exactly the
        program was solved. 0 if the search is cancelled meanwhile.
        """
        total = sum(self.weights)
        if total <= 0:
            return 0.0
        used = [
            row.scaled(weight / total / length)
            for weight, (row, length, _) in zip(self.weights, self.rows, strict=False)
            if weight > 0
        ]
        used += [
            row.scaled(price * self.value / total)
            for price, (row, _) in zip(self.prices, self.memory, strict=False)
            if price > 0
        ]
        return _least(
            self.runs,
            Row(
                sum(row.fixed for row in used),
                np.sum([row.slope for row in used], axis=0),
                np.sum([row.again for row in used], axis=0),
            ),
            self.recompute,
            self.cancelled,
        )


def _least(runs: Runs, row: Row, recompute: Recomputed | First | None, cancelled: Cancelled) -> float:
    """The least value of a row over all cuts, by dynamic programming over boundaries.

    If first layers are recomputed, every stage may have its own number of them.
    """
    slope = row.with_stages(recompute) if isinstance(recompute, tuple) else row.slope
    is_fixed = isinstance(recompute, tuple) or (isinstance(recompute, First) and recompute.most == 0)
    n = int(runs.begin[-1])
    counts = runs.counts(tuple(range(n + 1)))
    number = np.arange(n + 1)
    best: FloatArray = np.where(number == 0, 0.0, np.inf)
    for bound in range(1, len(runs.lower)):
        if cancelled():
            return 0.0
        if is_fixed:
            best = np.append(np.full(runs.least, np.inf), np.minimum.accumulate(best))[: n + 1]
        else:
            again = counts @ row.again[bound - 1]
            # Rows are the places of the boundary before; as much is recomputed as makes the value least.
            if isinstance(recompute, First):
                least = _least_of_first(again, counts @ runs.can_recompute, recompute)
            else:
                least = np.minimum(0.0, again[None, :] - again[:, None])
            reached = best[:, None] + least
            reached[number[None, :] < number[:, None] + runs.least] = np.inf
            best = reached.min(axis=0)
        best = best + counts @ slope[bound]
        best[(number < runs.lower[bound]) | (number > runs.upper[bound])] = np.inf
    return row.fixed + float(best[n])


def _least_of_first(again: FloatArray, able: FloatArray, first: First) -> FloatArray:
    """(n+1, n+1) the least that recomputing first parts of a stage adds, by the boundaries around it.

    Parameters
    ----------
    again, able
        (n+1,) what all parts before a place add, and how many of them can be recomputed.
    """
    # What the first k of all parts that can be recomputed add, and the least of 2**level neighbours.
    levels = [again[np.searchsorted(able, np.arange(able[-1] + 1), side="left")]]
    while 2 ** len(levels) <= len(levels[0]):
        step = 2 ** (len(levels) - 1)
        levels.append(np.minimum(levels[-1], np.append(levels[-1][step:], np.full(step, np.inf))))
    before = able.astype(int)
    low, high = (
        np.maximum(before[:, None], np.minimum(before[None, :], before[:, None] + count))
        for count in (first.least, first.most)
    )
    level = np.frexp(high - low + 1)[1] - 1
    table = np.array(levels)
    found: FloatArray = np.minimum(table[level, low], table[level, high + 1 - 2**level])
    found -= levels[0][before][:, None]
    return found
