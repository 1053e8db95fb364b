"""The states of a rank's memory, and what work costs in each when waiting is paid for.

A microbatch passes a rank several times: F on each of its chunks, then the backwards in the opposite order.
Between two visits it is in a *gap*: on other ranks, for at least the length of its path there. A state of the
rank counts the microbatches in every gap and the cells of every chunk that wait for their W. As microbatches
ascend, the state determines what the rank holds, so only states that fit its memory occur.

Pay an amount ``price[i]`` per unit of time for every microbatch in gap i, such that no state earns more than
1 per unit of time. Whatever a rank does then costs its time less what it earns, and a cheapest path through
the states bounds the time that a microbatch takes. Because a microbatch earns at least price · path, this is
a Lagrangian relaxation of the paths: only their averages must be long enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.directions import (
    DOWN,
    FREED_BY_REST,
    HELD,
    REST_AFTER,
    UP,
    Direction,
)
from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled

MOST_CODES = 4_000_000
"""Entries of the table that finds a state."""
MOST_STATES = 60_000


@dataclass(frozen=True, eq=False)
class MemoryStates:
    """The states of a rank from which all work can still be completed: Lemma 38.

    Attributes
    ----------
    states
        (N, gaps + chunks): microbatches in every gap, and cells that wait for their W. The last one is the
        empty state; an action leads from a state to a later one, unless it is F of chunk 0.
    follows
        (N, 3 chunks) the state after an action, or -1: F's and backwards as a microbatch passes them, W's by
        chunk.
    duration
        (3 chunks,) of the actions.
    paths
        (gaps,) the least time between the starts of two visits.
    amount
        (gaps + chunks,) memory that a microbatch in a gap, or a cell that waits, holds.
    """

    states: IntArray
    follows: IntArray
    duration: FloatArray
    paths: FloatArray
    amount: FloatArray

    @property
    def chunks(self) -> int:
        """Number of chunks of the rank."""
        return len(self.amount) - len(self.paths)

    @classmethod
    def of(cls, direction: Direction, rank: int, microbatches: int) -> MemoryStates | None:
        """The states of a rank in the forward direction; None if there are too many of them."""
        work, memory = direction.work[rank], direction.memory[rank]
        chunks = work.shape[1]
        gaps = 2 * chunks - 1
        # A cell of chunk j holds memory from its F to its backward: in the gaps j ... gaps - 1 - j.
        upto = np.cumsum(memory[HELD])
        amount = np.concatenate([[upto[min(i, gaps - 1 - i)] for i in range(gaps)], memory[FREED_BY_REST]])
        capacity = float(direction.capacity[rank])
        if not np.isfinite(capacity) or amount[:gaps].min() <= 0:
            return None
        # W's that hold no memory may wait forever: they are left out, which only relaxes.
        modelled = amount > 0
        most = np.zeros(len(amount), np.int64)
        most[modelled] = np.minimum(capacity / amount[modelled], microbatches * chunks).astype(np.int64)
        if np.prod(most + 1.0) > MOST_CODES:
            return None
        change = np.zeros((3 * chunks, len(amount)), np.int64)
        for i in range(2 * chunks):
            if i > 0:
                change[i, i - 1] = -1
            if i < gaps:
                change[i, i] = 1
            if i >= chunks:
                j = 2 * chunks - 1 - i
                change[i, gaps + j] = 1 if modelled[gaps + j] else 0
                change[2 * chunks + j, gaps + j] = -1
        states, follows = _explore(change, amount, memory[HELD], capacity, most + 1, MOST_STATES)
        if not len(states):
            return None
        states, follows = _completable(states, follows, change)
        rests = np.where(modelled[gaps:], work[REST_AFTER], 0.0)
        duration = np.concatenate([work[UP], work[DOWN, ::-1], rests])
        return cls(states, follows, duration, shortest_gaps(direction, rank), amount)


def shortest_gaps(direction: Direction, rank: int) -> FloatArray:
    """The least time from the start of every visit of a rank to that of the next one: Lemmas 10 and 38."""
    p, chunks = direction.stages.shape
    n = p * chunks
    up, down = np.zeros(n), np.zeros(n)
    up[direction.stages], down[direction.stages] = direction.work[:, UP], direction.work[:, DOWN]
    latency = direction.latency[: n - 1]
    steps = np.concatenate([up + np.append(latency, 0.0), down[::-1] + np.append(latency[::-1], 0.0)])
    start = np.concatenate([[0.0], np.cumsum(steps)])
    own = direction.stages[rank]
    return np.diff(start[np.concatenate([own, 2 * n - 1 - own[::-1]])])


@compiled
def _explore(
    change: IntArray, amount: FloatArray, held: FloatArray, capacity: float, sizes: IntArray, most: int
) -> tuple[IntArray, IntArray]:  # pragma: no cover - compiled
    """The states and what follows them; empty if there are more than ``most``."""
    actions, n = change.shape
    chunks = len(held)
    place = np.ones(n, np.int64)
    for i in range(1, n):
        place[i] = place[i - 1] * sizes[i - 1]
    table = np.full(place[n - 1] * sizes[n - 1], -1, np.int32)
    states = np.zeros((most, n), np.int64)
    follows = np.full((most, actions), -1, np.int64)
    table[0] = 0
    count, at = 1, 0
    while at < count:
        holds = 0.0
        for i in range(n):
            holds += states[at, i] * amount[i]
        for a in range(actions):
            fits = a >= chunks or holds + held[a] <= capacity
            code, moves = 0, False
            for i in range(n):
                value = states[at, i] + change[a, i]
                moves = moves or change[a, i] != 0
                if value < 0 or value >= sizes[i]:
                    fits = False
                code += value * place[i]
            if not fits or not moves:
                continue
            if table[code] < 0:
                if count == most:
                    return states[:0], follows[:0]
                table[code] = count
                states[count] = states[at] + change[a]
                count += 1
            follows[at, a] = table[code]
        at += 1
    return states[:count], follows[:count]


def _completable(states: IntArray, follows: IntArray, change: IntArray) -> tuple[IntArray, IntArray]:
    """Without states from which the empty one cannot be reached; in the order of :class:`MemoryStates`."""
    kept = _reaches_first(follows)
    # All actions but F of chunk 0 bring the cells closer to their end: `left` counts the actions to it.
    gaps = states.shape[1] - follows.shape[1] // 3
    chunks = follows.shape[1] // 3
    left = np.zeros(states.shape[1], np.int64)
    left[gaps:] = 1
    for i in reversed(range(gaps)):
        following = left[i + 1] if i + 1 < gaps else 0
        left[i] = 1 + following + (1 if i >= chunks - 1 else 0)
    order = np.lexsort((-(states @ left), ~kept))[: int(kept.sum())]
    number = np.full(len(states) + 1, -1, np.int64)
    number[order] = np.arange(len(order))
    return np.ascontiguousarray(states[order]), np.ascontiguousarray(number[follows[order]])


@compiled
def _reaches_first(follows: IntArray) -> BoolArray:  # pragma: no cover - compiled
    """Whether state 0 can be reached from a state."""
    n, actions = follows.shape
    reaches = np.zeros(n, np.bool_)
    reaches[0] = True
    changed = True
    while changed:
        changed = False
        for s in range(n - 1, -1, -1):
            if not reaches[s]:
                for a in range(actions):
                    t = follows[s, a]
                    if t >= 0 and reaches[t]:
                        reaches[s] = changed = True
                        break
    return reaches
