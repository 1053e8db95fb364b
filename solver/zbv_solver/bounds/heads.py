"""Heads: the earliest start of every operation, from paths, loads and memory together.

The proofs are in PROOFS.md, section 2: Lemmas 10 to 17. The docstring of a kernel names its lemma.

Kernels sweep a :class:`~zbv_solver.bounds.directions.Direction` microbatch by microbatch. A head depends
only on heads of a smaller index and of earlier stages of the same microbatch, so one sweep reaches the fixed
point. Four arguments raise a head, each on every rank, so that a wait on one rank reaches the others:

*Path.* The operations of a microbatch follow each other, and so do the operations of a stage.

*Releases.* The k+1 cells that have begun on a chunk and the chunks outside it hold memory. What exceeds the
capacity must have been released before, and the earliest possible releases say when.

*Safety.* A rank that is full of cells of an outer chunk can never run its innermost chunk again, where all
releases begin. So ``up(c, k)`` comes after ``up(innermost, k - in_flight(c))``, and ``down(innermost, k)``
after ``down(c, k - in_flight(c))``.

*Load.* Some work must precede an operation on its rank. The heads and the memory bound how much of it can be
done before a time t; the rank does the rest from t on. This is the one-machine bound (Carlier 1982) with a
knapsack of memory in it. The times t are the window's origin and the heads of microbatch 0 on the rank: the
ramp has its gaps there, and more times gained nothing in experiments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.directions import (
    DOWN,
    FREED_BY_DOWN,
    FREED_BY_REST,
    HELD,
    REST_AFTER,
    REST_BEFORE,
    UP,
    Direction,
    knapsack,
)
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.problem.numeric import AMOUNT_ROUNDING
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY

CELL_END = 2
"""Row of heads, after UP and DOWN: the earliest end of a cell."""

EVER = -1e300
"""Head of what the window does not bound."""


class Sweep(NamedTuple):
    """What a sweep knows so far; kernels write into it."""

    heads: FloatArray
    """(3, S, m): rows UP, DOWN and CELL_END; inf while unknown."""
    rank: IntArray
    chunk: IntArray
    """(S,) of a stage."""
    known: IntArray
    """(p,) number of times t that a rank looks at."""
    times: FloatArray
    counts: IntArray
    freed: FloatArray
    """(p, 2c + 1), (p, 2c + 1, 2, c) and (p, 2c + 1): the times, how many operations of every kind and
    chunk have a head before each, and what is released by then."""
    taken: IntArray
    given: FloatArray
    """(p, c, 2, c) and (p, c, 2): the state of :func:`_releases`, kept from k to k + 1."""
    need: IntArray
    """(3, c): operations of every kind and chunk that must precede the one looked at."""
    scratch: FloatArray
    """(2, 2c), of :func:`~.knapsack.knapsack`."""


@compiled
def sweep(
    direction: Direction, origin: int, everywhere: bool, m: int
) -> FloatArray:  # pragma: no cover - compiled
    """Heads (3, S, m) of the first m up and down operations of every stage, and the ends of its cells.

    Lemmas 10, 11, 12, 13, 14, 16 and 17.

    ``origin`` is the stage whose first operation opens the window. With ``everywhere`` no rank runs anything
    before that; without, this holds for the stage's own rank only. In reverse, W's of other ranks may then
    lie beyond the window, as many as their memory lets wait.
    """
    p, c = direction.stages.shape
    n = p * c
    state = Sweep(
        np.full((3, n, m), np.inf),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(p, np.int64),
        np.zeros((p, 2 * c + 1)),
        np.zeros((p, 2 * c + 1, 2, c), np.int64),
        np.zeros((p, 2 * c + 1)),
        np.zeros((p, c, 2, c), np.int64),
        np.zeros((p, c, 2)),
        np.zeros((3, c), np.int64),
        np.zeros((2, 2 * c)),
    )
    _fill_in(direction, state, origin, everywhere)
    return state.heads


@compiled_leaf
def _fill_in(
    direction: Direction, state: Sweep, origin: int, everywhere: bool
) -> None:  # pragma: no cover - compiled
    """Write the heads, in the order in which operations depend on each other."""
    p, chunks = direction.stages.shape
    n, m = state.heads.shape[1], state.heads.shape[2]
    for r in range(p):
        for c in range(chunks):
            state.rank[direction.stages[r, c]], state.chunk[direction.stages[r, c]] = r, c
    for r in range(p):
        # Where nothing runs before the origin, time 0 is one of the times t.
        state.known[r] = 1 if everywhere or r == state.rank[origin] else 0
    # Nothing is merged yet, so the latest merged end restricts nothing.
    state.given[:, :, 1] = EVER
    # Every step reads only heads that are final: those of a smaller k, or of the same k and an earlier
    # position (proof of Lemma 16).
    for k in range(m):
        for position in range(2 * n):
            kind = UP if position < n else DOWN
            stage = position if kind == UP else 2 * n - 1 - position
            r, c = state.rank[stage], state.chunk[stage]
            head = _path(direction, state, kind, stage, k)
            if kind == UP:
                if stage == origin:
                    head = max(head, 0.0)
                head = max(head, _releases(direction, state, r, c, k))
            head = max(head, _safety(direction, state, kind, r, c, k))
            _require(direction, state.need, kind, r, c, k)
            head = max(head, _after_required(direction, state, kind, r, c))
            # Memory is counted at up(c, k), or, for a down operation, at down(innermost, k), which precedes
            # it or is it: Lemmas 13 and 14.
            head = _load(direction, state, r, c if kind == UP else chunks - 1, k, head)
            state.heads[kind, stage, k] = head
            if kind == DOWN:
                state.heads[CELL_END, stage, k] = _cell_end(direction, state, stage, k)
            # `_count` must come first. It updates only the times that exist; `_add_time` then counts
            # microbatch 0 at the new time, this operation included. The other order could count a release
            # twice.
            _count(direction, state, kind, stage, k)
            if k == 0 and head > 0:
                _add_time(direction, state, r, head)


@compiled_leaf
def _path(
    direction: Direction, state: Sweep, kind: int, stage: int, k: int
) -> float:  # pragma: no cover - compiled
    """After the stage's previous operation of the kind, and the microbatch's previous operation: Lemma 10."""
    heads, work, rank, chunk = state.heads, direction.work, state.rank, state.chunk
    head: float = EVER
    if k > 0:
        head = heads[kind, stage, k - 1] + work[rank[stage], kind, chunk[stage]]
    if kind == UP and stage > 0:
        before, latency, previous = stage - 1, direction.latency[stage - 1], UP
    elif kind == DOWN and stage < len(rank) - 1:
        before, latency, previous = stage + 1, direction.latency[stage], DOWN
    elif kind == DOWN:
        before, latency, previous = stage, 0.0, UP
    else:
        return head
    end = heads[previous, before, k] + work[rank[before], previous, chunk[before]]
    return max(head, float(end + latency))


@compiled_leaf
def _safety(
    direction: Direction, state: Sweep, kind: int, r: int, c: int, k: int
) -> float:  # pragma: no cover - compiled
    """See *Safety* in the module's docstring: Lemma 12."""
    heads, work, stages = state.heads, direction.work[r], direction.stages[r]
    in_flight = direction.in_flight[r]
    innermost = len(stages) - 1
    head: float = EVER
    # in_flight is at least 1, so these heads have an index below k and are known.
    if kind == UP and c < innermost and k >= in_flight[c]:
        head = heads[UP, stages[innermost], k - in_flight[c]] + work[UP, innermost]
    if kind == DOWN and c == innermost:
        for j in range(innermost):
            if k >= in_flight[j]:
                head = max(head, heads[DOWN, stages[j], k - in_flight[j]] + work[DOWN, j])
    return head


@compiled_leaf
def _releases(
    direction: Direction, state: Sweep, r: int, c: int, k: int
) -> float:  # pragma: no cover - compiled
    """The earliest time by which cells before k can have released enough memory for ``up(c, k)``.

    Lemma 11. The releases of all chunks up to c are merged by time, earliest first, until their sum suffices.
    Which ones were merged, their sum and the time of the last stay for k + 1, whose set contains this one.
    """
    memory, work, stages = direction.memory[r], direction.work[r], direction.stages[r]
    heads, taken, given = state.heads, state.taken[r, c], state.given[r, c]
    wanted = 0.0
    for j in range(c + 1):
        wanted += memory[HELD, j] * (k + 1)
    # This is the sum of releases that Lemma 11 requires. Rounding lowers it: a smaller sum is reached no
    # later, so the head stays valid.
    wanted -= direction.capacity[r] + TINY * wanted
    while given[0] < wanted:
        when, chosen, by_rest = np.inf, -1, 0
        # taken[0, j] down operations and taken[1, j] rests of chunk j are merged. Their ends ascend with the
        # index, so the first one that is not merged is the earliest of its list.
        for j in range(c + 1):
            done = taken[0, j]
            if done < k and memory[FREED_BY_DOWN, j] > 0:
                end = heads[DOWN, stages[j], done] + work[DOWN, j]
                if end < when:
                    when, chosen, by_rest = end, j, 0
            done = taken[1, j]
            if done < k and memory[FREED_BY_REST, j] > 0 and heads[CELL_END, stages[j], done] < when:
                when, chosen, by_rest = heads[CELL_END, stages[j], done], j, 1
        # No release of a cell before k is left. The latest end so far remains a valid head.
        if chosen < 0:
            break
        taken[by_rest, chosen] += 1
        given[0] += memory[FREED_BY_REST if by_rest else FREED_BY_DOWN, chosen]
        # Releases that are new candidates for k + 1 may end before the last one merged for k; the time must
        # not go back.
        given[1] = max(given[1], when)
    return float(given[1])


@compiled_leaf
def _require(
    direction: Direction, need: IntArray, kind: int, r: int, c: int, k: int
) -> None:  # pragma: no cover - compiled
    """Count the operations of every chunk that must precede the k-th of chunk c: Lemma 13.

    The down operations that memory requires of chunk j are counted as if all others had been done as far as
    possible: chunks 0 … j then hold cells up to k that have not come down, and the chunks up to ``top`` at
    least cell k.
    """
    memory, in_flight, is_split = direction.memory[r], direction.in_flight[r], direction.is_split[r]
    chunks = len(in_flight)
    top = c if kind == UP else chunks - 1
    upper = 0.0
    for j in range(top + 1):
        upper += memory[HELD, j]
    lower = 0.0
    for j in range(chunks):
        # `upper` is U of Lemma 13. With this sum, `lower` is L_j.
        if j <= top:
            lower += memory[HELD, j]
        need[DOWN, j] = 0
        if lower > 0:
            # So many whole cells of the chunks 0 … min(j, top) fit while each further chunk up to `top`
            # holds one. n_j is k + 1 - fitting. TINY lowers it before the ceiling: rounding must not require
            # a cell too many.
            fitting = (direction.capacity[r] - (upper - lower)) / lower
            if fitting < k + 1:
                need[DOWN, j] = min(k, int(np.ceil(k + 1 - fitting - TINY * (k + 1))))
    for j in range(chunks):
        if kind == DOWN:
            need[UP, j] = need[REST_BEFORE, j] = k + 1
            need[DOWN, j] = max(need[DOWN, j], k + 1 if j > c else k if j == c else k + 1 - in_flight[j])
        elif j < c:
            need[UP, j] = need[REST_BEFORE, j] = k + 1
        elif j == c:
            # In reverse, a separate W of cell k comes before up(c, k), so k + 1 rests are required.
            need[UP, j], need[REST_BEFORE, j] = k, k + is_split[j]
        else:
            need[UP, j] = need[REST_BEFORE, j] = max(need[DOWN, j], k + 1 - in_flight[c], 0)


@compiled_leaf
def _after_required(
    direction: Direction, state: Sweep, kind: int, r: int, c: int
) -> float:  # pragma: no cover - compiled
    """After the last of the required down operations of every chunk: Lemma 13."""
    work, stages, need = direction.work[r], direction.stages[r], state.need
    head = EVER
    for j in range(len(stages)):
        # For a down operation of chunk c, `_path` has added the previous one of this chunk.
        if need[DOWN, j] > 0 and (kind == UP or j != c):
            head = max(head, state.heads[DOWN, stages[j], need[DOWN, j] - 1] + work[DOWN, j])
    return head


@compiled_leaf
def _load(
    direction: Direction, state: Sweep, r: int, top: int, k: int, head: float
) -> float:  # pragma: no cover - compiled
    """The head, raised by what the rank must do before: Lemmas 14 and 16."""
    work, need = direction.work[r], state.need
    extra = direction.work_per_memory[r] * _lacking(direction, need, r, top, k)
    required = 0.0
    for j in range(work.shape[1]):
        required += need[UP, j] * work[UP, j]
        required += need[DOWN, j] * work[DOWN, j]
        required += need[REST_BEFORE, j] * work[REST_BEFORE, j]
    required = extra + required
    for i in range(state.known[r]):
        # The work done before a time is at least 0, so other times cannot raise the head.
        if state.times[r, i] + required > head:
            left = required - _done(direction, state, r, i, extra)
            # If all of R can be done before t, the operation may start before t. So t counts only if R
            # exceeds done(t), by more than rounding: Lemma 16.
            if left > TINY * required:
                head = max(head, state.times[r, i] + left)
    return head


@compiled_leaf
def _lacking(
    direction: Direction, need: IntArray, r: int, top: int, k: int
) -> float:  # pragma: no cover - compiled
    """Memory that must be released beyond what the required down operations release: Lemma 14."""
    memory, capacity = direction.memory[r], direction.capacity[r]
    lacking = -capacity
    for j in range(top + 1):
        lacking += memory[HELD, j] * (k + 1) - memory[FREED_BY_DOWN, j] * need[DOWN, j]
    return max(0.0, lacking) if capacity < np.inf else 0.0


@compiled_leaf
def _done(
    direction: Direction, state: Sweep, r: int, i: int, extra: float
) -> float:  # pragma: no cover - compiled
    """Most of the required work that can have been done before the rank's i-th time: Lemma 15."""
    # Only the origin is a time of at most 0. It is listed only for ranks that run nothing before it.
    if state.times[r, i] <= 0:
        return 0.0
    work, need, counts = direction.work[r], state.need, state.counts[r, i]
    done, other = 0.0, 0.0
    for j in range(work.shape[1]):
        # `other` bounds the further work of Lemma 14 that is done: rests after down operations that have
        # begun, and such down operations beyond the required ones (Lemma 15 (b)).
        downs = min(need[DOWN, j], counts[DOWN, j])
        done += downs * work[DOWN, j]
        other += counts[DOWN, j] * work[REST_AFTER, j] + (counts[DOWN, j] - downs) * work[DOWN, j]
    # The releases are rounded up like the capacity (Lemma 9): more free memory only lowers a head.
    free = direction.capacity[r] + state.freed[r, i] * (1 + AMOUNT_ROUNDING)
    packed = knapsack(work, direction.memory[r], free, counts[UP], need[UP], need[REST_BEFORE], state.scratch)
    return float(done + min(extra, other) + packed)


@compiled_leaf
def _cell_end(direction: Direction, state: Sweep, stage: int, k: int) -> float:  # pragma: no cover - compiled
    """Earliest end of a cell's last operation; W's follow each other where no cell is fused: Lemma 17."""
    r, c = state.rank[stage], state.chunk[stage]
    work, heads = direction.work[r], state.heads
    end: float = heads[DOWN, stage, k] + work[DOWN, c] + work[REST_AFTER, c]
    if k > 0 and direction.is_split[r, c]:
        end = max(end, heads[CELL_END, stage, k - 1] + work[REST_AFTER, c])
    return end


@compiled_leaf
def _count(
    direction: Direction, state: Sweep, kind: int, stage: int, k: int
) -> None:  # pragma: no cover - compiled
    """Count a new head at every time of its rank."""
    r, c = state.rank[stage], state.chunk[stage]
    head, times, memory = state.heads[kind, stage, k], state.times[r], direction.memory[r]
    for i in range(state.known[r]):
        # Heads of a stage ascend with k, so the last k with a head before the time gives the count.
        if head < times[i]:
            state.counts[r, i, kind, c] = k + 1
        if kind == DOWN and head + direction.work[r, DOWN, c] <= times[i]:
            state.freed[r, i] += memory[FREED_BY_DOWN, c]
        if kind == DOWN and state.heads[CELL_END, stage, k] <= times[i]:
            state.freed[r, i] += memory[FREED_BY_REST, c]


@compiled_leaf
def _add_time(direction: Direction, state: Sweep, r: int, time: float) -> None:  # pragma: no cover - compiled
    """A new time t of a rank, and what of microbatch 0 comes before it (unknown heads are inf)."""
    heads, stages, memory = state.heads, direction.stages[r], direction.memory[r]
    at = state.known[r]
    state.times[r, at] = time
    for c in range(len(stages)):
        for kind in (UP, DOWN):
            if heads[kind, stages[c], 0] < time:
                state.counts[r, at, kind, c] = 1
        if heads[DOWN, stages[c], 0] + direction.work[r, DOWN, c] <= time:
            state.freed[r, at] += memory[FREED_BY_DOWN, c]
        if heads[CELL_END, stages[c], 0] <= time:
            state.freed[r, at] += memory[FREED_BY_REST, c]
    state.known[r] += 1
