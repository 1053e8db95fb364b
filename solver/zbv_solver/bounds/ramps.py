"""The idle time that the two ramps of a rank's window force, and the bound from them.

Before a time t a rank can have done only what its heads and its memory allow; what that leaves of t is
idle. Likewise after the time s before the window's end. The window is at least the rank's load and both
idle times, as long as what can be done in both ramps together is less than the load: a shorter window
could not hold the load at all.

A span's window of one rank also bounds what another rank does: all its F's and I's lie in the window, only
W's may come after its end. What can be left to the last s before the end is then more than s, by the W's that
memory lets wait; but memory that they wait in cannot hold the microbatches in flight that would keep the
rank busy from its last F until the last gradients return. How both share the memory decides
(:func:`through_bound`); for a V the innermost rank decides most, which is farthest from both ends.
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
    HOLD,
    HOLD_PRE,
    POST,
    PRE,
    SECOND,
    fill,
)
from zbv_solver.bounds.quick import preemptive_bound
from zbv_solver.bounds.sides import Side
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.numeric import AMOUNT_ROUNDING
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]


def ramp_bound(
    forwards: Side, backwards: Side, heads: FloatArray, tails: FloatArray, rank: int, m: int
) -> float:
    """Bound of a window of a rank: heads and tails (3, S, n) of its first and last n <= m microbatches.

    Lemmas 20 and 21.
    """
    stages = forwards.stages[rank]
    ramps = [
        _ramp(side.work[rank], side.hold[rank], float(side.room[rank]), own, np.unique(own), m, True)
        for side, own in ((forwards, heads[:, stages]), (backwards, tails[:, stages]))
    ]
    work = forwards.work[rank]
    forward = m * float(work[FIRST].sum())
    backward = m * float(work[SECOND].sum() + work[POST].sum())
    return float(_join(ramps[0], ramps[1], forward, backward, forward + backward))


def through_bound(
    forwards: Side, backwards: Side, heads: FloatArray, tails: FloatArray, rank: int, m: int
) -> float:
    """Bound of another rank's window from all that ``rank`` must do in it; 0 for more than two chunks.

    ``heads`` and ``tails`` (3, S, n) are those of the other rank's window. Lemma 22.
    """
    stages = forwards.stages[rank]
    if len(stages) > 2:
        return 0.0
    own, own_tails = heads[:, stages], tails[:, stages]
    early = _ramp(
        forwards.work[rank], forwards.hold[rank], float(forwards.room[rank]), own, np.unique(own), m, False
    )
    late = _left(
        backwards.work[rank],
        backwards.hold[rank],
        float(backwards.room[rank]),
        own_tails,
        np.unique(own_tails[SECOND, :, 0]),
        m,
    )
    work = forwards.work[rank]
    forward = m * float(work[FIRST].sum())
    backward = m * float(work[SECOND].sum() + work[POST].sum())
    return float(_join(early, late, forward, backward, 0.0))


def machine_bound(side: Side, heads: FloatArray, tails: FloatArray, rank: int) -> float:
    """Jackson's bound of a rank's window from heads and tails (3, S, m) of all its actions: Lemma 19."""
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
    work: FloatArray,
    hold: FloatArray,
    room: float,
    heads: FloatArray,
    times: FloatArray,
    m: int,
    opens: bool,
) -> FloatArray:  # pragma: no cover - compiled
    """What can have been done before 0 and before times with more idle before them than any earlier.

    Rows (time, firsts and pres, seconds and posts, both). Nothing comes before 0 on a rank that opens the
    window.
    """
    chunks, n = heads.shape[1], heads.shape[2]
    last = _last(heads, m)
    rows = np.zeros((len(times) + 1, 4))
    known, most = 0, -np.inf
    count = np.zeros((5, chunks), np.int64)
    every = np.full(chunks, m)
    scratch = np.zeros((4, 2 * chunks))
    for i in range(-1, len(times)):
        time = times[i] if i >= 0 else 0.0
        if i >= 0 and time <= 0.0:
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
        firsts = fill(work, hold, room + freed * (1 + AMOUNT_ROUNDING), count[FIRST], every, every, scratch)
        if opens and i < 0:
            firsts, seconds = 0.0, 0.0
        if time - firsts - seconds > most:
            most = time - firsts - seconds
            rows[known, 0], rows[known, 1], rows[known, 2] = time, firsts, seconds
            rows[known, 3] = firsts + seconds
            known += 1
    return rows[:known]


@compiled
def _last(heads: FloatArray, m: int) -> float:  # pragma: no cover - compiled
    """The time from which on heads (3, c, n) are not all known: everything might be done by then."""
    n = heads.shape[2]
    return float(heads[: SECOND + 1, :, n - 1].min()) if n < m else np.inf


@compiled
def _left(
    work: FloatArray, hold: FloatArray, room: float, tails: FloatArray, times: FloatArray, m: int
) -> FloatArray:  # pragma: no cover - compiled
    """The most that can be left for the last ``time`` of the window and, of pres, for after it.

    Rows (time, firsts and pres, seconds, both). Of every chunk, some cells are left whole and of some only
    the pre; all counts of whole cells are tried, since the one that is under way holds all its memory.
    """
    chunks = tails.shape[1]
    last, soonest = _last(tails, m), tails[: SECOND + 1, :, 0].min()
    rows = np.zeros((len(times), 4))
    known = 0
    ready = np.zeros(2, np.int64)
    for time in times:
        if time <= 0.0 or time > last:
            continue
        seconds, freed = 0.0, 0.0
        for c in range(chunks):
            ready[c] = np.searchsorted(tails[FIRST, c], time)
            seconds += np.searchsorted(tails[SECOND, c], time) * work[SECOND, c]
            ended = np.searchsorted(tails[SECOND, c] + work[SECOND, c], time, side="right")
            freed += ended * hold[FREE_SECOND, c]
        busy = time - soonest
        rows[known, 0], rows[known, 2] = time, min(seconds, busy)
        for outer in range(ready[0] + 1):
            for inner in range(ready[1] + 1):
                space = room + freed * (1 + AMOUNT_ROUNDING) - outer * hold[HOLD, 0]
                firsts = outer * work[FIRST, 0]
                if chunks > 1:
                    space -= inner * hold[HOLD, 1]
                    firsts += inner * work[FIRST, 1]
                if space < -TINY * room:
                    break
                pres = _pres(work, hold, space, outer, inner, m)
                rows[known, 1] = max(rows[known, 1], min(busy, firsts) + pres)
                rows[known, 3] = max(rows[known, 3], min(busy, firsts + seconds) + pres)
        known += 1
    return rows[:known]


@compiled
def _pres(
    work: FloatArray, hold: FloatArray, space: float, outer: int, inner: int, m: int
) -> float:  # pragma: no cover - compiled
    """Most work of pres: those of cells left whole, and of others as memory allows, the densest first."""
    chunks = work.shape[1]
    first = 0
    if chunks > 1 and work[PRE, 1] * hold[HOLD_PRE, 0] > work[PRE, 0] * hold[HOLD_PRE, 1]:
        first = 1
    total = 0.0
    for turn in range(chunks):
        c = first if turn == 0 else 1 - first
        whole = outer if c == 0 else inner
        others = float(m - whole)
        if hold[HOLD_PRE, c] > 0.0 and hold[HOLD_PRE, c] * others > space:
            others = max(0.0, space) / hold[HOLD_PRE, c]
        space -= others * hold[HOLD_PRE, c]
        total += (whole + others) * work[PRE, c]
    return total


@compiled
def _join(
    early: FloatArray, late: FloatArray, forward: float, backward: float, best: float
) -> float:  # pragma: no cover - compiled
    """Best sum of idle times: what both ramps do of a kind is no more than there is of it. Lemma 21."""
    load = forward + backward
    for i in range(len(early)):
        for j in range(len(late)):
            done = min(forward, early[i, 1] + late[j, 2]) + min(backward, early[i, 2] + late[j, 1])
            done = min(done, early[i, 3] + late[j, 3])
            if done < load * (1 - TINY):
                best = max(best, early[i, 0] + late[j, 0] + load - done)
    return best
