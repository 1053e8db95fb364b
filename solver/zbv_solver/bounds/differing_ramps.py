"""The idle time that both ramps of a rank's window force where microbatches differ.

Before a time t of the window, a rank has begun only what the paths of the microbatches and its memory allow;
the same holds for the time s before the window's end. The window is at least the rank's load plus the idle
time of both ramps. Which microbatches are in a ramp is a knapsack problem: each is in a state in which it
has done some work and holds some memory. In the window of another rank, W's may wait for the time after it.

Small microbatches return before the others and hide their idle time, so the bound is also that of the others
alone. The proofs are in PROOFS.md, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.away import UNITS, in_units, least_held, memory_of_cells
from zbv_solver.bounds.away_prices import sets
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.problem import F, Problem

TIMES, MICROBATCHES = 12, 1500
"""Times of a ramp that are tried at first, then as many on either side of the best. If times and microbatches
multiply to more than the second number, fewer times."""
NEVER = UNITS + 1
"""Units of a state that the microbatch cannot be in."""


class _Ramp(NamedTuple):
    """The most work that a rank does before a time, or in the last ``time`` and later."""

    time: float
    work: float


class Ramps(NamedTuple):
    """What microbatches of K kinds do on a rank of C chunks, relative to a window: Lemmas 53, 54 and 55."""

    length: FloatArray
    head: FloatArray
    tail: FloatArray
    """(2C, K) of the visits: F's by chunk, then virtual backwards in reverse. Heads begin with the window,
    and tails end with it."""
    rest: FloatArray
    """(C, K) length of the virtual rest of a chunk."""
    held: IntArray
    waits: IntArray
    """(C, K) units of memory that a cell holds until its virtual backward ends, and from then until its
    rest ends, at least."""
    copies: IntArray
    """(K,) microbatches of the kind."""
    ends_later: bool
    """The rank's rests may run after the window's end."""

    @classmethod
    def of(cls, problem: Problem, paths: MicrobatchPaths, rank: int, window: int | None) -> Ramps:
        """A rank in the window of a rank, or with None in that of all ranks: Lemma 53."""
        n, stages_of = problem.n_stages, problem.placement.stages_of
        own = list(stages_of[rank])
        visits = own + [2 * n - 1 - stage for stage in reversed(own)]
        origin = 0.0 if window is None else paths.start[stages_of[window][0]]
        exits = list(range(n)) if window is None else list(stages_of[window])
        capacity = memory_of_cells(problem, rank)
        # Without any space, nothing holds memory.
        capacity = capacity if capacity > 0 else np.inf
        held = problem.arrays.delta[F, own]
        return cls(
            length=paths.length[visits],
            head=paths.start[visits] - origin,
            tail=paths.tails(exits)[visits],
            rest=paths.rest[own],
            held=in_units(held, capacity),
            waits=in_units(least_held(problem, own), capacity),
            copies=problem.arrays.count,
            ends_later=window not in (None, rank),
        )

    def later(self, without: int) -> Ramps:
        """Without so many of the kinds that return first, which may do all of their work in either ramp."""
        kept = np.sort(np.argsort(self.head[len(self.rest)], kind="stable")[without:])
        return Ramps(
            self.length[:, kept],
            self.head[:, kept],
            self.tail[:, kept],
            self.rest[:, kept],
            self.held[:, kept],
            self.waits[:, kept],
            self.copies[kept],
            self.ends_later,
        )

    def small(self) -> int:
        """How many kinds return before the others by the largest factor."""
        returns = np.sort(self.head[len(self.rest)])
        longer = returns[1:] / np.maximum(returns[:-1], TINY * returns[-1] + np.finfo(float).tiny)
        return int(np.argmax(longer)) + 1 if len(longer) else 0

    def early(self, time: float) -> _Ramp:
        """The most work that the rank does before a time: Lemma 53.

        In state v >= 1, a microbatch has begun its first v visits.
        """
        chunks = len(self.rest)
        backward = np.arange(2 * chunks - 1, chunks - 1, -1)
        ready = (self.head + self.length)[backward]
        done = np.clip(time - self.head, 0.0, self.length)
        done[backward] += np.clip(time - ready, 0.0, self.rest)
        # What a cell whose backward has begun holds at least.
        left = np.where(ready + self.rest < time, 0, np.where(ready < time, self.waits, self.held))
        units, work = [], []
        for v in range(1, 2 * chunks + 1):
            cells = [left[c] if backward[c] < v else self.held[c] for c in range(min(v, chunks))]
            units.append(np.where(self.head[v - 1] < time, sum(cells), NEVER))
            work.append(done[:v].sum(axis=0))
        # The rank does one thing at a time, and nothing before the least head.
        most = self._most(np.array(units), np.array(work))
        return _Ramp(time, min(most, max(0.0, time - float(self.head.min()))))

    def late(self, time: float) -> _Ramp:
        """The most work that the rank does in the last ``time`` and, of rests, after it: Lemma 54.

        In state v, the visits v … 2C - 1 of a microbatch end in this time. Of every other chunk the rest ends
        then, or it does not.
        """
        chunks = len(self.rest)
        done = np.clip(time - self.tail, 0.0, self.length)
        rests = self.rest if self.ends_later else np.minimum(self.rest, time)
        # An F that may start in this time may hold nothing before.
        begun = np.where((self.tail + self.length)[:chunks] < time, 0, self.held)
        units, work, last = [], [], []
        for v in range(2 * chunks, -1, -1):
            possible = self.tail[v] < time if v < 2 * chunks else np.ones(len(self.copies), dtype=bool)
            choices = [(True,) if 2 * chunks - 1 - c >= v else (False, True) for c in range(chunks)]
            for waits in product(*choices):
                cells = [
                    (begun[c] if c >= v else self.held[c]) if 2 * chunks - 1 - c >= v else self.waits[c]
                    for c in range(chunks)
                    if waits[c]
                ]
                units.append(np.where(possible, sum(cells, np.zeros_like(self.copies)), NEVER))
                last.append(sum((rests[c] for c in range(chunks) if waits[c]), np.zeros(len(self.copies))))
                work.append(last[-1] + done[v:].sum(axis=0))
        most = self._most(np.array(units), np.array(work))
        # Only rests may run after the window, so visits do at most `busy`.
        busy = max(0.0, time - float(self.tail.min()))
        if not self.ends_later:
            return _Ramp(time, min(most, time))
        if most > busy:
            most = min(most, busy + self._most(np.array(units), np.array(last)))
        return _Ramp(time, most)

    def bound(self) -> float:
        """The rank's load and the idle time of both ramps: Lemma 55."""
        load = float((self.length.sum(axis=0) + self.rest.sum(axis=0)) @ self.copies)
        # A ramp has most idle time just before a first backward may start, in reverse a first F.
        tries = max(3, min(TIMES, MICROBATCHES // int(self.copies.sum())))
        early = _ramps(self.early, self.head[len(self.rest)], tries)
        late = _ramps(self.late, self.tail[len(self.rest) - 1], tries)
        return max(
            (
                load + before.time - before.work + after.time - after.work
                for before in early
                for after in late
                # If both ramps can hold the whole load, nothing is claimed. The margin is for rounding.
                if before.work + after.work < load * (1 - TINY)
            ),
            default=0.0,
        )

    def _most(self, units: IntArray, work: FloatArray) -> float:
        """The most work of states (n, K) that the memory holds together, a state for every microbatch."""
        return float(sets(units, self.copies, 0, work)[0][UNITS])


def _ramps(ramp: Callable[[float], _Ramp], times: FloatArray, tries: int) -> list[_Ramp]:
    """Ramps of time 0, of a few of the ``times``, and of some next to that with the most idle time."""
    times = np.unique(times[times > 0])
    if len(times) == 0:
        return [ramp(0.0)]
    tried = np.unique(np.linspace(0, len(times) - 1, tries).astype(np.int64))
    found = [ramp(float(times[at])) for at in tried]
    best = int(np.argmax([each.time - each.work for each in found]))
    low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    near = np.unique(np.linspace(low, high, 2 * tries + 1).astype(np.int64))
    return [ramp(0.0), *found, *(ramp(float(times[at])) for at in np.setdiff1d(near, tried))]


class RampEffort(NamedTuple):
    """How many ranks, and without how many of the kinds that return first, besides without all small ones."""

    ranks: int
    without: tuple[int, ...]


FULL, THOROUGH = RampEffort(1, (0, 1)), RampEffort(3, (0, 1, 2, 4))


def ramp_bounds(problem: Problem, effort: RampEffort) -> Iterator[tuple[int, float]]:
    """Ranks and bounds of the objective, in the ranks' windows and rank 0's: Lemmas 53, 54 and 55.

    The last rank comes first: it is idle longest. None for more than two chunks.
    """
    if len(problem.placement.stages_of[0]) > 2:
        return
    paths = MicrobatchPaths.of(problem)
    for rank in range(problem.pp_degree - 1, max(-1, problem.pp_degree - 1 - effort.ranks), -1):
        windows = [None] if problem.objective == "makespan" else sorted({0, rank})
        for window in windows:
            ramps = Ramps.of(problem, paths, rank, window)
            for without in sorted({*effort.without, ramps.small()}):
                if without < len(ramps.copies):
                    yield rank, ramps.later(without).bound()
