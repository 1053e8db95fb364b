"""The board on which constructors place actions, and the order that a complete board is.

Kernels take the board and the problem's tables as records of arrays. The short ones are compiled without
reference counts (:func:`~zbv_solver.kernels.jit.compiled_leaf`): counting references to a dozen arrays at
every call took four to seven times as long as placing an action.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.rules import Rule
from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled, compiled_inline, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.timing.start_times import earliest_start_values

CLOCK, HELD, IDLE, FIRST = range(4)
"""Columns of ``Board.level``."""


FRONT, BACK = range(2)
"""Columns of ``Board.splits``."""


NOTHING = -1
"""No action."""


class Board(NamedTuple):
    """The actions placed so far; kernels write into these arrays."""

    level: FloatArray
    """(p, 4): end of the last action, memory held, idle time since the first start, and the first start."""
    placed: IntArray
    """(2S,): number of actions placed at every position of the chain."""
    end: FloatArray
    """(2S, m): their ends."""
    split: IntArray
    """(p, c, m) int32: the microbatches that ran I on a chunk, in order."""
    splits: IntArray
    """(p, c, 2): how many of them ran W (FRONT) and I (BACK)."""
    code: IntArray
    """(p, 3 * c * m) int8: the order so far."""
    length: IntArray
    """(p,): number of actions in it."""
    halt: IntArray
    """(1,) uint8: set from another thread to stop a kernel early."""

    @classmethod
    def of(cls, tables: Tables, halt: IntArray | None = None) -> Board:
        """An empty board for a problem; it can be cleared and reused."""
        p, chunks, m, positions = tables.pp_degree, tables.chunks, tables.microbatches, len(tables.latency)
        return cls(
            level=np.zeros((p, 4)),
            placed=np.zeros(positions, np.int64),
            end=np.zeros((positions, m)),
            split=np.zeros((p, chunks, m), np.int32),
            splits=np.zeros((p, chunks, 2), np.int64),
            code=np.zeros((p, 3 * chunks * m), np.int8),
            length=np.zeros(p, np.int64),
            halt=np.zeros(1, np.uint8) if halt is None else halt,
        )

    @property
    def makespan(self) -> float:
        """Last end minus first start."""
        return value_of(self, False)

    @property
    def span(self) -> float:
        """Longest time from a rank's first start to its last end, at earliest start."""
        return value_of(self, True)

    def value(self, problem: Problem) -> float:
        """The problem's objective of the order, at earliest start."""
        return value_of(self, problem.objective == "span")


@compiled_leaf
def value_of(board: Board, is_span: bool) -> float:  # pragma: no cover - compiled
    """The span, or the makespan, of a complete board."""
    first, last, longest = np.inf, -np.inf, -np.inf
    for rank in range(len(board.length)):
        begin, end = board.level[rank, FIRST], board.level[rank, CLOCK]
        first, last, longest = min(first, begin), max(last, end), max(longest, end - begin)
    return longest if is_span else last - first


@compiled_leaf
def is_complete(tables: Tables, board: Board) -> bool:  # pragma: no cover - compiled
    """Whether all actions are placed: every F and backward, and no W waits."""
    for position in range(len(board.placed)):
        if board.placed[position] < tables.microbatches:
            return False
    waiting = 0
    for rank in range(len(board.length)):
        waiting += oldest_weight(tables, board, rank) != NOTHING
    return waiting == 0


@compiled_leaf
def clear(tables: Tables, board: Board) -> None:  # pragma: no cover - compiled
    """Remove everything from the board."""
    board.placed.fill(0)
    board.splits.fill(0)
    board.length.fill(0)
    board.level.fill(0.0)
    for rank in range(len(tables.static)):
        board.level[rank, HELD] = tables.static[rank]


@compiled_inline
def place(
    tables: Tables, board: Board, rank: int, action: int, ready: float
) -> None:  # pragma: no cover - compiled
    """Place the next action of a code, no earlier than ``ready``."""
    level, at = board.level, board.length[rank]
    start = max(level[rank, CLOCK], ready)
    if at == 0:
        level[rank, FIRST] = start
    else:
        # Idle time before the first start does not count: a span begins there.
        level[rank, IDLE] += start - level[rank, CLOCK]
    letter, chunk = action & 3, action >> 2
    kind = next_kind(tables, board, rank, action)
    finish = start + tables.duration[rank, action, kind]
    level[rank, CLOCK] = finish
    level[rank, HELD] += tables.delta[rank, action, kind]
    board.code[rank, at] = action
    board.length[rank] = at + 1
    if letter == W:
        board.splits[rank, chunk, FRONT] += 1
        return
    position = tables.position[rank, action]
    k = board.placed[position]
    board.end[position, k] = finish
    board.placed[position] = k + 1
    if letter == I:
        board.split[rank, chunk, board.splits[rank, chunk, BACK]] = k
        board.splits[rank, chunk, BACK] += 1


@compiled_inline
def oldest_weight(tables: Tables, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """The code of the waiting W whose I ended first; NOTHING if none waits."""
    oldest, ended = NOTHING, np.inf
    for chunk in range(board.splits.shape[1]):
        front = board.splits[rank, chunk, FRONT]
        if front < board.splits[rank, chunk, BACK]:
            end = board.end[tables.position[rank, 4 * chunk + I], board.split[rank, chunk, front]]
            if end < ended:
                oldest, ended = 4 * chunk + W, end
    return oldest


@compiled_inline
def idle_until(
    board: Board, rank: int, begin: float, origin: float, is_span: bool
) -> float:  # pragma: no cover - compiled
    """The rank's idle time if its next action starts at ``begin``: with its load, the least that it takes.

    For a makespan, the time from ``origin`` to the rank's first start counts, too.
    """
    level = board.level
    if board.length[rank] == 0:
        return 0.0 if is_span else begin - origin
    idle = level[rank, IDLE] + (begin - level[rank, CLOCK])
    return float(idle if is_span else level[rank, FIRST] - origin + idle)


@compiled_inline
def next_kind(tables: Tables, board: Board, rank: int, action: int) -> int:  # pragma: no cover - compiled
    """The kind of the microbatch that the next action of a code runs; there must be one."""
    if tables.duration.shape[2] == 1:
        return ZERO
    chunk = action >> 2
    if action & 3 == W:
        return int(tables.kind[board.split[rank, chunk, board.splits[rank, chunk, FRONT]]])
    return int(tables.kind[board.placed[tables.position[rank, action]]])


@compiled_inline
def arrival(tables: Tables, board: Board, position: int) -> float:  # pragma: no cover - compiled
    """When the input of the next action at a position arrives; inf while unknown or none is left."""
    # The next action at a position is microbatch k = placed, as microbatches ascend. Its input is known once
    # the previous position has placed more than k.
    k = board.placed[position]
    if k >= board.end.shape[1] or (position > 0 and k >= board.placed[position - 1]):
        return np.inf
    if position == 0:
        return 0.0
    return float(board.end[position - 1, k] + tables.latency[position, tables.kind[k]])


@compiled_inline
def admits_forward(
    tables: Tables, board: Board, rank: int, chunk: int
) -> bool:  # pragma: no cover - compiled
    """Whether the next F of a chunk fits memory now, without risking a deadlock.

    A microbatch releases its forwards' memory only after its last forward. So a forward is admitted if the
    forwards that follow it on this rank fit too, or if an older microbatch has finished all of its forwards
    here: that one can run its backwards and will release as much. It may make room for one more microbatch
    but not for two, so then, and where microbatches differ, :func:`stays_safe` must hold, too.
    """
    held, limit = board.level[rank, HELD], tables.limit[rank]
    kind = next_kind(tables, board, rank, 4 * chunk + F)
    is_risky = tables.duration.shape[2] > 1
    if held + tables.needs[rank, chunk, kind] > limit:
        fits = held + tables.delta[rank, 4 * chunk + F, kind] <= limit
        innermost = tables.position[rank, tables.position.shape[1] - 4 + F]
        if not fits or board.placed[innermost] <= board.placed[tables.position[rank, I]]:
            return False
        is_risky = True
    return not is_risky or stays_safe(tables, board, rank, chunk)


@compiled_leaf
def stays_safe(tables: Tables, board: Board, rank: int, chunk: int) -> bool:  # pragma: no cover - compiled
    """Whether the rank can complete one microbatch after another if it runs the next F of a chunk now.

    At worst it completes them in the order of entry, and each releases its memory before the next one runs
    its missing forwards (the banker's algorithm, Dijkstra 1965). So for every microbatch with missing
    forwards, these must fit together with the forwards of all younger ones.
    """
    if tables.is_ample[rank]:
        return True
    position, placed = tables.position, board.placed
    chunks, held = position.shape[1] // 4, tables.static[rank]
    admitted = placed[position[rank, 4 * chunk + F]]
    youngest = max(placed[position[rank, F]] - 1, admitted)
    for k in range(youngest, placed[position[rank, 4 * (chunks - 1) + F]] - 1, -1):
        missing, kind = 0.0, tables.kind[k]
        for other in range(chunks):
            amount = tables.delta[rank, 4 * other + F, kind]
            if k < placed[position[rank, 4 * other + F]] or (other == chunk and k == admitted):
                held += amount
            else:
                missing += amount
        if held + missing > tables.limit[rank]:
            return False
    return True


@compiled_leaf
def replay(
    tables: Tables, board: Board, codes: IntArray, until: IntArray
) -> None:  # pragma: no cover - compiled
    """Place the first ``until[rank]`` actions of ``codes`` on an empty board, at earliest start."""
    clear(tables, board)
    progress = True
    # Earliest starts depend on the order only, not on the sequence in which ranks are visited. A rank runs
    # until its next input is unknown; the loop ends after a pass without progress.
    while progress:
        progress = False
        for rank in range(len(until)):
            while board.length[rank] < until[rank]:
                action = codes[rank, board.length[rank]] + ZERO  # int64, as for all other callers
                ready = board.level[rank, CLOCK]
                position = tables.position[rank, action]
                if position >= 0:
                    ready = arrival(tables, board, position)
                    if ready == np.inf:
                        break
                place(tables, board, rank, action, ready)
                progress = True


@compiled_inline
def enter(first: IntArray, least: FloatArray, rank: int, key: float) -> None:  # pragma: no cover - compiled
    """Write the key of a rank, and find the rank with the smallest one again, in a tournament tree.

    ``first`` and ``least`` (2 * leaves,) have the rank with the smallest key, and this key, by subtree of a
    complete binary tree; node 1 is its root, and the leaf of a rank is at ``leaves + rank``.
    """
    node = len(first) // 2 + rank
    least[node] = key
    while node > 1:
        other = node ^ 1
        # Ties go to the lower rank, so results are deterministic.
        loses = (least[other] < key) | ((least[other] == key) & (first[other] < rank))
        rank, key = first[other] if loses else rank, least[other] if loses else key
        node >>= 1
        first[node], least[node] = rank, key


@dataclass(frozen=True, eq=False)
class Attempt:
    """A complete order."""

    method: str
    problem: Problem
    code: IntArray
    """(p, 3 * c * m) int8: codes (see :mod:`.tables`) of every rank, in order."""
    length: IntArray
    """(p,): their number."""
    span: float
    """At earliest start, which makes it an upper bound of the exact span."""
    makespan: float
    entry: IntArray
    """(m,): the microbatch that enters as the k-th."""
    rule: Rule | None = None
    """The rule of list scheduling that placed all actions, if one rule did."""

    @classmethod
    def of(
        cls, method: str, problem: Problem, tables: Tables, board: Board, rule: Rule | None = None
    ) -> Attempt:
        """The order on a complete board."""
        code, length, entry = board.code.copy(), board.length.copy(), tables.entry.copy()
        return cls(method, problem, code, length, board.span, board.makespan, entry, rule)

    @classmethod
    def retimed(
        cls, method: str, problem: Problem, code: IntArray, length: IntArray, entry: IntArray
    ) -> Attempt:
        """An order whose codes were made for other costs, or were changed since: timed again."""
        orders = to_orders(code, length, problem, entry)
        makespan, span = earliest_start_values(problem, orders)
        return cls(method, problem, code.copy(), length.copy(), span, makespan, entry.copy())

    @property
    def value(self) -> float:
        """The problem's objective; for a span, an upper bound (earliest starts, see ``timing``)."""
        return self.span if self.problem.objective == "span" else self.makespan

    @cached_property
    def orders(self) -> Orders:
        """The attempt's order."""
        return to_orders(self.code, self.length, self.problem, self.entry)


def to_orders(code: IntArray, length: IntArray, problem: Problem, entry: IntArray) -> Orders:
    """Orders from codes (p, n) int8, lengths (p,), and the order of entry (m,).

    The k-th action of a stage and letter runs the microbatch that enters as the k-th. B and I are counted
    together, and a W runs the microbatch of the oldest I without a W.
    """
    stages = np.array(problem.placement.stages_of, dtype=np.int32)
    offset = np.concatenate(([0], np.cumsum(length))).astype(np.int64)
    stage, letter, microbatch = _numbered(code, offset, stages, problem.n_stages, problem.microbatches)
    return Orders(stage, letter, entry.astype(np.int32)[microbatch], offset)


def from_orders(orders: Orders, problem: Problem) -> tuple[IntArray, IntArray, IntArray]:
    """Codes (p, 3 * chunks * m) int8, lengths (p,), and the order of entry (m,), that of the first stage."""
    chunk_of = np.array(problem.placement.chunk_of, dtype=np.int8)
    flat = chunk_of[orders.stage] * 4 + orders.letter
    p = problem.pp_degree
    code = np.zeros((p, 3 * problem.placement.chunks * problem.microbatches), np.int8)
    for rank in range(p):
        part = flat[orders.slice_of(rank)]
        code[rank, : len(part)] = part
    entry = orders.microbatch[(orders.stage == 0) & (orders.letter == F)]
    return code, np.diff(orders.offset), entry.astype(np.int64)


@compiled
def _numbered(
    code: IntArray, offset: IntArray, stages: IntArray, n_stages: int, m: int
) -> tuple[IntArray, IntArray, IntArray]:  # pragma: no cover - compiled
    n = offset[-1]
    stage, letter, microbatch = np.empty(n, np.int32), np.empty(n, np.int8), np.empty(n, np.int32)
    # Counters by stage. ``split_at`` lists, in order, the microbatches that ran I: W's consume
    # this list first in, first out, and a B adds nothing to it.
    forwards, backwards = np.zeros(n_stages, np.int32), np.zeros(n_stages, np.int32)
    split, weights = np.zeros(n_stages, np.int64), np.zeros(n_stages, np.int64)
    split_at = np.empty((n_stages, m), np.int32)
    for rank in range(len(offset) - 1):
        for at in range(offset[rank], offset[rank + 1]):
            action = code[rank, at - offset[rank]]
            kind, here = action & 3, stages[rank, action >> 2]
            stage[at], letter[at] = here, kind
            if kind == F:
                microbatch[at] = forwards[here]
                forwards[here] += 1
            elif kind == W:
                microbatch[at] = split_at[here, weights[here]]
                weights[here] += 1
            else:
                microbatch[at] = backwards[here]
                if kind == I:
                    split_at[here, split[here]] = backwards[here]
                    split[here] += 1
                backwards[here] += 1
    return stage, letter, microbatch
