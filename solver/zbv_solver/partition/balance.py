"""The cut whose most loaded rank has the least to do, exactly, for placements V and single.

Under V a rank hosts a piece from either end of what is left between its neighbours' pieces, so ranks are
served from the outside in. A state (i, j) says that the parts before i and from j on are given out; which
states the first ranks can reach with no load above T is a sweep, and T is found by bisection between loads
that occur. Of every state that cannot be left for a load above T the sweep notes that load: the least of
them bounds what is possible from below, which ends the bisection at an exact value. The proof is Lemma 34 of
bounds/PROOFS.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.jit import compiled
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.cut_tables import FloatArray
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.numeric import ROUNDING

IntArray = NDArray[Any]

LOAD, EXCESS = 0, 1
"""What is balanced: a rank's work for a microbatch, or its memory beyond its room."""

FIRST_STEP = 0.01
"""Share of the mean load by which T first grows, until any cut is found."""


@dataclass(frozen=True)
class Balanced:
    """A cut, and what its worst rank has to do; no cut's worst rank has less."""

    cut: Cut
    worst: float


def balanced_cut(space: CutSpace, reference: Bounds) -> Balanced | None:
    """The cut with the least load of the most loaded rank, of those that fit the memory limit.

    Load is a rank's F's and its cheaper backwards for one microbatch, as in
    :meth:`~zbv_solver.problem.problem.Problem.busy_time`. Stages are recomputed where their rank would not fit
    without. Of several cuts one near the bounds of the reference. Only placements V and single. None where
    no cut fits. Lemma 34.
    """
    return _Balancer(space, reference, LOAD).solve()


def smallest_cut(space: CutSpace, reference: Bounds) -> Balanced | None:
    """The cut that needs the least memory beyond the limits; ``worst`` is that, negative where it fits.

    Lemma 34.
    """
    return _Balancer(space, reference, EXCESS).solve()


class _Balancer:
    def __init__(self, space: CutSpace, reference: Bounds, mode: int):
        placement = space.placement
        self.space, self.tables, self.p = space, space.tables, placement.pp_degree
        self.two_sided, self.least = placement.kind == "v", space.least
        self.bounds, self.reference = reference, np.array(reference)
        lower, upper = space.ranges
        fixed = np.where(lower == upper, lower, -1)
        stages = placement.n_stages
        free = np.full(self.p, -1)
        self.fixed = np.array(
            [fixed[1 : self.p + 1], fixed[stages - 1 : stages - 1 - self.p : -1] if self.two_sided else free]
        )
        self.mode = mode
        self.reached = np.zeros((self.p, space.tables.n + 1, space.tables.n + 1), np.uint8)

    def solve(self) -> Balanced | None:
        tables, best = self.tables, self._reference_itself()
        scale = float(tables.cheapest[-1]) / self.p
        low = scale
        if self.mode == EXCESS:
            scale, low = float(tables.sums[:, 3, -1].max()), -float(tables.room.max())
        most, step = low, FIRST_STEP
        while best is None or best.worst - low > ROUNDING * abs(best.worst):
            found, beyond = self._try(most)
            if found is not None:
                best = found
            elif not np.isfinite(beyond):
                return best
            else:
                low = max(low, beyond)
            if best is None:
                most, step = low + step * scale, 2 * step
            else:
                middle = (low + best.worst) / 2
                most = middle if middle < best.worst else low
        return best

    def _reference_itself(self) -> Balanced | None:
        """The reference as a first cut, where it fits: most often it is near, and few sweeps are left."""
        recompute = self.space.fitting(self.bounds) if self.mode == LOAD else None
        if recompute is None:
            return None
        return Balanced(self.space.cut(self.bounds, recompute), self.space.worst_load(self.bounds, recompute))

    def _try(self, most: float) -> tuple[Balanced | None, float]:
        """A cut whose worst rank has at most that much, or a bound on the worst rank of any cut."""
        tables = self.tables
        arrays = (tables.sums, tables.workspace, tables.cheapest, tables.room, tables.variants)
        self.reached[:] = 0
        end, beyond = _sweep(
            *arrays, self.mode, most, self.two_sided, self.least, self.fixed, self.reference, self.reached
        )
        if end[0] < 0:
            return None, beyond
        bounds, variants = _trace(
            *arrays[:2],
            *arrays[3:],
            self.mode,
            most,
            self.two_sided,
            self.least,
            self.reference,
            self.reached,
            end,
        )
        worst = max(
            _measure(
                *arrays[:2], *arrays[3:], self.mode, rank, *_pieces(bounds, rank, self.p, self.two_sided)
            )[0]
            for rank in range(self.p)
        )
        return Balanced(Cut.at(self.space.problem.places[bounds], variants), float(worst)), np.inf


def _pieces(bounds: IntArray, rank: int, p: int, two_sided: bool) -> tuple[int, int, int, int]:
    """Begin and end of a rank's one or two stages."""
    a, b = int(bounds[rank]), int(bounds[rank + 1])
    if not two_sided:
        return a, b, b, b
    return a, b, int(bounds[2 * p - 1 - rank]), int(bounds[2 * p - rank])


@compiled
def _measure(
    sums: FloatArray,
    workspace: FloatArray,
    room: FloatArray,
    variants: int,
    mode: int,
    rank: int,
    a: int,
    b: int,
    c: int,
    d: int,
) -> tuple[float, int]:  # pragma: no cover - compiled
    """Least load of a rank that fits (inf: none), or least excess; and which of its two stages recompute.

    The stages are [a, b) and [c, d); bit 0 of the second value is the first stage's, bit 1 the other's.
    """
    best, choice = np.inf, 0
    for upper in range(variants):
        if upper == 1 and c == d:
            continue
        for lower in range(variants):
            if lower == 1 and a == b:
                continue
            need = max(workspace[lower, a, b], workspace[upper, c, d]) + (
                sums[lower, 3, b] - sums[lower, 3, a] + sums[upper, 3, d] - sums[upper, 3, c]
            )
            if mode == EXCESS:
                value = need - room[rank]
            elif need > room[rank]:
                continue
            else:
                value = sums[lower, 0, b] - sums[lower, 0, a] + sums[upper, 0, d] - sums[upper, 0, c]
                value += min(
                    sums[lower, 1, b] - sums[lower, 1, a], sums[lower, 2, b] - sums[lower, 2, a]
                ) + min(sums[upper, 1, d] - sums[upper, 1, c], sums[upper, 2, d] - sums[upper, 2, c])
            if value < best:
                best, choice = value, lower + 2 * upper
    return best, choice


@compiled
def _sweep(
    sums: FloatArray,
    workspace: FloatArray,
    cheapest: FloatArray,
    room: FloatArray,
    variants: int,
    mode: int,
    most: float,
    two_sided: bool,
    least: int,
    fixed: IntArray,
    reference: IntArray,
    reached: IntArray,
) -> tuple[tuple[int, int, int], float]:  # pragma: no cover - compiled
    """Mark the states that ranks can reach; return where the last one can end (i, k, j), or a lower bound."""
    p, n = len(room), sums.shape[2] - 1
    beyond = np.inf
    reached[0, 0, n] = 1
    for rank in range(p - 1):
        reserve = (p - 1 - rank) * least * (2 if two_sided else 1)
        for i in range(n + 1):
            lowest, highest = n + 1, -1
            for j in range(i, n + 1):
                if reached[rank, i, j]:
                    lowest, highest = min(lowest, j), j
            if highest < 0:
                continue
            begin, end = i + least, n - reserve
            if fixed[0, rank] >= 0:
                begin, end = max(begin, fixed[0, rank]), fixed[0, rank]
            for after in range(begin, end + 1):
                alone, _ = _measure(sums, workspace, room, variants, mode, rank, i, after, n, n)
                if alone > most:
                    beyond = min(beyond, alone)
                    break
                if not two_sided:
                    reached[rank + 1, after, n] = 1
                    continue
                # Beyond this place more would be left than the ranks after this one can take.
                farthest = n
                if mode == LOAD:
                    enough = cheapest[after] + (p - 1 - rank) * most * (1 + ROUNDING)
                    farthest = np.searchsorted(cheapest, enough, side="right") - 1
                c, painted = -1, -1
                for j in range(max(lowest, after + reserve + least), highest + 1):
                    if not reached[rank, i, j]:
                        continue
                    last = j - least
                    if c < 0:
                        # the first: by bisection
                        c, above = after + reserve, last + 1
                        while c < above:
                            middle = (c + above) // 2
                            value, _ = _measure(
                                sums, workspace, room, variants, mode, rank, i, after, middle, j
                            )
                            if value <= most:
                                above = middle
                            else:
                                c = middle + 1
                    else:
                        while c <= last:
                            value, _ = _measure(sums, workspace, room, variants, mode, rank, i, after, c, j)
                            if value <= most:
                                break
                            c += 1
                    if c > after + reserve:
                        value, _ = _measure(sums, workspace, room, variants, mode, rank, i, after, c - 1, j)
                        beyond = min(beyond, value)
                    if last > farthest:
                        left = cheapest[max(c, farthest + 1)] - cheapest[after]
                        beyond = min(beyond, left / (p - 1 - rank))
                        last = farthest
                    if fixed[1, rank] >= 0:
                        if c <= fixed[1, rank] <= last:
                            reached[rank + 1, after, fixed[1, rank]] = 1
                        continue
                    for k in range(max(c, painted + 1), last + 1):
                        reached[rank + 1, after, k] = 1
                    painted = max(painted, last)
                    if c > farthest:
                        # No later j leaves fewer parts than up to ``farthest`` either, or costs less here.
                        if farthest < n:
                            left = cheapest[farthest + 1] - cheapest[after]
                            beyond = min(beyond, left / (p - 1 - rank))
                        break
    rank = p - 1
    found, nearest = (-1, -1, -1), 4 * n
    for i in range(n + 1):
        for j in range(i, n + 1):
            if not reached[rank, i, j]:
                continue
            if mode == LOAD and cheapest[j] - cheapest[i] > most * (1 + ROUNDING):
                beyond = min(beyond, cheapest[j] - cheapest[i])
                continue
            begin, end = i + least, j - least
            if not two_sided:
                begin = end = j if j - i >= least else i - 1
            elif fixed[0, rank] >= 0:
                begin, end = max(begin, fixed[0, rank]), min(end, fixed[0, rank])
            for k in range(max(begin, i), end + 1):
                value, _ = _measure(sums, workspace, room, variants, mode, rank, i, k, k, j)
                if value > most:
                    beyond = min(beyond, value)
                    continue
                distance = abs(i - reference[rank]) + abs(k - reference[rank + 1])
                if two_sided:
                    distance += abs(j - reference[rank + 2])
                if distance < nearest:
                    nearest, found = distance, (i, k, j)
    return found, beyond


@compiled
def _trace(
    sums: FloatArray,
    workspace: FloatArray,
    room: FloatArray,
    variants: int,
    mode: int,
    most: float,
    two_sided: bool,
    least: int,
    reference: IntArray,
    reached: IntArray,
    end: tuple[int, int, int],
) -> tuple[IntArray, IntArray]:  # pragma: no cover - compiled
    """Bounds and recomputed stages of a way to the end; of several, near the reference."""
    p, n = reached.shape[0], reached.shape[1] - 1
    stages = 2 * p if two_sided else p
    bounds, recompute = np.zeros(stages + 1, np.int64), np.zeros(stages, np.int64)
    i, k, j = end
    bounds[stages] = n
    bounds[p - 1], bounds[p] = i, k
    if two_sided:
        bounds[p + 1] = j
    _, choice = _measure(sums, workspace, room, variants, mode, p - 1, i, k, k, j)
    recompute[p - 1] = choice & 1
    if two_sided:
        recompute[p] = choice >> 1
    for rank in range(p - 2, -1, -1):
        best, before, behind = 4 * n, -1, -1
        for i0 in range(i - least + 1):
            for j0 in range(j + least if two_sided else n, n + 1):
                if not reached[rank, i0, j0]:
                    continue
                value, made = _measure(sums, workspace, room, variants, mode, rank, i0, i, j, j0)
                if value > most:
                    continue
                difference = abs(i0 - reference[rank])
                if two_sided:
                    difference += abs(j0 - reference[stages - rank])
                if difference < best:
                    best, before, behind, choice = difference, i0, j0, made
        recompute[rank] = choice & 1
        if two_sided:
            recompute[stages - 1 - rank] = choice >> 1
            bounds[stages - 1 - rank], bounds[stages - rank] = j, behind
        bounds[rank], bounds[rank + 1] = before, i
        i, j = before, behind
    return bounds, recompute
