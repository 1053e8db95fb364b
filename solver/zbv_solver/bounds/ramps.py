"""The idle time that the two ramps of a rank's window force, and the bound from them.

Before a time t a rank can have done only what its heads and its memory allow; what that leaves of t is
idle. Likewise after the time s before the window's end. The window is at least the rank's load and both
idle times, as long as what can be done in both ramps together is less than the load: a shorter window
could not hold the load at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.bounds.heads import (
    END,
    FIRST,
    FREE_POST,
    FREE_SECOND,
    POST,
    SECOND,
    TINY,
    fill,
)
from zbv_solver.bounds.quick import preemptive_bound
from zbv_solver.bounds.sides import Side
from zbv_solver.jit import compiled

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]


def ramp_bound(
    forwards: Side, backwards: Side, heads: FloatArray, tails: FloatArray, rank: int, m: int
) -> float:
    """Bound of a window of a rank: heads and tails (3, S, n) of its first and last n <= m microbatches."""
    stages = forwards.stages[rank]
    ramps = [
        _ramp(side.work[rank], side.hold[rank], float(side.room[rank]), own, np.unique(own), m)
        for side, own in ((forwards, heads[:, stages]), (backwards, tails[:, stages]))
    ]
    work = forwards.work[rank]
    forward = m * float(work[FIRST].sum())
    backward = m * float(work[SECOND].sum() + work[POST].sum())
    return float(_join(ramps[0], ramps[1], forward, backward))


def machine_bound(side: Side, heads: FloatArray, tails: FloatArray, rank: int) -> float:
    """Jackson's bound of a rank's window from heads and tails (3, S, m) of all its actions."""
    stages, work, m = side.stages[rank], side.work[rank], heads.shape[2]
    after = np.arange(m, dtype=np.float64)[::-1]
    weights = work[POST][:, None]
    begin = np.stack([heads[FIRST, stages], heads[SECOND, stages], heads[END, stages] - weights])
    to_end = np.stack(
        [
            tails[SECOND, stages, ::-1],
            tails[FIRST, stages, ::-1],
            after * weights * side.own[rank][:, None],
        ]
    )
    length = np.broadcast_to(work[[FIRST, SECOND, POST]][:, :, None], begin.shape)
    return preemptive_bound(begin.ravel(), length.ravel(), to_end.ravel())


@compiled
def _ramp(
    work: FloatArray, hold: FloatArray, room: float, heads: FloatArray, times: FloatArray, m: int
) -> FloatArray:  # pragma: no cover - compiled
    """Times with more idle before them than any earlier: rows (time, firsts and pres, seconds and posts)."""
    chunks, n = heads.shape[1], heads.shape[2]
    last = np.inf
    if n < m:  # beyond the known heads everything might be done
        for c in range(chunks):
            last = min(last, heads[FIRST, c, n - 1], heads[SECOND, c, n - 1])
    rows = np.zeros((len(times) + 1, 3))
    known, most = 1, 0.0
    count = np.zeros((5, chunks), np.int64)
    every = np.full(chunks, m)
    scratch = np.zeros((4, 2 * chunks))
    for time in times:
        if time <= 0.0:
            continue
        if time > last:
            break
        freed, seconds = 0.0, 0.0
        for c in range(chunks):
            for kind in (FIRST, SECOND):
                while count[kind, c] < n and heads[kind, c, count[kind, c]] < time:
                    count[kind, c] += 1
            while count[2, c] < n and heads[SECOND, c, count[2, c]] + work[SECOND, c] <= time:
                count[2, c] += 1
            while count[3, c] < n and heads[END, c, count[3, c]] <= time:
                count[3, c] += 1
            while count[4, c] < n and heads[END, c, count[4, c]] - work[POST, c] < time:
                count[4, c] += 1
            freed += count[2, c] * hold[FREE_SECOND, c] + count[3, c] * hold[FREE_POST, c]
            seconds += count[SECOND, c] * work[SECOND, c] + count[4, c] * work[POST, c]
        firsts = fill(work, hold, room + freed, count[FIRST], every, every, scratch)
        if time - firsts - seconds > most:
            most = time - firsts - seconds
            rows[known, 0], rows[known, 1], rows[known, 2] = time, firsts, seconds
            known += 1
    return rows[:known]


@compiled
def _join(
    early: FloatArray, late: FloatArray, forward: float, backward: float
) -> float:  # pragma: no cover - compiled
    """Best sum of idle times: what both ramps do of a kind is no more than there is of it."""
    load = forward + backward
    best = load
    for i in range(len(early)):
        for j in range(len(late)):
            done = min(forward, early[i, 1] + late[j, 2]) + min(backward, early[i, 2] + late[j, 1])
            if done < load * (1 - TINY):
                best = max(best, early[i, 0] + late[j, 0] + load - done)
    return best
