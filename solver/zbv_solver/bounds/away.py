"""What microbatches that differ need of a rank: its time, and its memory while they are away.

Between its visits to a rank a microbatch is *away*: it takes its path through other stages, and the rank
holds its activations. How long it is away at least, and how much it holds, depends on the microbatch. A long
microbatch fills the memory for a long time, and others cannot run next to it, whatever the order. The bounds
that follow are in :mod:`.away_prices`, and their proofs in PROOFS.md, section 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import AMOUNT_ROUNDING, MEMORY_TOLERANCE
from zbv_solver.problem.problem import F, I, Problem

UNITS = 1000
"""Of memory in a rank's capacity. Amounts are rounded down to units."""
ROOM_STEP = 17
"""Units of memory next to an operation are rounded up to multiples of this."""


@dataclass(frozen=True, eq=False)
class Needs:
    """What the microbatches of every kind need of a rank, for K kinds, G gaps, O operations: Lemma 44."""

    held: FloatArray
    away: FloatArray
    """(G, K) memory held in a gap and the gap's length, both at least."""
    taken: FloatArray
    length: FloatArray
    """(O, K) memory that an operation's own cells hold while it runs, at least, and its length: the G + 1
    visits, then the rests."""
    count: IntArray
    """(K,) microbatches of the kind."""
    longest: int
    """The kind with the longest path."""
    capacity: float
    """Memory that all cells may hold."""

    @classmethod
    def of(cls, problem: Problem, paths: MicrobatchPaths, rank: int) -> Needs | None:
        """The needs of a rank; None if its memory has no limit or nothing is ever away: Lemma 44."""
        arrays, n = problem.arrays, problem.n_stages
        stages = list(problem.placement.stages_of[rank])
        visits = stages + [2 * n - 1 - stage for stage in reversed(stages)]
        length = paths.length[visits]
        away = np.maximum(paths.start[visits[1:]] - (paths.start[visits[:-1]] + length[:-1]), 0.0)
        capacity = memory_of_cells(problem, rank)
        if not (0 < capacity < np.inf and away.any()):
            return None
        forward = arrays.delta[F, stages]
        waits = least_held(problem, stages)
        upto = np.cumsum(forward, axis=0)
        return cls(
            held=np.concatenate([upto, upto[-2::-1]]),
            away=away,
            taken=np.concatenate([upto, upto[::-1], waits]),
            length=np.concatenate([length, paths.rest[stages]]),
            count=arrays.count,
            longest=int(np.argmax(paths.start[-1] + paths.length[-1])),
            capacity=capacity,
        )

    def area_bound(self) -> float:
        """Bound of the rank's window from memory times time: Lemma 44."""
        both = (self.held * self.away).sum(axis=0) + (self.taken * self.length).sum(axis=0)
        return float(both @ self.count) / self.capacity


@dataclass(frozen=True, eq=False)
class Demand:
    """The needs of a rank in units of memory, for K groups, G gaps, R classes of operations: Lemma 45."""

    units: IntArray
    """(G, K) memory that every microbatch of the group holds in a gap, at least."""
    away: FloatArray
    """(G, K) total length of the gap over the group."""
    count: IntArray
    """(K,) microbatches of the group."""
    longest: int
    """The group of a microbatch with the longest path."""
    room: IntArray
    """(R,) units next to an operation of the class, at most."""
    is_own: IntArray
    """(R,) 1 where the operations of the class are visits of this longest microbatch."""
    work: FloatArray
    """(R,) total length of the operations of the class."""
    row_of: IntArray
    group_of: IntArray
    room_of: IntArray
    """The gap of every gap of the needs (G,), the group of every kind (K,), and the room next to every
    operation of every kind (O, K)."""

    @classmethod
    def of(cls, needs: Needs, most_groups: int) -> Demand:
        """The needs with gaps, kinds and operations joined that are equal or nearly so: Lemma 45."""
        # A microbatch is in one gap at a time, so gaps with equal units are one.
        units, gap_of = np.unique(in_units(needs.held, needs.capacity), axis=0, return_inverse=True)
        away = np.zeros(units.shape)
        np.add.at(away, gap_of.reshape(-1), needs.away * needs.count)
        group_of = _groups(units.max(axis=0), (units * away).sum(axis=0), needs.count, most_groups)
        k = int(group_of.max()) + 1
        least, time = np.full((k, len(units)), UNITS), np.zeros((k, len(units)))
        members = np.zeros(k, np.int64)
        np.minimum.at(least, group_of, units.T)
        np.add.at(time, group_of, away.T)
        np.add.at(members, group_of, needs.count)
        taken = in_units(needs.taken, needs.capacity)
        room = np.where(taken < UNITS, np.minimum(-((taken - UNITS) // ROOM_STEP) * ROOM_STEP, UNITS), 0)
        own = np.zeros_like(needs.length)
        visits = len(needs.held) + 1
        # Unlike its visits, a rest of a microbatch may run while the microbatch is away.
        own[:visits, needs.longest] = needs.length[:visits, needs.longest]
        classes = [
            (int(value), is_own, float(work[room == value].sum()))
            for is_own, work in ((0, needs.length * needs.count - own), (1, own))
            for value in np.unique(room[work > 0])
        ]
        rooms, owned, worked = zip(*classes, strict=True) if classes else ((), (), ())
        return cls(
            units=np.ascontiguousarray(least.T),
            away=np.ascontiguousarray(time.T),
            count=members,
            longest=int(group_of[needs.longest]),
            room=np.array(rooms, dtype=np.int64),
            is_own=np.array(owned, dtype=np.int64),
            work=np.array(worked, dtype=np.float64),
            row_of=gap_of.reshape(-1),
            group_of=group_of,
            room_of=room,
        )


def _groups(size: IntArray, weight: FloatArray, count: IntArray, most: int) -> IntArray:
    """The group (K,) of every kind: its own, or if kinds are too many, with others of about its size."""
    if len(size) <= most:
        return np.arange(len(size))
    by_size = np.argsort(size, kind="stable")
    # Large kinds have most of the memory times time, so they stay alone.
    share = weight[by_size] / max(float(weight.sum()), 1e-300) + count[by_size] / count.sum()
    middle = (np.cumsum(share) - share / 2) / 2
    group_of = np.empty(len(size), np.int64)
    group_of[by_size] = np.unique(np.floor(middle * most), return_inverse=True)[1].reshape(-1)
    return group_of


def memory_of_cells(problem: Problem, rank: int) -> float:
    """Memory that all cells of a rank may hold, inf without a limit: Lemma 9."""
    limit, static = float(problem.arrays.limit[rank]), float(problem.arrays.static[rank])
    return (limit - static + 2 * MEMORY_TOLERANCE * max(limit, static)) * (1 + AMOUNT_ROUNDING)


def least_held(problem: Problem, stages: list[int]) -> FloatArray:
    """Memory (c, K) that a cell holds at least while its virtual rest waits: Lemma 44."""
    delta = problem.arrays.delta
    forward: FloatArray = delta[F, stages]
    return forward - np.clip(-delta[I, stages], 0.0, forward)


def in_units(amount: FloatArray, capacity: float) -> IntArray:
    """Amounts in units, rounded down: Lemma 45.

    The capacity is half a unit more than all units, so that what fills it but for rounding has all units.
    """
    share = np.minimum(amount / capacity, 1.0) * (1 - AMOUNT_ROUNDING)
    units: IntArray = np.floor(share * (UNITS + 0.5)).astype(np.int64)
    return units
