"""A bound with pairs or copies: microbatches flow like a liquid through the first and the last rank.

A pair needs a forward and a backward at the same time. In the ramp, the first rank can run ahead with the
forwards of its first stage only: those of its last stage come no faster than the last rank lets them pass. So
what a rank alone could pair is not there to be paired. Copies free memory as fast as engines move it.
A linear programme cuts time into steps, and asks how much of every action, pair and copy the two ranks run in
each, with the delays between them, their memory and their windows (a fluid relaxation, as that of job shops
by Bertsimas and Sethuraman 2002). If they cannot run everything, its prices prove it: Lemma 66.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.bounds.pairs import pair_bound
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.problem import F, I, O, Problem, R, W
from zbv_solver.problem.stages import Copies, pair_duration

Numbers = NDArray[np.float64]
Action = tuple[int, int]
"""Letter and stage. B is an I and a W."""

STEPS = 100
"""Steps of time, about, but no more than two for every action of a rank.
With twice as many, a bound is up to 0.7 % higher and takes five times as long."""
SAFETY = 1e-7
"""Share by which a bound is lower than what is proved: rounding of times to steps."""
MOST = 1.08
"""The largest objective that is tried, as a multiple of the known bound."""
LATEST = 0.5
"""Share of the bound by which the last rank may start later than it could; see Lemma 60 for later ones."""
CLOSE = 0.001
"""Share of the bound to which the largest objective without a plan is sought."""
PIVOTS, MOST_RUNS = 1_000, 30
"""Pivots of the simplex algorithm until it is asked whether to stop, and how often at most it goes on then.
16 ranks and 32 microbatches take 7 runs."""


class Activity(NamedTuple):
    """What a rank may run at a time: an action or a pair."""

    duration: float
    runs: tuple[Action, ...]


def activities(problem: Problem, rank: int) -> list[Activity]:
    """Actions and pairs of a rank, without B where I and then W take as long and hold no more: Lemma 66."""
    arrays, stages = problem.arrays, problem.placement.stages_of[rank]
    forward, inputs, weights, fused = arrays.duration[:, :, 0].tolist()
    hidden = np.zeros_like(arrays.duration) if arrays.communication is None else arrays.communication
    found = []
    for stage in stages:
        split, both = ((I, stage),), ((I, stage), (W, stage))
        holds_more = arrays.delta[I, stage, 0] > 0
        found += [Activity(forward[stage], ((F, stage),)), Activity(weights[stage], ((W, stage),))]
        found.append(Activity(inputs[stage], split))
        if holds_more or fused[stage] < inputs[stage] + weights[stage]:
            found.append(Activity(fused[stage], both))
        for other in stages:
            with_split, with_both = (
                float(pair_duration(forward[other], length, (hidden[0, other, 0], by), problem.pair_factor))
                for length, by in ((inputs[stage], hidden[1, stage, 0]), (fused[stage], hidden[3, stage, 0]))
            )
            found.append(Activity(with_split, ((F, other), *split)))
            if holds_more or with_both < (with_split + weights[stage]) * (1 - TINY):
                found.append(Activity(with_both, ((F, other), *both)))
    return found


class Link(NamedTuple):
    """At any time, no more of ``after`` has been done than of ``before`` a time ``lag`` earlier."""

    before: Action
    after: Action
    lag: float


def links(problem: Problem, ranks: Iterable[int]) -> list[Link]:
    """What actions of some ranks need of each other: Lemma 66 (iii)."""
    arrays, n = problem.arrays, problem.n_stages
    duration, transfer = arrays.duration[:, :, 0], arrays.latency[:, 0]
    # A microbatch passes stages 0 to n - 1, and then n - 1 to 0.
    length = np.concatenate([duration[0], np.minimum(duration[1], duration[3])[::-1]])
    delay = np.concatenate([transfer, [0.0], transfer[::-1]])
    start = np.concatenate([[0.0], np.cumsum(length[:-1] + delay)])
    stages = sorted(stage for rank in ranks for stage in problem.placement.stages_of[rank])
    visits = [(F, stage) for stage in stages] + [(I, stage) for stage in reversed(stages)]
    found = []
    for before, after in itertools.pairwise(visits):
        at, then = (stage if letter == F else 2 * n - 1 - stage for letter, stage in (before, after))
        lag = start[then] - start[at] - max(0.0, length[at] - length[then])
        found.append(Link(before, after, float(lag)))
    runs = [set(each.runs) for rank in ranks for each in activities(problem, rank)]
    for stage in stages:
        backward = {(I, stage), (W, stage)}
        is_one = any(backward <= each for each in runs)  # and both end together
        found.append(Link((I, stage), (W, stage), 0.0 if is_one else float(min(duration[[I, W], stage]))))
    return found


class Window(NamedTuple):
    """A rank may work from ``first`` until ``more`` after the objective."""

    first: float
    more: float

    def room(self, objective: float, step: float, steps: int) -> Numbers:
        """(steps,) how long the rank may work in every step."""
        ends = np.arange(1, steps + 1) * step
        room: Numbers = np.minimum(ends, objective + self.more) - np.maximum(ends - step, self.first)
        room[room < 0] = 0.0
        return room


class Programme:
    """A linear programme: the most of their work that some ranks can do if the objective is too small."""

    def __init__(self, problem: Problem, windows: dict[int, Window], step: float, steps: int) -> None:
        self.problem, self.windows, self.step, self.steps = problem, windows, step, steps
        self.most: list[float] = []
        self.worth: list[float] = []
        """Of every column, its largest value and what it counts for."""
        self.rows: list[tuple[list[int], list[float]]] = []
        self.largest: list[float] = []
        self.is_exact: list[bool] = []
        """Of every row, its columns with their factors, and the largest sum; whether no other is allowed."""
        self.rooms: dict[int, int] = {}
        """The first of the rows with the room of a rank's steps. The room of its whole window follows."""
        self.flown: dict[Action, range] = {}
        """The columns with how often an action has been done when a step ends; O and R are copies."""
        self.run: dict[tuple[Action, ...], range] = {}
        """The columns with how often an activity runs in a step."""
        for rank in windows:
            self._rank(rank)
        for before, after, lag in links(problem, windows):
            for at, column in enumerate(self.flown[after]):
                # The lag is rounded down to whole steps.
                needed = at - math.floor(lag / step + TINY)
                columns = [column, self.flown[before][needed]] if needed >= 0 else [column]
                self._row(columns, [1.0, -1.0], 0.0)

    def _columns(self, most: float) -> range:
        """A column for every step."""
        self.most += [most] * self.steps
        self.worth += [0.0] * self.steps
        return range(len(self.most) - self.steps, len(self.most))

    def _row(self, columns: list[int], values: list[float], largest: float, is_exact: bool = False) -> None:
        self.rows.append((columns, values[: len(columns)]))
        self.largest.append(largest)
        self.is_exact.append(is_exact)

    def _rank(self, rank: int) -> None:
        arrays, m, known = self.problem.arrays, self.problem.microbatches, activities(self.problem, rank)
        actions = list(itertools.product((F, I, W), self.problem.placement.stages_of[rank]))
        lengths = [each.duration / self.step for each in known]
        columns = [self._columns(min(m, 1 / length) if length else m) for length in lengths]
        self.run |= {each.runs: own for each, own in zip(known, columns, strict=True)}
        self.rooms[rank] = len(self.rows)
        for step in range(self.steps):
            self._row([each[step] for each in columns], lengths, 0.0)
        everything = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
        self._row(everything, lengths * self.steps, 0.0)
        for action in actions:
            mine = [each for each, what in zip(columns, known, strict=True) if action in what.runs]
            done = self.flown[action] = self._columns(m)
            self.worth[done[-1]] = float(arrays.duration[(*action, 0)]) / self.step
            for step in range(self.steps):
                here = [done[step], *(each[step] for each in mine), *done[max(0, step - 1) : step]]
                self._row(here, [1.0] + [-1.0] * (len(mine) + 1), 0.0, is_exact=True)
        free = float(arrays.limit[rank] - arrays.static[rank])
        if not 0 < free < math.inf:
            return
        held = [(self.flown[action], float(arrays.delta[(*action, 0)]) / free) for action in actions]
        if self.problem.copies is not None:
            held += self._copies(self.problem.copies, self.problem.placement.stages_of[rank], free)
        for step in range(self.steps):
            self._row([done[step] for done, _ in held], [by for _, by in held], 1.0)

    def _copies(self, copies: Copies, stages: tuple[int, ...], free: float) -> list[tuple[range, float]]:
        """Columns with how often every stage has been copied out and in, and what memory they hold."""
        m, held = self.problem.microbatches, []
        for letter, times in ((O, copies.offload), (R, copies.reload)):
            self.flown |= {(letter, stage): self._columns(m) for stage in stages}
            moved = [self.flown[letter, stage] for stage in stages]
            lengths = [times[stage] / self.step for stage in stages]
            for step in range(self.steps):
                before = [done[step - 1] for done in moved] if step else []
                sums = [*lengths, *(-length for length in lengths)]
                self._row([*(done[step] for done in moved), *before], sums, 1.0)
        for stage in stages:
            forward, inputs, gone, here = (self.flown[letter, stage] for letter in (F, I, O, R))
            amount = copies.offloadable[stage] / free
            held += [(gone, -amount), (here, amount)]
            for step in range(self.steps):
                self._row([here[step], gone[step]], [1.0, -1.0], 0.0)
                # What is on the host has had its F and not its I.
                away = [gone[step], here[step], inputs[step], forward[step]]
                self._row(away, [1.0, -1.0, 1.0, -1.0], 0.0)
        return held

    def right_sides(self, objective: float) -> Numbers:
        """(rows,) the largest sums if the objective is at most so large."""
        largest = np.array(self.largest)
        for rank, window in self.windows.items():
            first, end = self.rooms[rank], self.rooms[rank] + self.steps
            largest[first:end] = window.room(objective, self.step, self.steps) / self.step
            largest[end] = objective / self.step
        return largest

    def is_disproved(self, prices: Numbers, objective: float) -> bool:
        """Whether prices (rows,) prove that the ranks cannot do all of their work: Lemma 66."""
        prices = np.where(self.is_exact, prices, np.maximum(prices, 0.0))
        columns = np.concatenate([columns for columns, _ in self.rows])
        of_row = np.repeat(prices, [len(columns) for columns, _ in self.rows])
        paid = np.bincount(columns, np.concatenate([values for _, values in self.rows]) * of_row)
        most, worth = np.array(self.most), np.array(self.worth)
        done = prices @ self.right_sides(objective) + np.maximum(worth - paid, 0.0) @ most
        scale = np.abs(prices) @ self.right_sides(objective) + worth @ most
        return bool(done + TINY * scale < worth @ most)


class Solver:
    """The simplex algorithm for a programme, which begins where it ended for the last objective."""

    def __init__(self, programme: Programme) -> None:
        from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

        self.programme = programme
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.solver.SetSolverSpecificParametersAsString(
            f"use_preprocessing: false max_number_of_iterations: {PIVOTS}"
        )
        columns = [self.solver.NumVar(0.0, most, "") for most in programme.most]
        for column, worth in zip(columns, programme.worth, strict=True):
            self.solver.Objective().SetCoefficient(column, worth)
        self.solver.Objective().SetMaximization()
        self.rows = [self.solver.Constraint(-math.inf, 0.0) for _ in programme.rows]
        for row, (own, values) in zip(self.rows, programme.rows, strict=True):
            for column, value in zip(own, values, strict=True):
                row.SetCoefficient(columns[column], value)

    def is_impossible(self, objective: float, is_stopped: Callable[[], bool]) -> bool:
        """Whether no plan has so small an objective, proven by prices; False if that is not known."""
        sides = self.programme.right_sides(objective).tolist()
        for row, largest, is_exact in zip(self.rows, sides, self.programme.is_exact, strict=True):
            row.SetBounds(largest if is_exact else -math.inf, largest)
        for _ in range(MOST_RUNS):
            if self.solver.Solve() == self.solver.OPTIMAL:
                prices = np.array([row.dual_value() for row in self.rows])
                return self.programme.is_disproved(prices, objective)
            if is_stopped():
                break
        return False


def flow_bound(problem: Problem, known: float, enough: float, is_stopped: Callable[[], bool]) -> float:
    """A lower bound of the objective from a ``known`` one, or one of at least ``enough``: Lemma 66."""
    if not known:
        return known
    ranks = (0, problem.pp_degree - 1)
    arrays, first = problem.arrays, problem.placement.stages_of[ranks[1]][0]
    way = float(arrays.duration[F, :first, 0].sum() + arrays.latency[:first, 0].sum())
    more, most = 0.0, known * MOST
    if problem.objective == "span":
        later = max(way, known / STEPS)
        while later < LATEST * known and pair_bound(problem, ranks[0], later) < most:
            later *= 1.25
        most = min(most, pair_bound(problem, ranks[0], later))
        more = way + later
    lags = np.array([lag for _, (letter, _), lag in links(problem, ranks) if letter != W])
    busiest = problem.microbatches * len("FIW") * problem.placement.chunks
    step = _best_step(lags[lags > 0], known / min(STEPS, 2 * busiest))
    windows = {ranks[0]: Window(0.0, 0.0), ranks[1]: Window(way, more)}
    solver = Solver(Programme(problem, windows, step, math.ceil((most + more) / step)))
    low, high, tried = known, most, known * (1 + CLOSE)
    while low < tried < high and low < enough and not is_stopped():
        if solver.is_impossible(tried, is_stopped):
            low = tried
        else:
            high = tried
        tried = (low + high) / 2 if high - low > CLOSE * low else high
    return max(known, low * (1 - SAFETY))


def _best_step(lags: Numbers, usual: float) -> float:
    """A length of steps, near the usual one, that divides the lags best."""
    fractions = lags / np.ceil(lags / usual)
    steps = [usual, *fractions[fractions > usual / 2].tolist()]
    lost = [float((lags - step * np.floor(lags / step + TINY)).sum()) for step in steps]
    return float(steps[int(np.argmin(lost))])
