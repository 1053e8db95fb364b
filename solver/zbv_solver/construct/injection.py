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
    admits_forward,
    clear,
    next_kind,
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
        of its earliest start and its delay.
    """

    entry: FloatArray
    delay: FloatArray


class Choices(NamedTuple):
    """What every rank would place next; kernels write into it.

    Attributes
    ----------
    action, begin
        (p,) code of the action, and its start.
    key
        (leaves,) start plus delay; inf where nothing can start. ``leaves`` is a power of two.
    first
        (2 * leaves,) the rank with the smallest key, by subtree of a complete binary tree over the ranks.
    """

    action: IntArray
    begin: FloatArray
    key: FloatArray
    first: IntArray

    @classmethod
    def of(cls, tables: Tables) -> Choices:
        """Empty choices."""
        p = tables.pp_degree
        leaves = 1 << (p - 1).bit_length()
        return cls(
            np.zeros(p, np.int64),
            np.zeros(p),
            np.zeros(leaves),
            np.zeros(2 * leaves, np.int64),
        )


class InjectionScheduler:
    """Constructs orders of one problem by injections, on one board that is reused."""

    def __init__(
        self,
        problem: Problem,
        fuse: BoolArray | None = None,
        halt: IntArray | None = None,
    ):
        self.problem = problem
        self.tables = make_tables(problem, fuse, mountain(sizes(problem), PEAKS[0]))
        self.board = Board.of(self.tables, halt)
        self.choices = Choices.of(self.tables)
        self.least_loads = self.tables.loads(least=True) * (1 - ROUNDING)
        self.is_span = problem.objective == "span"

    def value(self, injection: Injection, most: float = np.inf) -> float:
        """The objective of the order at the times of its construction; inf if the order is incomplete.

        An order that is certain to be worse than ``most`` is abandoned and counts as incomplete.
        """
        complete = inject(
            self.tables, self.board, self.choices, injection, self.least_loads, self.is_span, most
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
) -> bool:  # pragma: no cover - compiled
    """Place all actions; False if memory blocks them, or if they exceed ``most``.

    The rank with the smallest key places its choice. A rank chooses again when it has placed an action. When
    an input becomes known, the rank that waits for it compares only the action that needs it.
    """
    level, placed, code, length = board.level, board.placed, board.code, board.length
    p, positions, m = len(board.length), len(tables.latency), tables.microbatches
    clear(tables, board)
    choices.key.fill(np.inf)
    for rank in range(len(choices.key)):
        choices.first[len(choices.key) + rank] = rank
    for node in range(len(choices.key) - 1, 0, -1):
        choices.first[node] = choices.first[2 * node]
    for rank in range(p):
        _choose(tables, board, choices, injection, rank)
    missing = positions * m
    while True:
        rank = choices.first[1]
        if choices.key[rank] == np.inf:
            break
        action, begin, at = choices.action[rank], choices.begin[rank], length[rank]
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
        letter, chunk = action & 3, action >> 2
        if letter == W:
            board.splits[rank, chunk, FRONT] += 1
            _choose(tables, board, choices, injection, rank)
            continue
        missing -= 1
        here = tables.position[rank, action]
        if letter == I:
            board.split[rank, chunk, board.splits[rank, chunk, BACK]] = placed[here]
            board.splits[rank, chunk, BACK] += 1
        board.end[here, placed[here]] = level[rank, CLOCK]
        placed[here] += 1
        _choose(tables, board, choices, injection, rank)
        # Only the microbatch just placed can be the one that the next position lacks.
        if here + 1 < positions and placed[here + 1] == placed[here] - 1:
            waiting = tables.host[here + 1]
            if waiting != rank:
                _offer(tables, board, choices, injection, waiting, here + 1)
    for rank in range(p):
        for chunk in range(board.splits.shape[1]):
            missing += board.splits[rank, chunk, BACK] - board.splits[rank, chunk, FRONT]
    return bool(missing == 0)


@compiled_inline
def _choose(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose the next action of a rank from all that could start."""
    chunks = board.splits.shape[1]
    clock = board.level[rank, CLOCK]
    choices.key[rank] = np.inf
    for chunk in range(chunks):
        for letter in (F, I):
            _consider(tables, board, choices, injection, rank, 4 * chunk + letter)
        if board.splits[rank, chunk, FRONT] < board.splits[rank, chunk, BACK]:
            key = clock + injection.delay[rank, 2 * chunks + chunk]
            if key < choices.key[rank]:
                choices.key[rank], choices.begin[rank] = key, clock
                choices.action[rank] = 4 * chunk + W
    _replay_matches(choices, rank)


@compiled_inline
def _offer(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int, here: int
) -> None:  # pragma: no cover - compiled
    """Compare a rank's choice with the action whose input has just become known."""
    chunks = board.splits.shape[1]
    for chunk in range(chunks):
        for letter in (F, I):
            if tables.position[rank, 4 * chunk + letter] == here:
                before = choices.key[rank]
                _consider(tables, board, choices, injection, rank, 4 * chunk + letter)
                if choices.key[rank] < before:
                    _replay_matches(choices, rank)


@compiled_inline
def _consider(
    tables: Tables, board: Board, choices: Choices, injection: Injection, rank: int, action: int
) -> None:  # pragma: no cover - compiled
    """Choose the next F or backward of a chunk if its input is known, it fits, and its key is smaller."""
    here = tables.position[rank, action]
    k = board.placed[here]
    if k >= tables.microbatches:
        return
    if here == 0:
        ready = injection.entry[k]
    elif board.placed[here - 1] > k:
        ready = board.end[here - 1, k] + tables.latency[here, tables.kind[k]]
    else:
        return
    chunk, chunks = action >> 2, board.splits.shape[1]
    begin = max(board.level[rank, CLOCK], ready)
    if action & 3 == F:
        key = begin + injection.delay[rank, chunk]
        if key >= choices.key[rank] or not admits_forward(tables, board, rank, chunk):
            return
    else:
        key = begin + injection.delay[rank, chunks + chunk]
        if key >= choices.key[rank]:
            return
        grows = max(0.0, tables.delta[rank, action, tables.kind[k]])
        if tables.fuse[rank, chunk] or board.level[rank, HELD] + grows > tables.limit[rank]:
            action = 4 * chunk + B
    choices.key[rank], choices.begin[rank], choices.action[rank] = key, begin, action


@compiled_inline
def _replay_matches(choices: Choices, rank: int) -> None:  # pragma: no cover - compiled
    """Find the rank with the smallest key, after that of one rank has changed."""
    key, first = choices.key, choices.first
    node = (len(key) + rank) >> 1
    while node > 0:
        left, right = first[2 * node], first[2 * node + 1]
        # Ties go to the lower rank, so results are deterministic.
        first[node] = left if key[left] <= key[right] else right
        node >>= 1
