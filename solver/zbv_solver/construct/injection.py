"""List scheduling after injection times: when each microbatch enters the pipeline.

Where memory is tight, most of a good order follows from the times at which microbatches enter. A rank may
also idle for an action that will be ready soon, instead of starting another one at once. So an order is
described by few numbers: the times of entry, and for every rank and kind of action a delay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.board import CLOCK, FIRST, HELD, IDLE, Board, admits_forward, clear
from zbv_solver.construct.tables import Tables, make_tables
from zbv_solver.kernels.arrays import ZERO, BoolArray, FloatArray, IntArray
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
    weights
        (p, c) number of waiting W's.
    """

    action: IntArray
    begin: FloatArray
    key: FloatArray
    first: IntArray
    weights: IntArray

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
            np.zeros((p, tables.chunks), np.int64),
        )


class Marks(NamedTuple):
    """What the board and the choices were when some microbatches were about to enter; kernels write into it.

    An injection whose first difference from the last accepted one is the time of a later entry begins there.
    Every mark has two copies: one of the last accepted injection, and one of the injection in progress.

    Attributes
    ----------
    every
        A mark is at every so-manieth microbatch, from this one on.
    used
        (marks,) the copy of the last accepted injection.
    level, placed, length, weights
        (2, marks, ...) as in :class:`Board` and :class:`Choices`.
    key, begin, action
        (2, marks, p) as in :class:`Choices`.
    end
        (2, marks, m) ends of the microbatches under way, in the order of positions.
    """

    every: int
    used: IntArray
    level: FloatArray
    placed: IntArray
    length: IntArray
    weights: IntArray
    key: FloatArray
    begin: FloatArray
    action: IntArray
    end: FloatArray

    @classmethod
    def of(cls, tables: Tables, most: int) -> Marks:
        """Up to ``most`` marks."""
        m, p = tables.microbatches, tables.pp_degree
        every = -(-m // (most + 1))
        shape = (2, (m - 1) // every)
        return cls(
            every,
            np.zeros(shape[1], np.int64),
            np.zeros((*shape, p, 4)),
            np.zeros((*shape, len(tables.latency)), np.int64),
            np.zeros((*shape, p), np.int64),
            np.zeros((*shape, p, tables.chunks), np.int64),
            np.zeros((*shape, p)),
            np.zeros((*shape, p)),
            np.zeros((*shape, p), np.int64),
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
        self.tables = make_tables(problem, fuse)
        self.board = Board.of(self.tables, halt)
        self.choices = Choices.of(self.tables)
        self.marks = Marks.of(self.tables, marks)
        self.least_loads = self.tables.loads(least=True) * (1 - ROUNDING)
        self.is_span = problem.objective == "span"

    def value(self, injection: Injection, most: float = np.inf) -> float:
        """The objective of the order at the times of its construction; inf if the order is incomplete.

        An order that is certain to be worse than ``most`` is abandoned and counts as incomplete.
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
            ZERO,
        )
        return self.board.value(self.problem) if complete else float("inf")

    def attempt(self, injection: Injection, method: str) -> Attempt | None:
        """The order at earliest start, or None if it is incomplete."""
        if self.value(injection) == float("inf"):
            return None
        return Attempt.retimed(method, self.problem, self.board.code, self.board.length)


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
    if the delays differ.

    The rank with the smallest key places its choice. A rank chooses again when it has placed an action. When
    an input becomes known, the rank that waits for it compares only the action that needs it.
    """
    level, placed, code, length = board.level, board.placed, board.code, board.length
    p, positions, m = len(board.length), len(tables.latency), tables.microbatches
    choices.key.fill(np.inf)
    for rank in range(len(choices.key)):
        choices.first[len(choices.key) + rank] = rank
    for node in range(len(choices.key) - 1, 0, -1):
        choices.first[node] = choices.first[2 * node]
    # The choice of a mark already knows when its own microbatch enters.
    mark = (same - 1) // marks.every - 1 if same > 0 else -1
    if mark >= 0:
        _return_to(board, choices, marks, mark)
        for rank in range(p):
            _replay_matches(choices, rank)
    else:
        clear(tables, board)
        choices.weights.fill(0)
        for rank in range(p):
            _choose(tables, board, choices, injection, rank)
    missing = positions * m
    for here in range(positions):
        missing -= placed[here]
    following = (mark + 2) * marks.every
    while True:
        rank = choices.first[1]
        if choices.key[rank] == np.inf:
            break
        action, begin, at = choices.action[rank], choices.begin[rank], length[rank]
        if placed[0] == following and tables.position[rank, action] == 0 and following < m:
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
        level[rank, CLOCK] = begin + tables.duration[rank, action]
        level[rank, HELD] += tables.delta[rank, action]
        code[rank, at] = action
        length[rank] = at + 1
        letter, chunk = action & 3, action >> 2
        if letter == W:
            choices.weights[rank, chunk] -= 1
            _choose(tables, board, choices, injection, rank)
            continue
        if letter == I:
            choices.weights[rank, chunk] += 1
        missing -= 1
        here = tables.position[rank, action]
        board.end[here, placed[here]] = level[rank, CLOCK]
        placed[here] += 1
        _choose(tables, board, choices, injection, rank)
        # Only the microbatch just placed can be the one that the next position lacks.
        if here + 1 < positions and placed[here + 1] == placed[here] - 1:
            waiting = tables.host[here + 1]
            if waiting != rank:
                _offer(tables, board, choices, injection, waiting, here + 1)
    for rank in range(p):
        for chunk in range(choices.weights.shape[1]):
            missing += choices.weights[rank, chunk]
    return bool(missing == 0)


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
        marks.key[copy, mark, rank] = choices.key[rank]
        marks.begin[copy, mark, rank] = choices.begin[rank]
        marks.action[copy, mark, rank] = choices.action[rank]
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
        choices.key[rank] = marks.key[copy, mark, rank]
        choices.begin[rank] = marks.begin[copy, mark, rank]
        choices.action[rank] = marks.action[copy, mark, rank]
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
    chunks = choices.weights.shape[1]
    clock = board.level[rank, CLOCK]
    choices.key[rank] = np.inf
    for chunk in range(chunks):
        for letter in (F, I):
            _consider(tables, board, choices, injection, rank, 4 * chunk + letter)
        if choices.weights[rank, chunk] > 0:
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
    chunks = choices.weights.shape[1]
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
        ready = board.end[here - 1, k] + tables.latency[here]
    else:
        return
    chunk, chunks = action >> 2, choices.weights.shape[1]
    begin = max(board.level[rank, CLOCK], ready)
    if action & 3 == F:
        key = begin + injection.delay[rank, chunk]
        if key >= choices.key[rank] or not admits_forward(tables, board, rank, chunk):
            return
    else:
        key = begin + injection.delay[rank, chunks + chunk]
        if key >= choices.key[rank]:
            return
        grows = max(0.0, tables.delta[rank, action])
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
