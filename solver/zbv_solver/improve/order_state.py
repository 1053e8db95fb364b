"""An order as annealing sees it: ends, tails and memory of every action, and a critical path.

An action's *end* is its earliest end, and its *tail* is the longest path from that end to the objective. The
largest end + tail is the objective, and an action that attains it is critical (the disjunctive graph of
job-shop scheduling, Roy and Sussmann 1964).

Any order of the microbatches is allowed, and every rank and letter may have its own.

Everything is computed here from the order alone. :mod:`zbv_solver.improve.order_repair` keeps it up to date
while the order changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import from_orders
from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled_inline, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem


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


class Kept(NamedTuple):
    """A copy of an order; kernels write into it."""

    code: IntArray
    microbatch: IntArray
    """As in :class:`State`."""
    entry: IntArray
    """(m,) the microbatch of every number."""

    @classmethod
    def of(cls, state: State, tables: Tables) -> Kept:
        """A copy of the state's order."""
        return cls(state.code.copy(), state.microbatch.copy(), tables.entry.copy())

    def orders(self, problem: Problem, length: IntArray) -> Orders:
        """The order, of a problem whose ranks have ``length`` (p,) actions."""
        rows, stages = [], np.array(problem.placement.stages_of, dtype=np.int32)
        for rank, until in enumerate(length):
            code, number = self.code[rank, :until], self.microbatch[rank, :until]
            rows.append(np.stack([stages[rank, code >> 2], code & 3, self.entry[number]], axis=1))
        return Orders.of_rows([row.astype(np.int32) for row in rows])


@compiled_leaf
def keep(tables: Tables, state: State, kept: Kept) -> None:  # pragma: no cover - compiled
    """Copy the state's order."""
    copy(tables.entry, kept.entry)
    for rank in range(len(state.length)):
        copy(state.code[rank], kept.code[rank])
        copy(state.microbatch[rank], kept.microbatch[rank])


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
