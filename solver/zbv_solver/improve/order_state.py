"""An order under local changes: heads, tails and memory of every action, repaired instead of recomputed.

Of an action, the *head* is its earliest end and the *tail* the longest way from that end to the objective;
the largest head + tail is the objective, and an action that reaches it is critical (the disjunctive graph of
job-shop scheduling, Roy and Sussmann 1964). After a change on one rank only actions that end later can get
another head, and only actions that end earlier another tail.

Kernels share these arrays (p ranks, L places a rank, 2S chain rows, m microbatches):

``code`` (p, L) int8, ``index`` (p, L)   code of an action, and its microbatch
``head``, ``tail``, ``held`` (p, L)      earliest end, tail, memory after the action
``place`` (2S, m), ``done`` (2S, m)      where the row's k-th action lies on its rank, and its head
``cursor`` (p,), ``count`` (2S,)         how far a sweep has come
``release`` (p,)                         a rank starts no earlier, and its window is counted from here
"""

from __future__ import annotations

import numpy as np

from zbv_solver.construct.tables import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import B, I, W


@compiled
def number(
    code: IntArray, length: IntArray, row: IntArray, index: IntArray, place: IntArray
) -> None:  # pragma: no cover - compiled
    """Write ``index`` and ``place`` of all actions from their codes."""
    for rank in range(len(row)):
        seen = np.zeros(row.shape[1], np.int64)
        for at in range(length[rank]):
            action = code[rank, at]
            line = row[rank, action]
            if line >= 0:
                kind = action - 2 if action & 3 == B else action  # B and I share a row
                index[rank, at] = seen[kind]
                place[line, seen[kind]] = at
                seen[kind] += 1
        number_weights(code, length, row, index, place.shape[1], rank)


@compiled
def number_weights(
    code: IntArray, length: IntArray, row: IntArray, index: IntArray, m: int, rank: int
) -> None:  # pragma: no cover - compiled
    """Write ``index`` of the W's of a rank: the microbatch of the oldest I without one."""
    chunks = row.shape[1] // 4
    split = np.empty((chunks, m), np.int64)
    begun, ended = np.zeros(chunks, np.int64), np.zeros(chunks, np.int64)
    for at in range(length[rank]):
        letter, chunk = code[rank, at] & 3, code[rank, at] >> 2
        if letter == I:
            split[chunk, begun[chunk]] = index[rank, at]
            begun[chunk] += 1
        elif letter == W:
            index[rank, at] = split[chunk, ended[chunk]]
            ended[chunk] += 1


@compiled
def memory(
    code: IntArray, length: IntArray, delta: FloatArray, static: FloatArray, held: FloatArray, rank: int
) -> None:  # pragma: no cover - compiled
    """Write ``held`` of a rank."""
    now = static[rank]
    for at in range(length[rank]):
        now += delta[rank, code[rank, at]]
        held[rank, at] = now


@compiled
def count_before(
    place: IntArray, host: IntArray, cursor: IntArray, count: IntArray
) -> None:  # pragma: no cover - compiled
    """Number of actions of every row that lie before their rank's cursor."""
    m = place.shape[1]
    for line in range(len(host)):
        low, high, until = 0, m, cursor[host[line]]
        while low < high:
            middle = (low + high) >> 1
            if place[line, middle] < until:
                low = middle + 1
            else:
                high = middle
        count[line] = low


@compiled
def sweep_heads(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    release: FloatArray,
    index: IntArray,
    place: IntArray,
    head: FloatArray,
    done: FloatArray,
    cursor: IntArray,
    count: IntArray,
) -> bool:  # pragma: no cover - compiled
    """Heads from the cursors on; False if the order deadlocks."""
    p, m = row.shape[0], place.shape[1]
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # down the V and up again, as microbatches go
            begin = cursor[rank]
            at, until = begin, length[rank]
            clock = head[rank, at - 1] if at > 0 else release[rank]
            while at < until:
                action = code[rank, at]
                line = row[rank, action]
                if line < 0:
                    clock += duration[rank, action]
                else:
                    k = count[line]
                    if k >= m:
                        return False
                    if line > 0:
                        if k >= count[line - 1]:
                            break
                        clock = max(clock, done[line - 1, k] + lag[line])
                    clock += duration[rank, action]
                    done[line, k] = clock
                    place[line, k] = at
                    index[rank, at] = k
                    count[line] = k + 1
                head[rank, at] = clock
                at += 1
            if at > begin:
                progress = True
                cursor[rank] = at
    return bool(np.all(cursor == length))


@compiled
def evaluate_codes(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    done: FloatArray,
    cursor: IntArray,
    count: IntArray,
    clock: FloatArray,
) -> bool:  # pragma: no cover - compiled
    """Last ends of a whole order into ``clock`` (p,), and nothing else; False if it deadlocks."""
    p = row.shape[0]
    cursor[:] = 0
    count[:] = 0
    clock[:] = 0.0
    rank, step, stuck = 0, 1, 0
    while stuck < 2 * p:
        at, until, now = cursor[rank], length[rank], clock[rank]
        begin = at
        while at < until:
            action = code[rank, at]
            line = row[rank, action]
            if line < 0:
                now += duration[rank, action]
            else:
                k = count[line]
                if line > 0:
                    if k >= count[line - 1]:
                        break
                    now = max(now, done[line - 1, k] + lag[line])
                now += duration[rank, action]
                done[line, k] = now
                count[line] = k + 1
            at += 1
        stuck = 0 if at > begin else stuck + 1
        cursor[rank], clock[rank] = at, now
        if not 0 <= rank + step < p:
            step = -step
        else:
            rank += step
    return bool(np.all(cursor == length))


@compiled
def sweep_tails(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    host: IntArray,
    release: FloatArray,
    index: IntArray,
    place: IntArray,
    tail: FloatArray,
    cursor: IntArray,
    count: IntArray,
) -> None:  # pragma: no cover - compiled
    """Tails from just before the cursors back to the first actions."""
    p, rows = row.shape[0], len(lag)
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # down the V and up again, as microbatches go
            begin = cursor[rank]
            at = begin
            while at > 0:
                action = code[rank, at - 1]
                line = row[rank, action]
                if at == length[rank]:
                    way = -release[rank]
                else:
                    way = tail[rank, at] + duration[rank, code[rank, at]]
                if line >= 0:
                    k = index[rank, at - 1]
                    if line + 1 < rows:
                        if k < count[line + 1]:
                            break
                        other, there = host[line + 1], place[line + 1, k]
                        after = tail[other, there] + duration[other, code[other, there]]
                        way = max(way, after + lag[line + 1])
                    count[line] = k
                tail[rank, at - 1] = way
                at -= 1
            if at < begin:
                progress = True
                cursor[rank] = at


@compiled
def heads_from(
    length: IntArray, head: FloatArray, time: float, rank: int, at: int, cursor: IntArray
) -> None:  # pragma: no cover - compiled
    """Cursors at the first action that ends at ``time`` or later; on ``rank`` at ``at``."""
    for other in range(len(length)):
        low, high = 0, length[other]
        while low < high:
            middle = (low + high) >> 1
            if head[other, middle] < time:
                low = middle + 1
            else:
                high = middle
        cursor[other] = low
    cursor[rank] = at


@compiled
def tails_from(
    length: IntArray, tail: FloatArray, way: float, rank: int, at: int, cursor: IntArray
) -> None:  # pragma: no cover - compiled
    """Cursors after the last action whose tail is ``way`` or more; on ``rank`` after ``at``."""
    for other in range(len(length)):
        low, high = 0, length[other]
        while low < high:
            middle = (low + high) >> 1
            if tail[other, middle] >= way:
                low = middle + 1
            else:
                high = middle
        cursor[other] = low
    cursor[rank] = at + 1


@compiled
def objective(length: IntArray, head: FloatArray, release: FloatArray) -> float:  # pragma: no cover
    """Largest end over the ranks, each counted from its release."""
    largest = -np.inf
    for rank in range(len(length)):
        if length[rank] > 0:
            largest = max(largest, head[rank, length[rank] - 1] - release[rank])
    return largest


@compiled
def critical_path(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    host: IntArray,
    release: FloatArray,
    index: IntArray,
    place: IntArray,
    head: FloatArray,
    done: FloatArray,
    path: IntArray,
    value: float,
) -> int:  # pragma: no cover - compiled
    """One critical path, last action first, as (rank, place) rows of ``path``; returns its length."""
    rounding = OPTIMAL_GAP * abs(value)
    rank, at, size = -1, -1, 0
    for other in range(len(length)):
        if length[other] > 0 and head[other, length[other] - 1] - release[other] >= value - rounding:
            rank, at = other, length[other] - 1
    while rank >= 0:
        path[size, 0], path[size, 1] = rank, at
        size += 1
        action = code[rank, at]
        line, begin = row[rank, action], head[rank, at] - duration[rank, action]
        if at > 0 and head[rank, at - 1] >= begin - rounding:
            at -= 1
        elif line > 0 and done[line - 1, index[rank, at]] + lag[line] >= begin - rounding:
            at = place[line - 1, index[rank, at]]
            rank = host[line - 1]
        else:
            rank = -1
    return size
