"""The board on which constructors lay actions: clocks, memory and counts of every rank, in numba.

Kernels take flat arrays, not tuples of them: a tuple of a dozen arrays, passed between compiled functions,
costs more than the work (measured: 5 us against 0.2 us per action, and five times the compile time).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.construct.tables import FloatArray, IntArray, Tables
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.problem import F, I, W

CLOCK, HELD, IDLE, FIRST = range(4)
"""Columns of ``Board.level``."""
HEAD, TAIL = range(2)
"""Columns of ``Board.ends``."""


@dataclass(frozen=True, eq=False)
class Board:
    """What has been placed so far; kernels write into these arrays.

    Attributes
    ----------
    level
        (p, 4): end of the last action, memory held, idle time since the first start, that start.
    count
        (2S,): actions placed of every chain row.
    end
        (2S, m): their ends.
    queue, ends
        (p, chunks * m) int8 and (p, 2): chunks of the W's that wait, oldest first, and where they lie.
    code, length
        (p, 3 * chunks * m) int8 and (p,): the order so far.
    halt
        (1,) uint8: set from another thread to stop a kernel early.
    """

    level: FloatArray
    count: IntArray
    end: FloatArray
    queue: IntArray
    ends: IntArray
    code: IntArray
    length: IntArray
    halt: IntArray

    @classmethod
    def of(cls, tables: Tables, halt: IntArray | None = None) -> Board:
        """A board for a problem; it can be used again and again."""
        p, chunks, m, rows = tables.pp_degree, tables.chunks, tables.microbatches, len(tables.lag)
        return cls(
            level=np.zeros((p, 4)),
            count=np.zeros(rows, np.int64),
            end=np.zeros((rows, m)),
            queue=np.zeros((p, chunks * m), np.int8),
            ends=np.zeros((p, 2), np.int64),
            code=np.zeros((p, 3 * chunks * m), np.int8),
            length=np.zeros(p, np.int64),
            halt=np.zeros(1, np.uint8) if halt is None else halt,
        )

    def is_complete(self, tables: Tables) -> bool:
        """Whether every stage has all of its backwards, and no W waits."""
        no_weight_waits = np.array_equal(self.ends[:, HEAD], self.ends[:, TAIL])
        return bool(no_weight_waits and self.count.min() == tables.microbatches)

    @property
    def makespan(self) -> float:
        """Last end minus first start."""
        return float(self.level[:, CLOCK].max() - self.level[:, FIRST].min())

    @property
    def span(self) -> float:
        """Largest window of a rank, at earliest start."""
        return float((self.level[:, CLOCK] - self.level[:, FIRST]).max())


@compiled
def clear(
    static: FloatArray, level: FloatArray, count: IntArray, ends: IntArray, length: IntArray
) -> None:  # pragma: no cover - compiled
    """Take everything off the board."""
    count[:] = 0
    ends[:] = 0
    length[:] = 0
    level[:] = 0.0
    level[:, HELD] = static


@compiled
def place(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
    rank: int,
    action: int,
    ready: float,
) -> None:  # pragma: no cover - compiled
    """Lay the next action of a code, no earlier than ``ready``; a W is taken off the queue."""
    at = length[rank]
    start = max(level[rank, CLOCK], ready)
    if at == 0:
        level[rank, FIRST] = start
    else:
        level[rank, IDLE] += start - level[rank, CLOCK]
    finish = start + duration[rank, action]
    level[rank, CLOCK] = finish
    level[rank, HELD] += delta[rank, action]
    code[rank, at] = action
    length[rank] = at + 1
    letter = action & 3
    if letter == W:
        ends[rank, HEAD] += 1
        return
    here = row[rank, action]
    end[here, count[here]] = finish
    count[here] += 1
    if letter == I:
        queue[rank, ends[rank, TAIL]] = action >> 2
        ends[rank, TAIL] += 1


@compiled
def arrival(
    row: IntArray, lag: FloatArray, count: IntArray, end: FloatArray, rank: int, action: int
) -> float:  # pragma: no cover - compiled
    """When the input of the next F or backward of a code arrives; inf while unknown or none is left."""
    here = row[rank, action]
    k = count[here]
    if k >= end.shape[1] or (here > 0 and k >= count[here - 1]):
        return np.inf
    if here == 0:
        return 0.0
    return float(end[here - 1, k] + lag[here])


@compiled
def admits_forward(
    row: IntArray,
    delta: FloatArray,
    limit: FloatArray,
    level: FloatArray,
    count: IntArray,
    rank: int,
    chunk: int,
) -> bool:  # pragma: no cover - compiled
    """Whether memory allows the next F of a chunk now without risking a deadlock.

    The forwards of a microbatch are given back only after its last one, so a forward is admitted while
    room stays for those that follow it on this rank, or while an older microbatch has all of its own and
    will give back as much.
    """
    chunks = row.shape[1] // 4
    following = 0.0
    for later in range(chunk, chunks):
        following += delta[rank, 4 * later + F]
    if level[rank, HELD] + following <= limit[rank]:
        return True
    fits = level[rank, HELD] + delta[rank, 4 * chunk + F] <= limit[rank]
    return bool(fits and count[row[rank, 4 * (chunks - 1) + F]] > count[row[rank, I]])


@compiled
def replay(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    static: FloatArray,
    codes: IntArray,
    until: IntArray,
    level: FloatArray,
    count: IntArray,
    end: FloatArray,
    queue: IntArray,
    ends: IntArray,
    code: IntArray,
    length: IntArray,
) -> None:  # pragma: no cover - compiled
    """Lay the first ``until[rank]`` actions of ``codes`` on an empty board, at earliest start."""
    clear(static, level, count, ends, length)
    progress = True
    while progress:
        progress = False
        for rank in range(len(until)):
            while length[rank] < until[rank]:
                action = codes[rank, length[rank]]
                ready = level[rank, CLOCK]
                if row[rank, action] >= 0:
                    ready = arrival(row, lag, count, end, rank, action)
                    if ready == np.inf:
                        break
                # fmt: off
                place(
                    row, duration, delta, level, count, end, queue, ends, code, length,
                    rank, action, ready,
                )
                # fmt: on
                progress = True
