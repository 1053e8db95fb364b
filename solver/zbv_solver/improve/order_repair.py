"""Keeps an order's state up to date after a move, at the cost of what changes.

A move permutes a short stretch of one rank. Only actions whose own inputs change can change, so each repair
begins at the stretch and follows the changes: for ends to the next action of the rank and to the next
position of the microbatch, for tails the other way. It stops wherever a recomputed value equals the old one.
A move changes either a few dozen values or most of those after it, as a delay of critical actions moves all
that follows. In the second case, the repair ends with a sweep over the rest of the order.

A priority queue visits actions by their value before the move. This order is topological outside the stretch,
but for actions of one bucket, so nearly every action is recomputed once. The results do not depend on it: a
value is recomputed whenever one of its inputs changes, so at the end all values are the ones that
:func:`.order_state.compute_all` finds, to the last bit.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.construct.tables import Tables
from zbv_solver.improve.order_state import (
    ABSENT,
    NONE,
    Queue,
    State,
    duration_at,
    objective,
    sweep_ends,
    sweep_tails,
)
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled_leaf
from zbv_solver.problem.numeric import OPTIMAL_GAP

SHORTEST = 1e-300
"""Durations may be 0; the scale of the buckets must be finite."""
SWEEP = 32
"""Once a repair has recomputed this fraction of the rest of the order one by one, it sweeps over the rest."""


@compiled_leaf
def spread(queue: Queue, longest: float) -> None:  # pragma: no cover - compiled
    """Divide the times from 0 to ``longest`` among the buckets."""
    queue.scale[0] = len(queue.first) / max(longest, SHORTEST)


@compiled_leaf
def push(queue: Queue, key: float, action: int) -> None:  # pragma: no cover - compiled
    """Add an action, unless it waits already."""
    if queue.following[action] != ABSENT:
        return
    bucket = int(min(max(key * queue.scale[0], 0.0), len(queue.first) - 1.0))
    queue.following[action] = queue.first[bucket]
    queue.first[bucket] = action
    queue.size[0] += 1
    queue.size[1] = min(queue.size[1], bucket)


@compiled_leaf
def pop(queue: Queue) -> int:  # pragma: no cover - compiled
    """Remove and return an action of the first bucket that has one."""
    bucket = queue.size[1]
    while queue.first[bucket] == NONE:
        bucket += 1
    action = queue.first[bucket]
    queue.first[bucket] = queue.following[action]
    queue.following[action] = ABSENT
    queue.size[0] -= 1
    queue.size[1] = bucket if queue.size[0] > 0 else len(queue.first) - 1
    return int(action)


@compiled_leaf
def repair_ends(
    tables: Tables, state: State, queue: Queue, rank: int, low: int, high: int
) -> float:  # pragma: no cover - compiled
    """Recompute ends after the stretch low..high of a rank was permuted; ``place`` is correct already.

    Returns the latest end among those that changed, before or after, and those of the stretch; inf after a
    sweep.
    """
    end, length, most = state.end, state.length, state.code.shape[1]
    latest = end[rank, high]
    for at in range(low, high + 1):
        value = _end(tables, state, rank, at)
        if at == high and value != latest and at + 1 < length[rank]:
            push(queue, end[rank, at + 1], rank * most + at + 1)
        end[rank, at] = value
        _pass_on(tables, state, queue, rank, at)
    latest = max(latest, end[rank, high])
    most_popped, popped = len(length) * (length[rank] - low) // SWEEP, 0
    while queue.size[0] > 0:
        if popped > most_popped:
            _settle(tables, state, end, queue, True)
            sweep_ends(tables, state)
            return np.inf
        popped += 1
        action = pop(queue)
        here, at = action // most, action % most
        old, value = end[here, at], _end(tables, state, here, at)
        if value == old:
            continue
        latest = max(latest, old, value)
        end[here, at] = value
        _pass_on(tables, state, queue, here, at)
        if at + 1 < length[here]:
            push(queue, end[here, at + 1], action + 1)
    return float(latest)


@compiled_leaf
def _end(tables: Tables, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The end of an action from the ends of its inputs, by the sums of ``sweep_ends``."""
    clock = state.end[rank, at - 1] if at > 0 else state.release[rank]
    action = state.code[rank, at]
    position = tables.position[rank, action]
    if position > 0:
        k = state.microbatch[rank, at]
        clock = max(clock, state.passed_on[position - 1, k] + tables.latency[position, tables.kind[k]])
    return float(clock + duration_at(tables, state, rank, at))


@compiled_leaf
def _pass_on(
    tables: Tables, state: State, queue: Queue, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """Store an end by position; if it changed, the next position's action must be recomputed."""
    position = tables.position[rank, state.code[rank, at]]
    if position < 0:
        return
    k, value = state.microbatch[rank, at], state.end[rank, at]
    if state.passed_on[position, k] == value:
        return
    state.passed_on[position, k] = value
    if position + 1 < len(tables.host):
        other, there = tables.host[position + 1], state.place[position + 1, k]
        push(queue, state.end[other, there], other * state.code.shape[1] + there)


@compiled_leaf
def repair_tails(
    tables: Tables, state: State, queue: Queue, rank: int, low: int, high: int, before: FloatArray
) -> None:  # pragma: no cover - compiled
    """Recompute tails after the stretch was permuted; ``before`` has the old tails in the new sequence."""
    tail, most = state.tail, state.code.shape[1]
    for at in range(high, low - 1, -1):
        value = _tail(tables, state, rank, at)
        tail[rank, at] = value
        if value != before[at - low]:
            _ask(tables, state, queue, rank, at)
    if low > 0:  # another action follows it
        push(queue, tail[rank, low - 1], rank * most + low - 1)
    most_popped, popped = len(state.length) * low // SWEEP, 0
    while queue.size[0] > 0:
        if popped > most_popped:
            _settle(tables, state, tail, queue, False)
            sweep_tails(tables, state)
            return
        popped += 1
        action = pop(queue)
        here, at = action // most, action % most
        value = _tail(tables, state, here, at)
        if value == tail[here, at]:
            continue
        tail[here, at] = value
        _ask(tables, state, queue, here, at)
        if at > 0:
            push(queue, tail[here, at - 1], action - 1)


@compiled_leaf
def _settle(
    tables: Tables, state: State, value: FloatArray, queue: Queue, ascending: bool
) -> None:  # pragma: no cover - compiled
    """Empty the queue, and set the cursors so that a sweep recomputes all that its actions may change.

    ``value`` has ends, which ascend along a rank, or tails, which descend. An action that need not be
    recomputed has no smaller value than its inputs. So those below the smallest value in the queue are final.
    """
    most, least = state.code.shape[1], np.inf
    while queue.size[0] > 0:
        action = pop(queue)
        least = min(least, value[action // most, action % most])
    for rank in range(len(state.length)):
        low, high = 0, state.length[rank]
        while low < high:
            middle = (low + high) >> 1
            if (value[rank, middle] < least) == ascending:
                low = middle + 1
            else:
                high = middle
        state.cursor[rank] = low


@compiled_leaf
def _tail(tables: Tables, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The tail of an action from the tails of what follows it, by the sums of ``sweep_tails``."""
    tail = state.tail
    if at + 1 < state.length[rank]:
        way = tail[rank, at + 1] + duration_at(tables, state, rank, at + 1)
    else:
        way = -state.release[rank]
    after = tables.position[rank, state.code[rank, at]] + 1
    if 0 < after < len(tables.host):
        k = state.microbatch[rank, at]
        other, there = tables.host[after], state.place[after, k]
        onward = tail[other, there] + duration_at(tables, state, other, there)
        way = max(way, onward + tables.latency[after, tables.kind[k]])
    return float(way)


@compiled_leaf
def _ask(
    tables: Tables, state: State, queue: Queue, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """The tail of an action changed: the previous position's action must be recomputed."""
    position = tables.position[rank, state.code[rank, at]]
    if position > 0:
        other = tables.host[position - 1]
        there = state.place[position - 1, state.microbatch[rank, at]]
        push(queue, state.tail[other, there], other * state.code.shape[1] + there)


@compiled_leaf
def critical_path(tables: Tables, state: State, path: IntArray) -> int:  # pragma: no cover - compiled
    """Write a critical path into ``path``, rows (rank, index), last action first; return its length."""
    value = objective(state)
    # Ends and starts are sums in floating point, so equality along the path needs a tolerance.
    rounding = OPTIMAL_GAP * abs(value)
    rank, at = _critical_end(state, value - rounding)
    size = 0
    while rank >= 0:
        path[size, 0], path[size, 1] = rank, at
        size += 1
        rank, at = _critical_before(tables, state, rank, at, rounding)
    return size


@compiled_leaf
def repair_path(
    tables: Tables, state: State, path: IntArray, size: int, bar: float, latest: float, fresh: IntArray
) -> int:  # pragma: no cover - compiled
    """Update ``path`` to what :func:`critical_path` would write; return its new length.

    ``bar`` is the end before the stretch: no end below it has changed. ``latest`` comes from
    :func:`repair_ends`. ``fresh`` is as large as ``path``, for the part that is traced again.
    """
    end, value = state.end, objective(state)
    rounding = OPTIMAL_GAP * abs(value)
    rank, at = _critical_end(state, value - rounding)
    # What an action's critical input is depends on its begin and on ends up to there. So the first part of
    # the path, of actions that begin after ``latest``, continues as before. The action after it may be in the
    # stretch and have moved to another index.
    kept = 0
    if path[0, 0] == rank and path[0, 1] == at:
        until = size - 1
        while kept < until:
            middle = (kept + until) >> 1
            other, there = path[middle, 0], path[middle, 1]
            begin = end[other, there] - duration_at(tables, state, other, there)
            if begin - rounding > latest:
                kept = middle + 1
            else:
                until = middle
        kept = max(kept - 1, 0)
        rank, at = path[kept, 0], path[kept, 1]
    # Actions that end before ``bar`` continue as before, too. Once the new path comes to an action of the old
    # one there, the rest is the same.
    old, until = kept, size
    while old < until:
        middle = (old + until) >> 1
        if end[path[middle, 0], path[middle, 1]] >= bar:
            old = middle + 1
        else:
            until = middle
    count = 0
    while rank >= 0:
        here = end[rank, at]
        while old < size and end[path[old, 0], path[old, 1]] >= here:
            if path[old, 0] == rank and path[old, 1] == at:
                break
            old += 1
        if here < bar and old < size and path[old, 0] == rank and path[old, 1] == at:
            break
        fresh[count, 0], fresh[count, 1] = rank, at
        count += 1
        rank, at = _critical_before(tables, state, rank, at, rounding)
    if rank < 0:
        old = size
    _replace(path, kept, old, size, fresh, count)
    return int(kept + count + size - old)


@compiled_leaf
def _replace(
    path: IntArray, begin: int, end: int, size: int, rows: IntArray, count: int
) -> None:  # pragma: no cover - compiled
    """Replace rows begin..end of a path of ``size`` rows by ``count`` others."""
    shift = begin + count - end
    if shift > 0:
        for at in range(size - 1, end - 1, -1):
            path[at + shift, 0], path[at + shift, 1] = path[at, 0], path[at, 1]
    elif shift < 0:
        for at in range(end, size):
            path[at + shift, 0], path[at + shift, 1] = path[at, 0], path[at, 1]
    for at in range(count):
        path[begin + at, 0], path[begin + at, 1] = rows[at, 0], rows[at, 1]


@compiled_leaf
def _critical_end(state: State, least: float) -> tuple[int, int]:  # pragma: no cover - compiled
    """The last rank whose end, counted from its release, is at least ``least``, and its last index."""
    rank, at = -1, -1
    for other in range(len(state.length)):
        last = state.length[other] - 1
        if last >= 0 and state.end[other, last] - state.release[other] >= least:
            rank, at = other, last
    return rank, at


@compiled_leaf
def _critical_before(
    tables: Tables, state: State, rank: int, at: int, rounding: float
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The action whose end determines the start of an action, as rank and index; (-1, -1) for the first."""
    action = state.code[rank, at]
    position = tables.position[rank, action]
    begin = state.end[rank, at] - duration_at(tables, state, rank, at) - rounding
    if at > 0 and state.end[rank, at - 1] >= begin:
        return rank, at - 1
    if position > 0:
        k = state.microbatch[rank, at]
        if state.passed_on[position - 1, k] + tables.latency[position, tables.kind[k]] >= begin:
            return tables.host[position - 1], state.place[position - 1, k]
    return -1, -1
