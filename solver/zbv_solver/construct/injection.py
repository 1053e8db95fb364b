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
    idle_until,
    next_kind,
    stays_safe,
)
from zbv_solver.construct.entry_orders import PEAKS, mountain, sizes
from zbv_solver.construct.injection_state import Choices, Marks, mark, return_to
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
    # The choice of a mark already knows when its own microbatch enters.
    marked = (same - 1) // marks.every - 1 if same > 0 else -1
    if marked >= 0:
        return_to(board, choices, marks, marked)
    else:
        _begin(tables, board, choices, injection)
    following = (marked + 2) * marks.every
    while choices.least[1] < np.inf:
        rank = choices.first[1]
        action, begin = choices.action[rank], choices.begin[rank]
        here = tables.position[rank, action]
        if here == 0 and board.placed[0] == following:
            mark(board, choices, marks, following // marks.every - 1)
            following += marks.every
        if idle_until(board, rank, begin, injection.entry[0], is_span) + least_loads[rank] > most:
            return False
        _place(tables, board, choices, rank, action, begin)
        waiting, slot = rank, 0
        if here >= 0:
            waiting, slot = _pass_on(tables, board, choices, injection, rank, here)
        _choose(tables, board, choices, injection, rank)
        if waiting != rank:
            leaf = len(choices.first) // 2 + waiting
            key, begin, action = _option(
                tables, board, choices, injection, waiting, slot, choices.least[leaf]
            )
            if key < choices.least[leaf]:
                choices.begin[waiting], choices.action[waiting] = begin, action
                enter(choices.first, choices.least, waiting, key)
    missing = len(tables.latency) * tables.microbatches
    for here in range(len(tables.latency)):
        missing -= board.placed[here]
    for rank in range(len(board.length)):
        for chunk in range(choices.weights.shape[1]):
            missing += choices.weights[rank, chunk]
    return bool(missing == 0)


@compiled_inline
def _begin(
    tables: Tables, board: Board, choices: Choices, injection: Injection
) -> None:  # pragma: no cover - compiled
    """Empty the board, and let every rank choose."""
    clear(tables, board)
    choices.weights.fill(0)
    choices.ready.fill(np.inf)
    choices.least.fill(np.inf)
    choices.ready[tables.host[0], choices.slot[0]] = injection.entry[0]
    for rank in range(len(board.length)):
        _choose(tables, board, choices, injection, rank)


@compiled_inline
def _place(
    tables: Tables, board: Board, choices: Choices, rank: int, action: int, begin: float
) -> None:  # pragma: no cover - compiled
    """:func:`.board.place`, without the queue of W's: only their number counts, by chunk."""
    level, at, chunk = board.level, board.length[rank], action >> 2
    if at == 0:
        level[rank, FIRST] = begin
    else:
        level[rank, IDLE] += begin - level[rank, CLOCK]
    kind = next_kind(tables, board, rank, action)
    level[rank, CLOCK] = begin + tables.duration[rank, action, kind]
    level[rank, HELD] += tables.delta[rank, action, kind]
    board.code[rank, at] = action
    board.length[rank] = at + 1
    differ, here = tables.duration.shape[2] > 1, tables.position[rank, action]
    if here < 0:
        choices.weights[rank, chunk] -= 1
        if differ:
            board.splits[rank, chunk, FRONT] += 1
        return
    k = board.placed[here]
    if action & 3 == I:
        choices.weights[rank, chunk] += 1
        if differ:
            board.split[rank, chunk, board.splits[rank, chunk, BACK]] = k
            board.splits[rank, chunk, BACK] += 1
    board.end[here, k] = level[rank, CLOCK]
    board.placed[here] = k + 1


@compiled_inline
def _pass_on(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int, here: int
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Update inputs after an F or backward; returns the rank and slot whose input it is."""
    placed, k = board.placed, board.placed[here]
    ready = np.inf
    if here == 0:
        if k < tables.microbatches:
            ready = injection.entry[k]
    elif placed[here - 1] > k:
        ready = board.end[here - 1, k] + tables.latency[here, tables.kind[k]]
    choices.ready[rank, choices.slot[here]] = ready
    # Only the microbatch just placed can be the one that the next position lacks.
    if here + 1 == len(placed) or placed[here + 1] != k - 1:
        return rank, 0
    waiting, slot = tables.host[here + 1], choices.slot[here + 1]
    choices.ready[waiting, slot] = board.end[here, k - 1] + tables.latency[here + 1, tables.kind[k - 1]]
    return waiting, slot


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
