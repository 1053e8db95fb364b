"""Bounds of a rank's window: the one-machine bound, and the idle time that the two ramps of the window force.

The one-machine bound is Jackson's (Carlier 1982): the preemptive schedule of jobs with heads and tails.

Before a time t a rank can have done only what its heads and its memory allow; what this leaves of t is idle.
The same holds for the time s before the window's end. The window is at least the rank's load plus both idle
times, as long as what can be done in both ramps together is less than the load: a shorter window could not
hold the load at all.

The window of one rank's span also bounds what another rank does. All F's and I's of the other rank lie in the
window, and only its W's may come after the end. So more than s of work can remain for the last s before the
end, by the W's that memory lets wait. But memory in which they wait cannot hold the microbatches in flight
that would keep the rank busy from its last F until the last gradients return.
:func:`other_rank_bound` decides how the two share the memory. In a V the innermost rank decides most: it is
farthest from both ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.directions import (
    DOWN,
    FREED_BY_DOWN,
    FREED_BY_REST,
    HELD,
    HELD_BY_REST,
    REST_AFTER,
    REST_BEFORE,
    UP,
    Direction,
    knapsack,
)
from zbv_solver.bounds.heads import CELL_END, sweep
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.problem.numeric import AMOUNT_ROUNDING
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY


@dataclass(frozen=True, eq=False)
class Window:
    """A window of time, with heads from its begin and tails from its end."""

    forwards: Direction
    backwards: Direction
    microbatches: int
    """m, of the problem."""
    heads: FloatArray
    tails: FloatArray
    """(3, S, n) of the first and of the last n <= m microbatches, see :func:`.heads.sweep`: tails are the
    heads of the reverse direction."""

    @classmethod
    def of(cls, forwards: Direction, backwards: Direction, rank: int | None, n: int, m: int) -> Window:
        """The window of a rank's span, or with None that of the makespan: Lemmas 10 to 17."""
        origin = 0 if rank is None else int(forwards.stages[rank, 0])
        heads, tails = (sweep(each, origin, rank is None, n) for each in (forwards, backwards))
        return cls(forwards, backwards, m, heads, tails)

    def loads(self, rank: int) -> tuple[float, float]:
        """The rank's work of F's, and of backwards with their rests: Lemma 5."""
        work, m = self.forwards.work[rank], self.microbatches
        return m * float(work[UP].sum()), m * float(work[DOWN].sum() + work[REST_AFTER].sum())


def heads_and_tails(window: Window, rank: int) -> tuple[FloatArray, FloatArray]:
    """Heads and tails of a rank's operations, each (3, c, m) for F, backward and W: Lemma 18.

    The heads and tails of all microbatches must be known. Where the backward may be fused, the third row is
    that of its virtual rest, which starts no later than a real W.
    """
    stages, work, m = window.forwards.stages[rank], window.forwards.work[rank], window.microbatches
    heads, tails = window.heads, window.tails
    rest = work[REST_AFTER][:, None]
    # If all cells of a stage are split, m - 1 - k further W's follow the k-th W: Lemma 18.
    after = np.arange(m, dtype=np.float64)[::-1]
    return (
        np.stack([heads[UP, stages], heads[DOWN, stages], heads[CELL_END, stages] - rest]),
        np.stack(
            [
                # In reverse, F is the down operation, and microbatch m - 1 - k has index k.
                tails[DOWN, stages, ::-1],
                tails[UP, stages, ::-1],
                after * rest * window.forwards.is_split[rank][:, None],
            ]
        ),
    )


def preemptive_bound(heads: FloatArray, lengths: FloatArray, tails: FloatArray) -> float:
    """Jackson's bound of one machine with jobs (n,): Lemma 6."""
    return float(_one_machine(np.argsort(heads), heads, lengths, tails))


@compiled
def _one_machine(
    by_head: IntArray, heads: FloatArray, lengths: FloatArray, tails: FloatArray
) -> float:  # pragma: no cover
    """Largest end + tail of the preemptive schedule that always runs the job with the longest tail."""
    n = len(heads)
    queue = np.empty(n, np.int64)  # binary heap of job indices, longest tail on top
    left = lengths.copy()
    size, next_job, clock, worst = 0, 0, 0.0, 0.0
    # Every pass releases or completes a job, and the heap costs O(log n) per job: O(n log n) in all.
    while next_job < n or size > 0:
        if size == 0:
            clock = max(clock, heads[by_head[next_job]])
        while next_job < n and heads[by_head[next_job]] <= clock:
            child = size
            queue[child] = by_head[next_job]
            size += 1
            next_job += 1
            while child > 0 and tails[queue[(child - 1) // 2]] < tails[queue[child]]:
                parent = (child - 1) // 2
                queue[parent], queue[child] = queue[child], queue[parent]
                child = parent
        job = queue[0]
        until = heads[by_head[next_job]] if next_job < n else np.inf
        # The next job may have a longer tail, so the current one runs only until its release.
        if clock + left[job] > until:
            left[job] -= until - clock
            clock = until
            continue
        clock += left[job]
        worst = max(worst, clock + tails[job])
        size -= 1
        queue[0] = queue[size]
        parent = 0
        while True:
            child = 2 * parent + 1
            if child >= size:
                break
            if child + 1 < size and tails[queue[child + 1]] > tails[queue[child]]:
                child += 1
            if tails[queue[parent]] >= tails[queue[child]]:
                break
            queue[parent], queue[child] = queue[child], queue[parent]
            parent = child
    return worst


def machine_bound(window: Window, rank: int) -> float:
    """Jackson's bound of a rank's window from all of its heads and tails: Lemma 19."""
    head, tail = heads_and_tails(window, rank)
    work = window.forwards.work[rank]
    # A copy, because kernels are compiled again for arrays that are read-only.
    length = np.broadcast_to(work[[UP, DOWN, REST_AFTER]][:, :, None], head.shape).copy()
    return preemptive_bound(head.ravel(), length.ravel(), tail.ravel())


def _of_stages(times: FloatArray, stages: IntArray) -> FloatArray:
    """Heads or tails of some stages, in one layout: kernels are compiled again for every other one."""
    return np.ascontiguousarray(times[:, stages])


def ramp_bound(window: Window, rank: int) -> float:
    """Bound of a window of a rank from its load and both ramps: Lemmas 20 and 21."""
    stages, m = window.forwards.stages[rank], window.microbatches
    early, late = (
        _ramp(direction, rank, own, np.unique(own), m, True)
        for direction, own in (
            (window.forwards, _of_stages(window.heads, stages)),
            (window.backwards, _of_stages(window.tails, stages)),
        )
    )
    forward, backward = window.loads(rank)
    return float(_join(early, late, forward, backward, forward + backward))


def other_rank_bound(window: Window, rank: int) -> float:
    """Bound of another rank's window from all that ``rank`` must do in it: Lemma 22.

    0 for more than two chunks.
    """
    stages, m = window.forwards.stages[rank], window.microbatches
    if len(stages) > 2:
        return 0.0
    heads, tails = _of_stages(window.heads, stages), _of_stages(window.tails, stages)
    early = _ramp(window.forwards, rank, heads, np.unique(heads), m, False)
    # Lemma 21 holds for any times. There are few here, because each one tries all pairs of counts.
    late = _late_ramp(window.backwards, rank, tails, np.unique(tails[DOWN, :, 0]), m)
    return float(_join(early, late, *window.loads(rank), 0.0))


@compiled
def _ramp(
    direction: Direction, rank: int, heads: FloatArray, times: FloatArray, m: int, opens: bool
) -> FloatArray:  # pragma: no cover - compiled
    """What a rank can have done before 0, and before times with more idle time before them than any earlier.

    Rows (time, up operations with rests before them, down operations with rests after them, both). Where the
    rank ``opens`` the window, nothing comes before 0.
    """
    work, memory, capacity = direction.work[rank], direction.memory[rank], direction.capacity[rank]
    chunks, n = heads.shape[1], heads.shape[2]
    last = _last(heads, m)
    rows = np.zeros((len(times) + 1, 4))
    known, most = 0, -np.inf
    # Before the time: up and down operations begun, downs ended, cells ended, rests begun.
    count = np.zeros((5, chunks), np.int64)
    every = np.full(chunks, m)
    scratch = np.zeros((2, 2 * chunks))
    # Index -1 stands for time 0. Times ascend, so the counts only grow.
    for i in range(-1, len(times)):
        time = times[i] if i >= 0 else 0.0
        if i >= 0 and time <= 0.0:
            continue
        if time > last:
            break
        freed, downs = 0.0, 0.0
        for c in range(chunks):
            for kind in (UP, DOWN):
                while count[kind, c] < n and heads[kind, c, count[kind, c]] < time:
                    count[kind, c] += 1
            while count[2, c] < n and heads[DOWN, c, count[2, c]] + work[DOWN, c] <= time:
                count[2, c] += 1
            while count[3, c] < n and heads[CELL_END, c, count[3, c]] <= time:
                count[3, c] += 1
            while count[4, c] < n and heads[CELL_END, c, count[4, c]] - work[REST_AFTER, c] < time:
                count[4, c] += 1
            freed += count[2, c] * memory[FREED_BY_DOWN, c] + count[3, c] * memory[FREED_BY_REST, c]
            downs += count[DOWN, c] * work[DOWN, c] + count[4, c] * work[REST_AFTER, c]
        ups = knapsack(
            work, memory, capacity + freed * (1 + AMOUNT_ROUNDING), count[UP], every, every, scratch
        )
        if opens and i < 0:
            ups, downs = 0.0, 0.0
        # Rows are left out if they have no more idle time than an earlier one. That can only weaken the
        # bound.
        if time - ups - downs > most:
            most = time - ups - downs
            rows[known, 0], rows[known, 1], rows[known, 2] = time, ups, downs
            rows[known, 3] = ups + downs
            known += 1
    return rows[:known]


@compiled_leaf
def _last(heads: FloatArray, m: int) -> float:  # pragma: no cover - compiled
    """The time from which on heads (3, c, n) are not all known: everything might be done by then."""
    n = heads.shape[2]
    return _earliest(heads, n - 1) if n < m else np.inf


@compiled_leaf
def _earliest(heads: FloatArray, k: int) -> float:  # pragma: no cover - compiled
    """The earliest head of the k-th operations of a rank's stages, up or down."""
    earliest = np.inf
    for c in range(heads.shape[1]):
        earliest = min(earliest, heads[UP, c, k], heads[DOWN, c, k])
    return earliest


@compiled
def _late_ramp(
    direction: Direction, rank: int, tails: FloatArray, times: FloatArray, m: int
) -> FloatArray:  # pragma: no cover - compiled
    """The most work that can remain for the last ``time`` of the window and, of W's, for after it.

    In reverse: rows (time, up operations with rests, down operations, both). Some cells of every chunk remain
    whole, and of some only the W. All counts of whole cells are tried, since a cell holds all of its memory
    until its backward has ended.
    """
    work, memory, capacity = direction.work[rank], direction.memory[rank], direction.capacity[rank]
    chunks = tails.shape[1]
    last, soonest = _last(tails, m), _earliest(tails, ZERO)
    rows = np.zeros((len(times), 4))
    known = 0
    ready = np.zeros(2, np.int64)
    for time in times:
        if time <= 0.0 or time > last:
            continue
        downs, freed = 0.0, 0.0
        # With one chunk, ready[1] stays 0. Operations count as begun if their head is below the time (left
        # side), and as ended if their end is at most the time (right side), as in Lemma 15.
        for c in range(chunks):
            ready[c] = np.searchsorted(tails[UP, c], time)
            downs += np.searchsorted(tails[DOWN, c], time) * work[DOWN, c]
            ended = np.searchsorted(tails[DOWN, c] + work[DOWN, c], time, side="right")
            freed += ended * memory[FREED_BY_DOWN, c]
        # All F's and backwards end at least `soonest` before the end, one at a time: Lemma 22.
        busy = time - soonest
        rows[known, 0], rows[known, 2] = time, min(downs, busy)
        # a and b of Lemma 22: O(n²) pairs per time.
        for outer in range(ready[0] + 1):
            for inner in range(ready[1] + 1):
                space = capacity + freed * (1 + AMOUNT_ROUNDING) - outer * memory[HELD, 0]
                ups = outer * work[UP, 0]
                if chunks > 1:
                    space -= inner * memory[HELD, 1]
                    ups += inner * work[UP, 1]
                # More cells of the inner chunk need more space. The tolerance may admit a pair that
                # does not fit, which only weakens the bound.
                if space < -TINY * capacity:
                    break
                rests = _waiting_rests(direction, rank, space, outer, inner, m)
                rows[known, 1] = max(rows[known, 1], min(busy, ups) + rests)
                rows[known, 3] = max(rows[known, 3], min(busy, ups + downs) + rests)
        known += 1
    return rows[:known]


@compiled_leaf
def _waiting_rests(
    direction: Direction, rank: int, space: float, outer: int, inner: int, m: int
) -> float:  # pragma: no cover - compiled
    """Most work of W's: of cells that remain whole, and of others as memory allows, the densest first."""
    work, memory = direction.work[rank], direction.memory[rank]
    chunks = work.shape[1]
    first = 0
    # Compare the work per memory of both chunks' rests by products, because amounts may be 0.
    if (
        chunks > 1
        and work[REST_BEFORE, 1] * memory[HELD_BY_REST, 0] > work[REST_BEFORE, 0] * memory[HELD_BY_REST, 1]
    ):
        first = 1
    total = 0.0
    for turn in range(chunks):
        c = first if turn == 0 else 1 - first
        whole = outer if c == 0 else inner
        others = float(m - whole)
        if memory[HELD_BY_REST, c] > 0.0 and memory[HELD_BY_REST, c] * others > space:
            others = max(0.0, space) / memory[HELD_BY_REST, c]
        space -= others * memory[HELD_BY_REST, c]
        total += (whole + others) * work[REST_BEFORE, c]
    return total


@compiled_leaf
def _join(
    early: FloatArray, late: FloatArray, forward: float, backward: float, best: float
) -> float:  # pragma: no cover - compiled
    """Best sum of idle times: what both ramps do of a kind is no more than there is of it. Lemma 21."""
    load = forward + backward
    for i in range(len(early)):
        for j in range(len(late)):
            # In the late ramp, time runs backwards: its down operations (column 2) are F's, and its up
            # operations with rests (column 1) are backwards. The sum in column 3 may be less than the sum of
            # both columns, which can come from different pairs of counts.
            done = min(forward, early[i, 1] + late[j, 2]) + min(backward, early[i, 2] + late[j, 1])
            done = min(done, early[i, 3] + late[j, 3])
            # If both ramps can hold the whole load, Lemma 21 claims nothing. The margin is for rounding.
            if done < load * (1 - TINY):
                best = max(best, early[i, 0] + late[j, 0] + load - done)
    return best
