"""An order as annealing sees it: ends, tails and memory of every action, and a critical path.

An action's *end* is its earliest end, and its *tail* is the longest path from that end to the objective. The
largest end + tail is the objective, and an action that attains it is critical (the disjunctive graph of
job-shop scheduling, Roy and Sussmann 1964).

Everything is computed here from the codes alone. :mod:`zbv_solver.improve.order_repair` keeps it up to date
while the order changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.arrays import ZERO, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_inline, compiled_leaf
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import B, I, W


class State(NamedTuple):
    """An order of p ranks with up to L actions each, m microbatches and 2S positions; kernels write into it.

    Attributes
    ----------
    code, microbatch
        (p, L) int8 and int64, of an action; see :mod:`zbv_solver.construct.tables` for codes.
    length
        (p,) number of actions of a rank.
    end, tail, held
        (p, L) earliest end, tail, and memory of the rank after the action.
    place, passed_on
        (2S, m) index on its rank, and end, of the k-th action at a position.
    cursor, counted
        (p,) and (2S,): how far a sweep has come on a rank, and at a position.
    release
        (p,) earliest start of a rank; the rank's time counts from here.
    """

    code: IntArray
    microbatch: IntArray
    length: IntArray
    end: FloatArray
    tail: FloatArray
    held: FloatArray
    place: IntArray
    passed_on: FloatArray
    cursor: IntArray
    counted: IntArray
    release: FloatArray

    @classmethod
    def of(cls, tables: Tables, code: IntArray, length: IntArray, release: FloatArray) -> State:
        """A state that shares the codes (p, L); :func:`compute_all` fills in the other arrays."""
        shape, chain = code.shape, (len(tables.latency), tables.microbatches)
        return cls(
            code=code,
            microbatch=np.zeros(shape, np.int64),
            length=length,
            end=np.zeros(shape),
            tail=np.zeros(shape),
            held=np.zeros(shape),
            place=np.zeros(chain, np.int64),
            passed_on=np.zeros(chain),
            cursor=np.zeros(shape[0], np.int64),
            counted=np.zeros(chain[0], np.int64),
            release=release,
        )


@compiled_leaf
def compute_all(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute all arrays from the codes."""
    state.cursor[:] = 0
    state.counted[:] = 0
    for rank in range(len(state.length)):
        number_weights(tables, state, rank)
    sweep_ends(tables, state)
    for rank in range(len(state.length)):
        state.cursor[rank] = state.length[rank]
        sum_memory(tables, state, rank, ZERO, state.length[rank])
    state.counted[:] = tables.microbatches
    sweep_tails(tables, state)


@compiled_leaf
def number_weights(tables: Tables, state: State, rank: int) -> None:  # pragma: no cover - compiled
    """Write ``microbatch`` of the backwards of a rank; a W has that of the oldest I without one."""
    code, microbatch = state.code[rank], state.microbatch[rank]
    for chunk in range(tables.position.shape[1] // 4):
        # Match W's and I's first in, first out: ``split`` only moves forward, so one pass per chunk suffices.
        split, ran = -1, 0
        for at in range(state.length[rank]):
            if code[at] == 4 * chunk + I or code[at] == 4 * chunk + B:
                microbatch[at] = ran
                ran += 1
            elif code[at] == 4 * chunk + W:
                split += 1
                while code[split] != 4 * chunk + I:
                    split += 1
                microbatch[at] = microbatch[split]


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


@compiled_leaf
def copy(source: IntArray, target: IntArray) -> None:  # pragma: no cover - compiled
    """Copy a row; NumPy's assignment would make an array in between."""
    for at in range(len(source)):
        target[at] = source[at]


@compiled_inline
def duration_at(tables: Tables, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The duration of an action whose microbatch is known."""
    return float(tables.duration[rank, state.code[rank, at], tables.kind[state.microbatch[rank, at]]])


@compiled_leaf
def sweep_ends(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute ends, microbatches and places from the cursors on; the order must not deadlock."""
    code, length, cursor, counted = state.code, state.length, state.cursor, state.counted
    end, passed_on, latency = state.end, state.passed_on, tables.latency
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
                action = code[rank, at]
                position = tables.position[rank, action]
                if position < 0:
                    # A W needs only its I, and the rank's order already puts that before it.
                    clock += tables.duration[rank, action, tables.kind[state.microbatch[rank, at]]]
                else:
                    k = counted[position]
                    kind = tables.kind[k]
                    if position > 0:
                        if k >= counted[position - 1]:
                            break
                        clock = max(clock, passed_on[position - 1, k] + latency[position, kind])
                    clock += tables.duration[rank, action, kind]
                    passed_on[position, k] = clock
                    state.place[position, k] = at
                    state.microbatch[rank, at] = k
                    counted[position] = k + 1
                end[rank, at] = clock
                at += 1
            if at > begin:
                progress = True
                cursor[rank] = at


@compiled_leaf
def sweep_tails(tables: Tables, state: State) -> None:  # pragma: no cover - compiled
    """Compute tails from just before the cursors back to the first actions."""
    code, length, cursor, counted = state.code, state.length, state.cursor, state.counted
    tail, latency, host = state.tail, tables.latency, tables.host
    p, positions = len(length), len(latency)
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # as in sweep_ends
            begin = cursor[rank]
            at = begin
            while at > 0:
                position = tables.position[rank, code[rank, at - 1]]
                # The objective counts a rank's end from its release, so the path after the last action has
                # length -release.
                if at == length[rank]:
                    way = -state.release[rank]
                else:
                    way = tail[rank, at] + duration_at(tables, state, rank, at)
                if position >= 0:
                    k = state.microbatch[rank, at - 1]
                    after = position + 1
                    if after < positions:
                        # ``counted`` now descends: the tails of the actions k >= counted[after] are final.
                        if k < counted[after]:
                            break
                        other, there = host[after], state.place[after, k]
                        onward = tail[other, there] + duration_at(tables, state, other, there)
                        way = max(way, onward + latency[after, tables.kind[k]])
                    counted[position] = k
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


@compiled_leaf
def critical_path(tables: Tables, state: State, path: IntArray) -> int:  # pragma: no cover - compiled
    """Write a critical path into ``path``, rows (rank, index), last action first; return its length."""
    value = objective(state)
    # Ends and starts are sums in floating point, so equality along the path needs a tolerance.
    rounding = OPTIMAL_GAP * abs(value)
    rank, at = critical_end(state, value - rounding)
    size = 0
    while rank >= 0:
        path[size, 0], path[size, 1] = rank, at
        size += 1
        rank, at = critical_before(tables, state, rank, at, rounding)
    return size


@compiled_leaf
def critical_end(state: State, least: float) -> tuple[int, int]:  # pragma: no cover - compiled
    """The last rank whose end, counted from its release, is at least ``least``, and its last index."""
    rank, at = -1, -1
    for other in range(len(state.length)):
        last = state.length[other] - 1
        if last >= 0 and state.end[other, last] - state.release[other] >= least:
            rank, at = other, last
    return rank, at


@compiled_leaf
def critical_before(
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
