"""List scheduling after injection times: when each microbatch enters the pipeline.

Where memory is tight, most of a good order follows from the times at which microbatches enter. A rank may
also idle for an action that will be ready soon, instead of starting another one at once. So an order is
described by few numbers: the times of entry, and for every rank and kind of action a delay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.board import (
    BACK,
    CLOCK,
    FIRST,
    FRONT,
    HELD,
    IDLE,
    Board,
    clear,
    enter,
    next_kind,
    stays_safe,
)
from zbv_solver.construct.entry_orders import PEAKS, mountain, sizes
from zbv_solver.construct.tables import Tables, make_tables
from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_inline, compiled_leaf
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, F, I, Problem, W

NOTHING = -1


class Injection(NamedTuple):
    """The parameters of an order; c chunks per rank.

    Attributes
    ----------
    entry
        (m,) earliest start of F on the first stage, ascending.
    delay
        (p, 3 * c) by letter (F, backward, W), then by chunk: a rank takes the action with the smallest sum
        of its earliest start and its delay. Where microbatches differ, (p, 3 * c + 1): the last column is
        the delay of an F or backward per relative size of its microbatch, negative if large ones go first.
    """

    entry: FloatArray
    delay: FloatArray


class Choices(NamedTuple):
    """What every rank would place next; kernels write into it.

    Attributes
    ----------
    action, begin
        (p,) code of the action, and its start. Its key is the start plus its delay.
    first, least
        (2 * leaves,) the rank with the smallest key, and this key, by subtree of a complete binary tree over
        the ranks; the leaf of a rank is at ``leaves + rank``.
    weights
        (p, c) number of waiting W's.
    ready
        (p, 2 * c) arrival of the input of every chunk's next F, then of its next backward; inf while unknown.
    slot
        (2S,) column in ``ready`` of a position.
    needs
        (p, c, K) memory of one F on the chunk and on every later one, by kind of microbatch.
    pace
        (K,) largest load of a microbatch of every kind, relative to the mean.
    """

    action: IntArray
    begin: FloatArray
    first: IntArray
    least: FloatArray
    weights: IntArray
    ready: FloatArray
    slot: IntArray
    needs: FloatArray
    pace: FloatArray

    @classmethod
    def of(cls, tables: Tables) -> Choices:
        """Empty choices."""
        p, chunks = tables.pp_degree, tables.chunks
        leaves = 1 << (p - 1).bit_length()
        slot, needs = np.zeros(2 * p * chunks, np.int64), np.zeros((p, chunks, tables.kinds))
        loads = tables.loads_by_kind().max(axis=0)
        mean = float(loads[tables.kind].mean())
        for chunk in range(chunks):
            slot[tables.position[:, 4 * chunk + F]] = chunk
            slot[tables.position[:, 4 * chunk + I]] = chunks + chunk
            for later in range(chunk, chunks):
                needs[:, chunk] += tables.delta[:, 4 * later + F]
        return cls(
            np.zeros(p, np.int64),
            np.zeros(p),
            np.concatenate([np.zeros(leaves, np.int64), np.arange(leaves)]),
            np.full(2 * leaves, np.inf),
            np.zeros((p, chunks), np.int64),
            np.full((p, 2 * chunks), np.inf),
            slot,
            needs,
            loads / mean if mean > 0 else np.ones_like(loads),
        )


class Marks(NamedTuple):
    """What the board and the choices were when some microbatches were about to enter; kernels write into it.

    An injection whose first difference from the last accepted one is the time of a later entry begins there.
    Every mark has two copies: one of the last accepted injection, and one of the injection in progress.

    Attributes
    ----------
    every
        The marks are at the microbatches ``every``, ``2 * every`` and so on.
    used
        (marks,) the copy of the last accepted injection.
    level, placed, length, weights
        (2, marks, ...) as in :class:`Board` and :class:`Choices`.
    first, least, begin, action, ready
        (2, marks, ...) as in :class:`Choices`.
    end
        (2, marks, m) ends of the microbatches under way, in the order of positions.
    """

    every: int
    used: IntArray
    level: FloatArray
    placed: IntArray
    length: IntArray
    weights: IntArray
    first: IntArray
    least: FloatArray
    begin: FloatArray
    action: IntArray
    ready: FloatArray
    end: FloatArray

    @classmethod
    def of(cls, tables: Tables, most: int) -> Marks:
        """Up to ``most`` marks."""
        m, p = tables.microbatches, tables.pp_degree
        every = -(-m // (most + 1))
        shape, leaves = (2, (m - 1) // every), 1 << (p - 1).bit_length()
        return cls(
            every,
            np.zeros(shape[1], np.int64),
            np.zeros((*shape, p, 4)),
            np.zeros((*shape, len(tables.latency)), np.int64),
            np.zeros((*shape, p), np.int64),
            np.zeros((*shape, p, tables.chunks), np.int64),
            np.zeros((*shape, 2 * leaves), np.int64),
            np.zeros((*shape, 2 * leaves)),
            np.zeros((*shape, p)),
            np.zeros((*shape, p), np.int64),
            np.zeros((*shape, p, 2 * tables.chunks)),
            np.zeros((*shape, m)),
        )


class InjectionScheduler:
    """Constructs orders of one problem by injections, on one board that is reused."""

    def __init__(
        self,
        problem: Problem,
        fuse: BoolArray | None = None,
        halt: IntArray | None = None,
        marks: int = 0,
    ):
        self.problem = problem
        self.tables = make_tables(problem, fuse, mountain(sizes(problem), PEAKS[0]))
        self.board = Board.of(self.tables, halt)
        self.choices = Choices.of(self.tables)
        # A mark does not keep which microbatches wait for their W, so it serves equal ones only.
        self.marks = Marks.of(self.tables, marks if problem.is_equal else 0)
        self.least_loads = self.tables.loads(least=True) * (1 - ROUNDING)
        self.is_span = problem.objective == "span"

    def no_delay(self) -> FloatArray:
        """Zeros in the shape of :attr:`Injection.delay`."""
        of_size = 0 if self.problem.is_equal else 1
        return np.zeros((self.tables.pp_degree, 3 * self.tables.chunks + of_size))

    def value(self, injection: Injection, most: float = np.inf, same: int = 0) -> float:
        """The objective of the order at the times of its construction; inf if the order is incomplete.

        An order that is certain to be worse than ``most`` is abandoned and counts as incomplete. ``same`` is
        as in :func:`inject`.
        """
        complete = inject(
            self.tables,
            self.board,
            self.choices,
            injection,
            self.least_loads,
            self.is_span,
            most,
            self.marks,
            same,
        )
        return self.board.value(self.problem) if complete else float("inf")

    def attempt(self, injection: Injection, method: str) -> Attempt | None:
        """The order at earliest start, or None if it is incomplete."""
        if self.value(injection) == float("inf"):
            return None
        return Attempt.retimed(method, self.problem, self.board.code, self.board.length, self.tables.entry)


@compiled_leaf
def inject(
    tables: Tables,
    board: Board,
    choices: Choices,
    injection: Injection,
    least_loads: FloatArray,
    is_span: bool,
    most: float,
    marks: Marks,
    same: int,
) -> bool:  # pragma: no cover - compiled
    """Place all actions; False if memory blocks them, or if they exceed ``most``.

    The delays and the entries of the first ``same`` microbatches are those of the last accepted injection; 0
    if the delays differ. If it is more, the board's codes may lack the beginning of the order.

    The rank with the smallest key places its choice. A rank chooses again when it has placed an action. When
    an input becomes known, the rank that waits for it compares only the action that needs it.
    """
    level, placed, code, length = board.level, board.placed, board.code, board.length
    p, positions, m = len(board.length), len(tables.latency), tables.microbatches
    differ = tables.duration.shape[2] > 1
    # The choice of a mark already knows when its own microbatch enters.
    mark = (same - 1) // marks.every - 1 if same > 0 else -1
    if mark >= 0:
        _return_to(board, choices, marks, mark)
    else:
        clear(tables, board)
        choices.weights.fill(0)
        choices.ready.fill(np.inf)
        choices.least.fill(np.inf)
        choices.ready[tables.host[0], choices.slot[0]] = injection.entry[0]
        for rank in range(p):
            _choose(tables, board, choices, injection, rank)
    missing = positions * m
    for here in range(positions):
        missing -= placed[here]
    following = (mark + 2) * marks.every
    while True:
        rank = choices.first[1]
        if choices.least[1] == np.inf:
            break
        action, begin, at = choices.action[rank], choices.begin[rank], length[rank]
        here = tables.position[rank, action]
        if here == 0 and placed[0] == following:
            _mark(board, choices, marks, following // marks.every - 1)
            following += marks.every
        if at == 0:
            level[rank, FIRST] = begin
        else:
            level[rank, IDLE] += begin - level[rank, CLOCK]
        # The rank takes at least the time since the first entry, its idle time and its least load.
        if (0.0 if is_span else level[rank, FIRST] - injection.entry[0]) + level[rank, IDLE] + least_loads[
            rank
        ] > most:
            return False
        kind = next_kind(tables, board, rank, action)
        level[rank, CLOCK] = begin + tables.duration[rank, action, kind]
        level[rank, HELD] += tables.delta[rank, action, kind]
        code[rank, at] = action
        length[rank] = at + 1
        if here < 0:
            choices.weights[rank, action >> 2] -= 1
            if differ:
                board.splits[rank, action >> 2, FRONT] += 1
            _choose(tables, board, choices, injection, rank)
            continue
        k = placed[here]
        if action & 3 == I:
            choices.weights[rank, action >> 2] += 1
            if differ:
                board.split[rank, action >> 2, board.splits[rank, action >> 2, BACK]] = k
                board.splits[rank, action >> 2, BACK] += 1
        missing -= 1
        board.end[here, k] = level[rank, CLOCK]
        k += 1
        placed[here] = k
        ready = np.inf
        if here == 0:
            if k < m:
                ready = injection.entry[k]
        elif placed[here - 1] > k:
            ready = board.end[here - 1, k] + tables.latency[here, tables.kind[k]]
        choices.ready[rank, choices.slot[here]] = ready
        # Only the microbatch just placed can be the one that the next position lacks.
        waiting, slot = rank, 0
        if here + 1 < positions and placed[here + 1] == k - 1:
            waiting, slot = tables.host[here + 1], choices.slot[here + 1]
            choices.ready[waiting, slot] = level[rank, CLOCK] + tables.latency[here + 1, kind]
        _choose(tables, board, choices, injection, rank)
        if waiting != rank:
            leaf = len(choices.first) // 2 + waiting
            key, begin, action = _option(
                tables, board, choices, injection, waiting, slot, choices.least[leaf]
            )
            if key < choices.least[leaf]:
                choices.begin[waiting], choices.action[waiting] = begin, action
                enter(choices.first, choices.least, waiting, key)
    for rank in range(p):
        for chunk in range(choices.weights.shape[1]):
            missing += choices.weights[rank, chunk]
    return bool(missing == 0)


@compiled_leaf
def accept(marks: Marks, same: int) -> None:  # pragma: no cover - compiled
    """Make the injection of the last call of :func:`inject`, which was complete, the last accepted one."""
    for mark in range(max(0, (same - 1) // marks.every), len(marks.used)):
        marks.used[mark] = 1 - marks.used[mark]


@compiled_leaf
def _mark(board: Board, choices: Choices, marks: Marks, mark: int) -> None:  # pragma: no cover - compiled
    """Write the copy of a mark that belongs to the injection in progress."""
    copy, way = 1 - marks.used[mark], 0
    for rank in range(len(board.length)):
        for column in range(board.level.shape[1]):
            marks.level[copy, mark, rank, column] = board.level[rank, column]
        for chunk in range(choices.weights.shape[1]):
            marks.weights[copy, mark, rank, chunk] = choices.weights[rank, chunk]
        marks.length[copy, mark, rank] = board.length[rank]
        marks.begin[copy, mark, rank] = choices.begin[rank]
        marks.action[copy, mark, rank] = choices.action[rank]
        for slot in range(choices.ready.shape[1]):
            marks.ready[copy, mark, rank, slot] = choices.ready[rank, slot]
    for node in range(len(choices.first)):
        marks.first[copy, mark, node] = choices.first[node]
        marks.least[copy, mark, node] = choices.least[node]
    for here in range(len(board.placed)):
        marks.placed[copy, mark, here] = board.placed[here]
    for here in range(len(board.placed) - 1):
        for k in range(board.placed[here + 1], board.placed[here]):
            marks.end[copy, mark, way] = board.end[here, k]
            way += 1


@compiled_leaf
def _return_to(
    board: Board, choices: Choices, marks: Marks, mark: int
) -> None:  # pragma: no cover - compiled
    """Restore what :func:`_mark` wrote for the last accepted injection."""
    copy, way = marks.used[mark], 0
    for rank in range(len(board.length)):
        for column in range(board.level.shape[1]):
            board.level[rank, column] = marks.level[copy, mark, rank, column]
        for chunk in range(choices.weights.shape[1]):
            choices.weights[rank, chunk] = marks.weights[copy, mark, rank, chunk]
        board.length[rank] = marks.length[copy, mark, rank]
        choices.begin[rank] = marks.begin[copy, mark, rank]
        choices.action[rank] = marks.action[copy, mark, rank]
        for slot in range(choices.ready.shape[1]):
            choices.ready[rank, slot] = marks.ready[copy, mark, rank, slot]
    for node in range(len(choices.first)):
        choices.first[node] = marks.first[copy, mark, node]
        choices.least[node] = marks.least[copy, mark, node]
    for here in range(len(board.placed)):
        board.placed[here] = marks.placed[copy, mark, here]
    for here in range(len(board.placed) - 1):
        for k in range(board.placed[here + 1], board.placed[here]):
            board.end[here, k] = marks.end[copy, mark, way]
            way += 1


@compiled_inline
def _choose(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose the next action of a rank from all that could start."""
    chunks, clock = choices.weights.shape[1], board.level[rank, CLOCK]
    best, best_begin, best_action = np.inf, clock, NOTHING
    for chunk in range(chunks):
        for half in range(2):
            slot = chunk + half * chunks
            key, begin, action = _option(tables, board, choices, injection, rank, slot, best)
            if key < best:
                best, best_begin, best_action = key, begin, action
        if choices.weights[rank, chunk] > 0:
            key = clock + injection.delay[rank, 2 * chunks + chunk]
            if key < best:
                best, best_begin, best_action = key, clock, 4 * chunk + W
    choices.begin[rank], choices.action[rank] = best_begin, best_action
    enter(choices.first, choices.least, rank, best)


@compiled_inline
def _option(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int, slot: int, most: float
) -> tuple[float, float, int]:  # pragma: no cover - compiled
    """The key, start and code of the next F or backward of a chunk.

    The key is inf if its input is unknown, if it does not fit, or if its key is not below ``most``.
    """
    chunks, begin = choices.weights.shape[1], max(board.level[rank, CLOCK], choices.ready[rank, slot])
    key, chunk = begin + injection.delay[rank, slot], slot if slot < chunks else slot - chunks
    if tables.duration.shape[2] > 1 and begin < np.inf:
        pace = choices.pace[next_kind(tables, board, rank, 4 * chunk + (F if slot < chunks else I))]
        key += injection.delay[rank, 3 * chunks] * pace
    if not key < most:
        return np.inf, begin, NOTHING
    held, limit = board.level[rank, HELD], tables.limit[rank]
    if slot < chunks:
        # The rule of board.admits_forward. Where one that completes must make room, equal microbatches must
        # stay safe, too: it may make room for one more, but not for two.
        kind = next_kind(tables, board, rank, 4 * chunk + F)
        is_risky = tables.duration.shape[2] > 1
        if held + choices.needs[rank, chunk, kind] > limit:
            innermost = tables.position[rank, 4 * (chunks - 1) + F]
            fits = held + tables.delta[rank, 4 * chunk + F, kind] <= limit
            if not fits or board.placed[innermost] <= board.placed[tables.position[rank, I]]:
                return np.inf, begin, NOTHING
            is_risky = True
        if is_risky and not stays_safe(tables, board, rank, chunk):
            return np.inf, begin, NOTHING
        return key, begin, 4 * chunk + F
    grows = max(0.0, tables.delta[rank, 4 * chunk + I, next_kind(tables, board, rank, 4 * chunk + I)])
    if tables.fuse[rank, chunk] or held + grows > limit:
        return key, begin, 4 * chunk + B
    return key, begin, 4 * chunk + I
