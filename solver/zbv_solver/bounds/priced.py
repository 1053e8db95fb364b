"""Bounds of a rank's window from the price of the time that microbatches spend on other ranks.

The :class:`~zbv_solver.bounds.memory_states.MemoryStates` of a rank with little memory say what it can run
with how many microbatches under way. A price per unit of time in a gap turns "every microbatch is away for at
least its path" into time that the rank must take (a Lagrangian relaxation), and shortest paths through the
states give a bound for any number of microbatches. Heads and tails of the rank's operations, which know the
memory of the other ranks, bound what can be done in both ramps.

Where half of 1F1B's memory or less is available, this is often the best bound. Where memory suffices for a
steady state without idle time, :mod:`.ramps` proves more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.directions import DOWN, UP, directions
from zbv_solver.bounds.memory_states import MOST_STATES, MemoryStates
from zbv_solver.bounds.prices import Prices
from zbv_solver.bounds.ramps import Window
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.problem import Problem

STATES = 100_000
"""States of all ranks together that a bound may look at. Three ranks are always looked at."""
PAIRS = 2_000_000
"""Pairs of a state and a time that a ramp may look at."""


class Ramp(NamedTuple):
    """One end of a rank's window in its own direction of time; the late ramp is read backwards.

    Visits and gaps are in the order in which this direction passes them.

    Attributes
    ----------
    heads
        (gaps + 1, n) earliest starts of the visits of the first n microbatches.
    ends
        (gaps, n) earliest ends of the gaps.
    longest_wait, paths, price
        (gaps,) of the gaps: the most of a wait that counts, the path and the price.
    behind
        (N, gaps + 1) per state: microbatches that have begun a visit but not their last one.
    value
        (N,) what a state adds to the value of the work done.
    work, cell_work, longest
        (N,) work done of the microbatches in ``behind``, work of every other one that has begun its last
        visit, and the longest duration.
    least
        (N,) microbatches that have surely begun their last visit.
    begin
        The rank runs nothing before this time.
    """

    heads: FloatArray
    ends: FloatArray
    longest_wait: FloatArray
    paths: FloatArray
    price: FloatArray
    behind: IntArray
    value: FloatArray
    work: FloatArray
    cell_work: float
    longest: float
    least: IntArray
    begin: float

    def times(self, m: int) -> FloatArray:
        """Times to divide the window at: 0 and the heads within the first two rounds of microbatches."""
        last = min(int(self.behind.max()) + 1, self.heads.shape[1] - 1)
        until = float(self.heads[-1, last])
        if self.heads.shape[1] < m:
            # Later microbatches are unknown: they must not have begun.
            until = min(until, float(self.heads[:, -1].min()))
        times = np.unique(np.append(self.heads, 0.0))
        times = times[(times >= 0.0) & (times <= until)]
        few = max(1, min(len(times), PAIRS // len(self.value)))
        return times[np.linspace(0, len(times) - 1, few).astype(np.int64)] if len(times) else times

    def begun(self, times: FloatArray) -> IntArray:
        """Microbatches of which something can have begun before each time."""
        return np.array([max(np.searchsorted(row, time) for row in self.heads) for time in times], np.int64)


def early_ramp(model: MemoryStates, prices: Prices, heads: FloatArray) -> Ramp:
    """The begin of a window: Lemma 40."""
    gaps, chunks = len(model.paths), model.chunks
    behind = _sums(model.states[:, :gaps][:, ::-1])[:, ::-1]
    waiting = model.states[:, gaps:]
    # The backward of chunk j is visit 2 chunks - 1 - j.
    rests = behind[:, chunks:][:, ::-1] - waiting
    return Ramp(
        heads,
        heads[1:],
        np.full(gaps, np.inf),
        model.paths,
        prices.price,
        np.ascontiguousarray(behind),
        prices.potential + prices.cost * behind[:, 0],
        behind @ model.duration[: gaps + 1] + rests @ model.duration[gaps + 1 :],
        float(model.duration.sum()),
        float(model.duration.max()),
        np.maximum(0, -rests).max(axis=1),
        float(heads[0, 0]),
    )


def late_ramp(model: MemoryStates, prices: Prices, tails: FloatArray, closes: bool) -> Ramp:
    """The end of a window, backwards; ``closes`` says that no W is left after it: Lemma 40."""
    gaps, chunks = len(model.paths), model.chunks
    ahead = _sums(model.states[:, :gaps])
    visits = model.duration[: gaps + 1]
    work, cell_work, begin = ahead @ visits, float(visits.sum()), float(tails.min())
    if closes:
        rests = ahead[:, chunks:][:, ::-1] + model.states[:, gaps:]
        work = work + rests @ model.duration[gaps + 1 :]
        cell_work, begin = float(model.duration.sum()), 0.0
    started = tails + visits[:, None]
    return Ramp(
        np.ascontiguousarray(tails[::-1]),
        # A gap that has not ended is at least as long as its path, and its last part is in this ramp.
        np.ascontiguousarray(started[:-1][::-1]),
        np.ascontiguousarray(model.paths[::-1]),
        np.ascontiguousarray(model.paths[::-1]),
        np.ascontiguousarray(prices.price[::-1]),
        np.ascontiguousarray(ahead[:, ::-1]),
        -prices.potential,
        work,
        cell_work,
        float(model.duration.max()),
        np.zeros(len(ahead), np.int64),
        begin,
    )


def _sums(counts: IntArray) -> IntArray:
    """(N, gaps + 1) sums of the first 0, 1, … columns."""
    return np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(counts, axis=1)], axis=1)


def window_bound(window: Window, rank: int, model: MemoryStates, prices: Prices, closes: bool) -> float:
    """Bound of a window from the price of all microbatches and both ramps: Lemma 41.

    ``closes`` says that the window contains all W's of the rank.
    """
    own, m = window.forwards.stages[rank], window.microbatches
    heads = np.concatenate([window.heads[UP, own], window.heads[DOWN, own[::-1]]])
    tails = np.concatenate([window.tails[DOWN, own], window.tails[UP, own[::-1]]])
    ramps = early_ramp(model, prices, heads), late_ramp(model, prices, tails, closes)
    early, late = (ramp.times(m) for ramp in ramps)
    begun, left = ramps[0].begun(early), ramps[1].begun(late)
    gained, kept = (
        early - _most_saved(ramps[0], prices.cost, early),
        late - _most_saved(ramps[1], prices.cost, late),
    )
    bounds = m * prices.slope + gained[:, None] + kept[None, :]
    # The ramps must not overlap.
    apart = begun[:, None] + left[None, :] < m
    return float(bounds[apart].max(initial=0.0))


def priced_bounds(problem: Problem, known: int) -> Iterator[tuple[int, float]]:
    """Bounds of the objective, each with its rank, from the first and last ``known`` microbatches: Lemma 41.

    There is none for a rank that need not be idle in its cheapest steady state.
    """
    forwards, backwards = directions(problem)
    work = forwards.work.sum(axis=(1, 2))
    last, m = problem.pp_degree - 1, problem.microbatches
    # In a V, the innermost rank has most to wait for. The window of rank 0 has the longest ramps.
    ranks = dict.fromkeys([last, 0, int(work.argmax()), *range(last)])
    makespan = problem.objective == "makespan"
    window = Window.of(forwards, backwards, None if makespan else 0, known, m)
    states = 0
    for number, rank in enumerate(ranks):
        if number >= 3 and states > STATES:
            return
        model = MemoryStates.of(forwards, rank, m)
        # Without a limit or with too many states, finding that out counts as the most states.
        states += MOST_STATES if model is None else len(model.states)
        if model is None:
            continue
        prices = Prices.best(model)
        if prices.slope > float(work.max()) * (1 + TINY):
            yield rank, window_bound(window, rank, model, prices, makespan or rank == 0)


@compiled
def _most_saved(ramp: Ramp, cost: float, times: FloatArray) -> FloatArray:  # pragma: no cover - compiled
    """The most that a ramp can save of the cost of all microbatches, for every time at its end: Lemma 40."""
    heads, behind = ramp.heads, ramp.behind
    gaps, n = ramp.ends.shape
    most = np.full(len(times), -np.inf)
    waits = np.zeros((gaps, n + 1))
    count = np.zeros(gaps + 1, np.int64)
    for at in range(len(times)):
        time = times[at]
        for i in range(gaps + 1):
            count[i] = np.searchsorted(heads[i], time)
        for i in range(gaps):
            for k in range(n):
                waits[i, k + 1] = waits[i, k] + min(ramp.longest_wait[i], max(0.0, ramp.ends[i, k] - time))
        room = max(0.0, time - ramp.begin) * (1 + TINY) + ramp.longest
        for s in range(len(behind)):
            for z in range(ramp.least[s], count[gaps] + 1):
                fits = ramp.work[s] + z * ramp.cell_work <= room
                for i in range(gaps):
                    fits = fits and z + behind[s, i] <= count[i]
                if not fits:
                    break
                saved = ramp.value[s] + cost * z
                for i in range(gaps):
                    first, last = z + behind[s, i + 1], z + behind[s, i]
                    saved += ramp.price[i] * (ramp.paths[i] * last - (waits[i, last] - waits[i, first]))
                most[at] = max(most[at], saved)
    return most
