"""Bounds of problems whose microbatches differ, from prices of the time that microbatches are away.

At any time, the microbatches that are away and fit into a rank's memory together earn at most 1, and an
operation earns what the best set that fits next to it leaves of this 1. The rank's window is at least as long
as all earn together. A linear programme finds good prices, set by set (column generation, as Gilmore and
Gomory 1961 do for the cutting-stock problem). Any prices are valid, because a knapsack over all sets checks
them. The proofs are in PROOFS.md, section 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.away import UNITS, Demand, Needs
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.bounds.ramps import preemptive_bound
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.problem.problem import Problem

MOST_SETS = 60
"""Sets that a round adds to the linear programme at most: those that earn most above 1."""
CLOSE = 0.002
"""The programme ends when its value is above the bound by no more than this share."""
STEP = 0.8
"""Share of the way from the best prices to the programme's at which sets are looked for."""
EXCESS = 1e-6
"""A set that earns this much more than 1 is added."""


class Effort(NamedTuple):
    """How many ranks, groups of microbatches on each, and rounds of the linear programme."""

    ranks: int
    groups: int
    rounds: int


FULL, THOROUGH = Effort(3, 24, 20), Effort(5, 40, 40)


def away_bounds(problem: Problem, effort: Effort) -> Iterator[tuple[int, float]]:
    """Ranks and bounds of the objective; simple ones of all ranks, then better ones of a few: Lemma 46."""
    paths = MicrobatchPaths.of(problem)
    found = []
    for rank in range(problem.pp_degree):
        needs = Needs.of(problem, paths, rank)
        if needs is None:
            continue
        head = 0.0
        if problem.objective == "makespan":
            head = float(paths.start[problem.placement.stages_of[rank][0]].min())
        demand = Demand.of(needs, effort.groups)
        # Of the microbatches that need more than half of the memory, one at a time.
        large = np.where(2 * demand.units > UNITS, 1.0, 0.0)
        value = max(needs.area_bound(), priced(demand, large).bound)
        yield rank, head + value
        found.append((value, rank, needs, demand))
    found.sort(key=lambda each: (-each[0], each[1]))
    # Where memory decides, the programme gains most on the outermost and the innermost rank.
    ends = (0, problem.pp_degree - 1)
    found[1:] = sorted(found[1:], key=lambda each: each[1] not in ends)
    for _, rank, needs, demand in found[: effort.ranks]:
        best = best_prices(demand, effort.rounds)
        yield rank, best.bound
        yield rank, bound_in_windows(problem, paths, rank, needs, demand, best)


def bound_in_windows(
    problem: Problem, paths: MicrobatchPaths, rank: int, needs: Needs, demand: Demand, best: Priced
) -> float:
    """Jackson's bound with what every gap and operation of a rank earns as its length: Lemma 47.

    In the makespan's window, and in those of the rank and of rank 0 for the span.
    """
    n, stages = problem.n_stages, problem.placement.stages_of
    own = stages[rank]
    visits = [*own, *(2 * n - 1 - stage for stage in reversed(own))]
    length, last = needs.length[: len(visits)], needs.length[len(visits) :]
    earning = best.prices[demand.row_of][:, demand.group_of] * needs.away
    shares = 1 - best.earned[demand.room_of]
    visit_earns, rest_earns = shares[: len(visits)] * length, shares[len(visits) :] * last
    # Rests are listed by chunk, and backwards pass the chunks in reverse.
    backwards = np.arange(len(visits) - 1, len(own) - 1, -1)
    best_value = 0.0
    is_span = problem.objective == "span"
    for window in sorted({0, rank}) if is_span else [0]:
        origin = paths.start[stages[window][0]] if is_span else 0.0
        head = paths.start[visits] - origin
        tail = paths.tails(list(stages[window]) if is_span else list(range(n)))[visits]
        jobs = [
            (head, visit_earns, tail),
            (head[:-1] + length[:-1], earning, tail[1:] + length[1:]),
        ]
        if window == rank or not is_span:
            ready = (head + length)[backwards]
            jobs.append((ready, rest_earns, np.zeros_like(ready)))
        rows = [np.concatenate(each)[:, problem.arrays.kind_of].ravel() for each in zip(*jobs, strict=True)]
        best_value = max(best_value, preemptive_bound(rows[0], rows[1], rows[2]))
    return best_value


def best_prices(demand: Demand, rounds: int) -> Priced:
    """The best prices that so many rounds find, and their bound of the rank's window: Lemmas 45 and 46."""
    programme = _Programme(demand)
    best = priced(demand, demand.units / UNITS)
    for _ in range(rounds):
        solved = programme.solve()
        if solved is None or best.bound >= solved.value * (1 - CLOSE):
            break
        prices, shares = solved.prices, solved.shares
        # Sets that earn too much between the best prices and the programme's cut the latter off, too, and
        # there they are better ones (Ben-Ameur and Neto 2007, "Acceleration of cutting-plane algorithms").
        found = priced(demand, STEP * prices + (1 - STEP) * best.prices)
        wanted = STEP * shares + (1 - STEP) * best.shares
        excess = np.append(found.others + wanted, found.scale * found.earned[UNITS]) - 1
        worst = np.argsort(-excess, kind="stable")[:MOST_SETS]
        for at in worst[excess[worst] > EXCESS].tolist():
            of_class = at if at < len(demand.room) else None
            room, skipped = UNITS, 0
            if of_class is not None:
                room, skipped = int(demand.room[at]), int(demand.is_own[at])
            found_set = members(demand.units, demand.count, demand.longest, found.chosen, room, skipped)
            programme.add(found_set, of_class)
        best = max(best, found, key=lambda each: each.bound)
    return best


class Priced(NamedTuple):
    """The bound of some prices."""

    bound: float
    prices: FloatArray
    shares: FloatArray
    """(G, K) and (R,) what gaps and operations earn; no set earns more than 1."""
    earned: FloatArray
    """(UNITS + 1,) the most that a set of at most so many units earns."""
    others: FloatArray
    """(R,) the same next to the operations of a class, before the prices were divided by ``scale``."""
    chosen: IntArray
    """See :func:`sets`."""
    scale: float


def priced(demand: Demand, prices: FloatArray) -> Priced:
    """The bound with prices (G, K), scaled down where a set earns more than 1: Lemma 46."""
    earned, without, chosen = sets(demand.units, demand.count, demand.longest, prices)
    scale = max(1.0, float(earned[UNITS]))
    others = np.where(demand.is_own == 1, without[demand.room], earned[demand.room])
    scaled, shares = prices / scale, 1 - others / scale
    bound = float((scaled * demand.away).sum() + (demand.work * shares).sum())
    return Priced(bound, scaled, shares, earned / scale, others, chosen, scale)


class _Solved(NamedTuple):
    """The programme's value, the prices (G, K), and the shares (R,) that operations earn."""

    value: float
    prices: FloatArray
    shares: FloatArray


class _Programme:
    """The highest bound that the sets known so far allow: prices, and what operations earn."""

    def __init__(self, demand: Demand) -> None:
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.shape = demand.away.shape
        self.prices = [self.solver.NumVar(0, 1, "") for _ in range(demand.away.size)]
        self.shares = [self.solver.NumVar(0, 1, "") for _ in demand.work]
        worth = [*demand.away.ravel().tolist(), *demand.work.tolist()]
        self.unit = max(worth) or 1.0  # GLOP's tolerances are absolute
        objective = self.solver.Objective()
        objective.SetMaximization()
        for variable, value in zip([*self.prices, *self.shares], worth, strict=True):
            objective.SetCoefficient(variable, value / self.unit)

    def solve(self) -> _Solved | None:
        """The optimum; None if the solver gives up for numerical reasons."""
        if self.solver.Solve() != self.solver.OPTIMAL:
            return None
        value = self.solver.Objective().Value() * self.unit
        prices = np.array([variable.solution_value() for variable in self.prices]).reshape(self.shape)
        shares = np.array([variable.solution_value() for variable in self.shares])
        return _Solved(value, np.maximum(prices, 0.0), shares)

    def add(self, away: IntArray, of_class: int | None) -> None:
        """A set (G, K) of microbatches that may be away together, next to a class of operations or none."""
        row = self.solver.Constraint(-self.solver.infinity(), 1)
        flat = away.ravel()
        for at in np.flatnonzero(flat).tolist():
            row.SetCoefficient(self.prices[at], float(flat[at]))
        if of_class is not None:
            row.SetCoefficient(self.shares[of_class], 1.0)


@compiled
def sets(
    units: IntArray, count: IntArray, longest: int, prices: FloatArray
) -> tuple[FloatArray, FloatArray, IntArray]:  # pragma: no cover - compiled
    """The most that a set of at most 0 … UNITS units earns, with and without the longest one: Lemma 45.

    Also the gap of every microbatch in it, or -1: (m, UNITS + 1), the longest microbatch in the last row.
    """
    gaps, kinds = units.shape
    earned = np.zeros(UNITS + 1)
    chosen = np.full((count.sum(), UNITS + 1), -1, np.int8)
    without, at = earned, 0
    for turn in range(kinds + 1):
        kind = turn if turn < kinds else longest
        copies = count[kind]
        if turn == kinds:
            without, copies = earned.copy(), 1
        elif turn == longest:
            copies -= 1
        for _ in range(copies):
            # In descending order, because a smaller amount must not have this microbatch yet.
            for space in range(UNITS, -1, -1):
                most = earned[space]
                for gap in range(gaps):
                    need = units[gap, kind]
                    if need <= space and earned[space - need] + prices[gap, kind] > most:
                        most = earned[space - need] + prices[gap, kind]
                        chosen[at, space] = gap
                earned[space] = most
            at += 1
    return earned, without, chosen


@compiled
def members(
    units: IntArray, count: IntArray, longest: int, chosen: IntArray, room: int, skipped: int
) -> IntArray:  # pragma: no cover - compiled
    """The set that :func:`sets` chose for ``room``, (G, K): Lemma 45. The longest may be ``skipped``."""
    found = np.zeros(units.shape, np.int64)
    at = len(chosen)
    kinds = units.shape[1]
    for turn in range(kinds, -1, -1):
        kind = turn if turn < kinds else longest
        copies = count[kind]
        if turn == kinds:
            copies = 1
        elif turn == longest:
            copies -= 1
        for _ in range(copies):
            at -= 1
            gap = chosen[at, room]
            if gap >= 0 and not (turn == kinds and skipped == 1):
                found[gap, kind] += 1
                room -= units[gap, kind]
    return found
