"""An order as annealing sees it: ends, tails and memory of every action, and the moves that change it.

An action's *end* is its earliest end, and its *tail* is the longest path from that end to the objective. The
largest end + tail is the objective, and an action that attains it is critical (the disjunctive graph of
job-shop scheduling, Roy and Sussmann 1964).

Any order of the microbatches is allowed, and every rank and letter may have its own.

Everything is computed here from the order alone. :mod:`zbv_solver.improve.order_repair` keeps it up to date
while the order changes.

A move shifts one action a few places along its rank. Nine out of ten moves start on a critical path. A move
is judged only by the ends before and the tails after the moved stretch (Balas and Vazacopoulos 1998, "Guided
local search with shifting bottleneck for job shop scheduling", section 3). Memory is a prefix sum over the
rank and is checked for the stretch only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import from_orders
from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled_inline, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, Problem

REACH = 12
"""Most places that one move shifts an action."""
CRITICAL_SHARE = 0.9
BUCKETS = 2
"""Buckets of the queue, as a multiple of the most actions of a rank."""
NONE, ABSENT = -1, -2


class State(NamedTuple):
    """An order of p ranks with up to L actions each, m microbatches and 2S positions; kernels write into it.

    Microbatches have the numbers k of the tables: their places in the order of entry of the first order.
    """

    code: IntArray
    microbatch: IntArray
    """(p, L) int8 and int64, of an action; see :mod:`zbv_solver.construct.tables` for codes."""
    length: IntArray
    """(p,) number of actions of a rank."""
    end: FloatArray
    tail: FloatArray
    held: FloatArray
    """(p, L) earliest end, tail, and memory of the rank after the action."""
    place: IntArray
    passed_on: FloatArray
    """(2S, m) index on its rank, and end, of a microbatch's action at a position."""
    cursor: IntArray
    """(p,) how far a sweep has come on a rank."""
    release: FloatArray
    """(p,) earliest start of a rank; the rank's time counts from here."""

    @classmethod
    def of(cls, problem: Problem, orders: Orders, tables: Tables, release: FloatArray) -> State:
        """The state of an order; :func:`compute_all` fills in all arrays but those of the order itself."""
        code, length, _ = from_orders(orders, problem)
        shape, chain = code.shape, (len(tables.latency), tables.microbatches)
        number = np.argsort(tables.entry)[orders.microbatch]
        microbatch = np.zeros(shape, np.int64)
        for rank in range(len(length)):
            microbatch[rank, : length[rank]] = number[orders.slice_of(rank)]
        return cls(
            code=code,
            microbatch=microbatch,
            length=length,
            end=np.zeros(shape),
            tail=np.zeros(shape),
            held=np.zeros(shape),
            place=np.zeros(chain, np.int64),
            passed_on=np.zeros(chain),
            cursor=np.zeros(shape[0], np.int64),
            release=release,
        )


@compiled_leaf
def compute_all(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute all arrays from the order."""
    state.cursor[:] = 0
    for rank in range(len(state.length)):
        for at in range(state.length[rank]):
            position = tables.position[rank, state.code[rank, at]]
            if position >= 0:
                state.place[position, state.microbatch[rank, at]] = at
    sweep_ends(tables, state)
    for rank in range(len(state.length)):
        state.cursor[rank] = state.length[rank]
        sum_memory(tables, state, rank, ZERO, state.length[rank])
    sweep_tails(tables, state)


@compiled_leaf
def sum_memory(
    tables: Tables, state: State, rank: int, begin: int, settled: int
) -> None:  # pragma: no cover - compiled
    """Write ``held`` of a rank from ``begin`` to the first amount from ``settled`` on that is not new.

    Memory depends on the order, not on times.
    """
    now = state.held[rank, begin - 1] if begin > 0 else tables.static[rank]
    for at in range(begin, state.length[rank]):
        now += tables.delta[rank, state.code[rank, at], tables.kind[state.microbatch[rank, at]]]
        if at >= settled and state.held[rank, at] == now:
            return
        state.held[rank, at] = now


@compiled_inline
def duration_at(tables: Tables, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The duration of an action whose microbatch is known."""
    return float(tables.duration[rank, state.code[rank, at], tables.kind[state.microbatch[rank, at]]])


@compiled_leaf
def sweep_ends(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute ends from the cursors on; the order must not deadlock."""
    length, cursor, end, passed_on = state.length, state.cursor, state.end, state.passed_on
    host, latency = tables.host, tables.latency
    p = len(length)
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # down the V and up again, as microbatches go
            begin = cursor[rank]
            at, until = begin, length[rank]
            # Ranks stop at different points; each resumes from the end before its cursor.
            clock = end[rank, at - 1] if at > 0 else state.release[rank]
            while at < until:
                action, k = state.code[rank, at], state.microbatch[rank, at]
                position, kind = tables.position[rank, action], tables.kind[k]
                if position > 0:
                    # A W needs only its I, and the rank's order already puts that before it.
                    other = host[position - 1]
                    if other != rank and state.place[position - 1, k] >= cursor[other]:
                        break
                    clock = max(clock, passed_on[position - 1, k] + latency[position, kind])
                clock += tables.duration[rank, action, kind]
                if position >= 0:
                    passed_on[position, k] = clock
                end[rank, at] = clock
                at += 1
            if at > begin:
                progress = True
                cursor[rank] = at


@compiled_leaf
def sweep_tails(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute tails from just before the cursors back to the first actions."""
    length, cursor, tail, place = state.length, state.cursor, state.tail, state.place
    latency, host = tables.latency, tables.host
    p, positions = len(length), len(latency)
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # as in sweep_ends
            begin = cursor[rank]
            at = begin
            while at > 0:
                after = tables.position[rank, state.code[rank, at - 1]] + 1
                # The objective counts a rank's end from its release, so the path after the last action has
                # length -release.
                if at == length[rank]:
                    way = -state.release[rank]
                else:
                    way = tail[rank, at] + duration_at(tables, state, rank, at)
                if 0 < after < positions:
                    k = state.microbatch[rank, at - 1]
                    other, there = host[after], place[after, k]
                    if other != rank and there < cursor[other]:
                        break
                    onward = tail[other, there] + duration_at(tables, state, other, there)
                    way = max(way, onward + latency[after, tables.kind[k]])
                tail[rank, at - 1] = way
                at -= 1
            if at < begin:
                progress = True
                cursor[rank] = at


@compiled_leaf
def objective(state: State) -> float:  # pragma: no cover - compiled
    """Largest end over the ranks, each counted from its release."""
    largest = -np.inf
    for rank in range(len(state.length)):
        if state.length[rank] > 0:
            largest = max(largest, state.end[rank, state.length[rank] - 1] - state.release[rank])
    return largest


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

    @classmethod
    def empty(cls) -> Move:
        """Arrays that are large enough for any move."""
        n = REACH + 1
        return cls(
            np.zeros(2, np.int64), np.zeros(n, np.int8), np.zeros(n, np.int64), np.zeros(n), np.zeros(n)
        )


class Queue(NamedTuple):
    """The actions to recompute, in buckets of similar keys (Dial 1969, Algorithm 360). Kernels write into it.

    A binary heap took two thirds of the time of a repair.
    """

    first: IntArray
    """(buckets,) the action added last to every bucket, or NONE."""
    following: IntArray
    """(n,) the next action of the same bucket, NONE after the last one, or ABSENT if it does not wait; an
    action is rank * L + index, for up to L actions on a rank."""
    size: IntArray
    """(2,) number of actions that wait, and a bucket that none of them precedes."""
    scale: FloatArray
    """(1,) buckets per unit of the keys, above 0. Keys outside of all buckets belong to the first or last
    one."""

    @classmethod
    def of(cls, ranks: int, most: int) -> Queue:
        """An empty queue for so many ranks with up to ``most`` actions each."""
        return cls(
            np.full(BUCKETS * most, NONE, np.int32),
            np.full(ranks * most, ABSENT, np.int32),
            np.array([0, BUCKETS * most - 1]),
            np.ones(1),
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
