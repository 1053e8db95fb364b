"""Moves of annealing: one action moves a few places along its rank.

Nine out of ten moves start on a critical path. A move is judged only by the ends before and the tails after
the moved stretch (Balas and Vazacopoulos 1998, "Guided local search with shifting bottleneck for job shop
scheduling", section 3). Memory is a prefix sum over the rank and is checked for the stretch only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import Tables
from zbv_solver.improve.order_repair import Queue
from zbv_solver.improve.order_state import State, duration_at
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled_leaf
from zbv_solver.problem.problem import F

REACH = 12
"""Most places that one move shifts an action."""
CRITICAL_SHARE = 0.9


class Move(NamedTuple):
    """The current move: consecutive actions of a rank, rotated by one; kernels write into it."""

    bounds: IntArray
    """(2,) index of the first and last action on the rank; equal where nothing can move."""
    code: IntArray
    microbatch: IntArray
    tail: FloatArray
    """(REACH + 1,) codes and microbatches in the sequence after the move, and the tails before it."""
    way: FloatArray
    """(REACH + 1,) longest path from each of the moved actions' ends to the objective."""
    path: IntArray
    """(actions, 2) the critical path that moves are drawn from, rows (rank, index)."""
    fresh: IntArray
    queue: Queue
    """Space for :mod:`zbv_solver.improve.order_repair`."""

    @classmethod
    def of(cls, ranks: int, most: int) -> Move:
        """Arrays that are large enough for any move of so many ranks with up to ``most`` actions each."""
        reach, actions = REACH + 1, ranks * most
        return cls(
            np.zeros(2, np.int64),
            np.zeros(reach, np.int8),
            np.zeros(reach, np.int64),
            np.zeros(reach),
            np.zeros(reach),
            np.zeros((actions, 2), np.int64),
            np.zeros((actions, 2), np.int64),
            Queue.of(ranks, most),
        )


@compiled_leaf
def draw(path: IntArray, size: int, length: IntArray) -> tuple[int, int]:  # pragma: no cover - compiled
    """The rank and index of a random action, mostly of the critical path, which has ``size`` rows."""
    if np.random.random() < CRITICAL_SHARE:
        chosen = np.random.randint(size)
        return path[chosen, 0], path[chosen, 1]
    rank = np.random.randint(len(length))
    return rank, np.random.randint(length[rank])


@compiled_leaf
def delimit(
    tables: Tables, state: State, rank: int, at: int, reach: int, overtakes: bool, bounds: IntArray
) -> None:  # pragma: no cover - compiled
    """Write the first and last index of the stretch that the action at ``at`` may cross.

    ``reach`` is the number of places to move, positive towards the beginning. The action passes none that it
    needs, none that needs it, and none of the same stage and letter unless it ``overtakes``. Memory fits
    throughout. It passes no action that ends before its own input arrives. So no cycle can arise: if there
    were a path from the passed action to that input, the input would arrive later.
    """
    position, limit, static = tables.position, tables.limit[rank], tables.static[rank]
    code, microbatch, end, held = state.code, state.microbatch, state.end, state.held
    action, k = code[rank, at], microbatch[rank, at]
    change = tables.delta[rank, action, tables.kind[k]]
    here = at
    if reach > 0:
        arrives = _arrives(tables, state, rank, action, k)
        while here > 0 and at - here < reach:
            other = code[rank, here - 1]
            if (
                _needs(position, rank, action, k, other, microbatch[rank, here - 1], overtakes)
                or end[rank, here - 1] <= arrives
            ):
                break
            # A larger amount held affects only the actions that are passed. Memory while an action runs is at
            # most the larger of what is held before and after it. An earlier release needs no check.
            before = held[rank, here - 2] if here > 1 else static
            if change > 0 and max(before, held[rank, here - 1]) + change > limit:
                break
            here -= 1
        while change > 0 and here < at:  # memory for the moved action itself
            before = held[rank, here - 1] if here > 0 else static
            if before + change <= limit:
                break
            here += 1
        bounds[0], bounds[1] = here, at
        return
    while here + 1 < state.length[rank] and here - at < -reach:
        other = code[rank, here + 1]
        if _needs(position, rank, other, microbatch[rank, here + 1], action, k, overtakes):
            break
        if _arrives(tables, state, rank, other, microbatch[rank, here + 1]) >= end[rank, at]:
            break
        # A later release keeps memory held during the actions passed; a later allocation needs no check.
        if change < 0 and max(held[rank, here], held[rank, here + 1]) - change > limit:
            break
        here += 1
    bounds[0], bounds[1] = at, here


@compiled_leaf
def _arrives(
    tables: Tables, state: State, rank: int, action: int, k: int
) -> float:  # pragma: no cover - compiled
    """When the input of an action arrives from the previous position; -inf for a W or the first position."""
    position = tables.position[rank, action]
    if position <= 0:
        return -np.inf
    return float(state.passed_on[position - 1, k] + tables.latency[position, tables.kind[k]])


@compiled_leaf
def _needs(
    positions: IntArray, rank: int, action: int, k: int, other: int, other_k: int, overtakes: bool
) -> bool:  # pragma: no cover - compiled
    """Whether an action must stay after another one of its rank, which it depends on or may not overtake."""
    if action == other:
        return not overtakes
    position, before = positions[rank, action], positions[rank, other]
    if position < 0:  # W after its I
        return before >= 0 and action >> 2 == other >> 2 and other & 3 != F and k == other_k
    if before < 0:
        return False
    return (
        before < position and k == other_k
        if overtakes
        else before == position or (before < position and k == other_k)
    )


@compiled_leaf
def rotate(state: State, rank: int, earlier: bool, move: Move) -> None:  # pragma: no cover - compiled
    """Write into ``move`` the stretch with its last action first, or its first action last."""
    low, high = move.bounds
    n = high - low + 1
    for step in range(n):
        source = low + (step + n - 1) % n if earlier else low + (step + 1) % n
        move.code[step] = state.code[rank, source]
        move.microbatch[step] = state.microbatch[rank, source]
        move.tail[step] = state.tail[rank, source]


@compiled_leaf
def judge(tables: Tables, state: State, rank: int, move: Move) -> float:  # pragma: no cover - compiled
    """Longest path through the rotated stretch; the path after the move is not longer, so no move is undone.

    The ends before the stretch and the tails after it do not change. A path may also leave the stretch and
    come back to it, but :func:`delimit` keeps it from doing so between the moved action and a passed one. If
    the action moves to an earlier place, the passed actions that such a path comes back to have no longer
    tails than before; if it moves to a later place, the path arrives there no later than before. So the old
    tails and arrivals, which are used here, are large enough.
    """
    tail, duration, latency = state.tail, tables.duration, tables.latency
    (low, high), way = move.bounds, move.way
    n, positions = high - low + 1, len(latency)
    if high + 1 < state.length[rank]:
        after = tail[rank, high + 1] + duration_at(tables, state, rank, high + 1)
    else:
        after = -state.release[rank]
    # Backwards: the longest path from each end to the objective, on this rank or through the next position.
    for step in range(n - 1, -1, -1):
        action, k = move.code[step], move.microbatch[step]
        position, kind = tables.position[rank, action], tables.kind[k]
        if 0 <= position < positions - 1:
            other, there = tables.host[position + 1], state.place[position + 1, k]
            onward = tail[other, there] + duration_at(tables, state, other, there)
            after = max(after, onward + latency[position + 1, kind])
        way[step] = after
        after += duration[rank, action, kind]
    # Forwards: the earliest ends. Their sum with ``way`` is the longest path through each moved action.
    clock = state.end[rank, low - 1] if low > 0 else state.release[rank]
    longest = -np.inf
    for step in range(n):
        action, k = move.code[step], move.microbatch[step]
        clock = max(clock, _arrives(tables, state, rank, action, k))
        clock += duration[rank, action, tables.kind[k]]
        longest = max(longest, clock + way[step])
    return longest


@compiled_leaf
def apply_move(tables: Tables, state: State, rank: int, move: Move) -> None:  # pragma: no cover - compiled
    """Write the rotated stretch, and where its actions are, into the state."""
    low, high = move.bounds
    for step in range(high - low + 1):
        state.code[rank, low + step] = move.code[step]
        state.microbatch[rank, low + step] = move.microbatch[step]
        position = tables.position[rank, move.code[step]]
        if position >= 0:
            state.place[position, move.microbatch[step]] = low + step
