"""The board on which constructors lay actions: clocks, memory and counts of every rank, in numba.

A constructor places actions one after another, each at the earliest time its rank and its input allow, and
microbatches of one stage and letter in ascending order (which loses nothing: transfers are constant and
memory counts, see architecture notes in CONTRIBUTING). The next microbatch of a stage is therefore implied
by a count, and an order is one small code, ``chunk * 4 + letter``, per action.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.jit import compiled
from zbv_solver.orders import Orders, first_in_first_out
from zbv_solver.problem import MEMORY_TOLERANCE, B, F, I, Problem, W
from zbv_solver.timing import earliest_times

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]


class Instance(NamedTuple):
    """A problem as kernels take it.

    Attributes
    ----------
    stages
        (p, chunks) int64, stage of every chunk of every rank.
    duration, delta
        (4, S) float64, indexed [letter, stage].
    transfer
        (max(1, S - 1),) float64.
    limit
        (p,) float64 with the tolerance for rounding already added.
    fuse
        (S,) bool: stages whose backward is always the fused B.
    """

    stages: IntArray
    duration: FloatArray
    delta: FloatArray
    transfer: FloatArray
    static: FloatArray
    limit: FloatArray
    fuse: NDArray[np.bool_]
    microbatches: int


@dataclass(frozen=True, eq=False)
class Attempt:
    """One constructed order: how it was made, and its values at earliest start."""

    method: str
    problem: Problem
    code: IntArray
    length: IntArray
    span: float
    makespan: float

    @classmethod
    def of(cls, method: str, problem: Problem, board: Board) -> Attempt:
        """What a complete board achieves."""
        return cls(
            method,
            problem,
            board.code,
            board.length,
            span=float((board.clock - board.first).max()),
            makespan=float(board.clock.max() - board.first.min()),
        )

    @classmethod
    def retimed(cls, method: str, problem: Problem, board: Board) -> Attempt:
        """What a complete board's order achieves when the board was laid with other costs."""
        orders = to_orders(board.code, board.length, problem)
        start, end = earliest_times(problem, orders)
        first, last = orders.offset[:-1], orders.offset[1:] - 1
        return cls(
            method,
            problem,
            board.code,
            board.length,
            span=float((end[last] - start[first]).max()),
            makespan=float(end.max() - start.min()),
        )

    @property
    def value(self) -> float:
        """The problem's objective; of a span, an upper bound (earliest starts, see ``timing``)."""
        return self.span if self.problem.objective == "span" else self.makespan

    @cached_property
    def orders(self) -> Orders:
        """The attempt's order."""
        return to_orders(self.code, self.length, self.problem)


class Board(NamedTuple):
    """What has been placed so far.

    Attributes
    ----------
    clock, held, idle, first
        (p,): end of the last action, memory held, idle time since the first start, that start.
    done
        (3, S): number of F, of I or B, and of W placed.
    forward_end, backward_end
        (S, m): end of F, and of I or B; inf until placed.
    code, length
        (p, 3 * chunks * m) int8 and (p,): the order so far.
    pending, head, tail
        (p, chunks * m) int8 and (p,): chunks of W's that wait, oldest first.
    """

    clock: FloatArray
    held: FloatArray
    idle: FloatArray
    first: FloatArray
    done: IntArray
    forward_end: FloatArray
    backward_end: FloatArray
    code: IntArray
    length: IntArray
    pending: IntArray
    head: IntArray
    tail: IntArray


def make_instance(problem: Problem, fuse: NDArray[np.bool_] | None = None) -> Instance:
    """Arrays of a problem; ``fuse`` (S,) marks stages that always use B (default: none)."""
    arrays = problem.arrays
    slack = MEMORY_TOLERANCE * np.where(np.isfinite(arrays.limit), np.abs(arrays.limit), 0.0)
    return Instance(
        stages=np.array(problem.placement.stages_of, dtype=np.int64),
        duration=arrays.duration,
        delta=arrays.delta,
        transfer=arrays.transfer if problem.n_stages > 1 else np.zeros(1),
        static=arrays.static,
        limit=arrays.limit + slack,
        fuse=np.zeros(problem.n_stages, dtype=np.bool_) if fuse is None else fuse,
        microbatches=problem.microbatches,
    )


def to_orders(codes: IntArray, lengths: IntArray, problem: Problem) -> Orders:
    """Orders from codes: the k-th action of a stage and letter is its k-th microbatch in line.

    B and I draw from one line, and a W takes the oldest I that has none yet.
    """
    stages = np.array(problem.placement.stages_of, dtype=np.int32)
    flat = [codes[rank, : lengths[rank]] for rank in range(problem.pp_degree)]
    letter = np.concatenate(flat).astype(np.int8) % 4
    stage = np.concatenate([stages[rank][code // 4] for rank, code in enumerate(flat)])
    offset = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    unnumbered = np.zeros(len(letter), dtype=np.int32)
    return first_in_first_out(Orders(stage, letter, unnumbered, offset), problem.n_stages)


@compiled
def new_board(instance: Instance) -> Board:  # pragma: no cover - compiled
    """An empty board."""
    p, chunks = instance.stages.shape
    m, n_stages = instance.microbatches, p * chunks
    return Board(
        np.zeros(p),
        instance.static.copy(),
        np.zeros(p),
        np.full(p, -1.0),
        np.zeros((3, n_stages), np.int64),
        np.full((n_stages, m), np.inf),
        np.full((n_stages, m), np.inf),
        np.zeros((p, 3 * chunks * m), np.int8),
        np.zeros(p, np.int64),
        np.zeros((p, chunks * m), np.int8),
        np.zeros(p, np.int64),
        np.zeros(p, np.int64),
    )


@compiled
def arrival(instance: Instance, board: Board, stage: int, letter: int) -> float:  # pragma: no cover
    """When the input of a stage's next F or I arrives; inf while unknown or when none is left."""
    n_stages, m = board.forward_end.shape
    if letter == F:
        k = board.done[F, stage]
        if k >= m:
            return np.inf
        if stage == 0:
            return 0.0
        return float(board.forward_end[stage - 1, k] + instance.transfer[stage - 1])
    k = board.done[I, stage]
    if k >= board.done[F, stage]:
        return np.inf
    if stage == n_stages - 1:
        return float(board.forward_end[stage, k])
    return float(board.backward_end[stage + 1, k] + instance.transfer[stage])


@compiled
def place(
    instance: Instance, board: Board, rank: int, chunk: int, letter: int, ready: float
) -> None:  # pragma: no cover - compiled
    """Lay the next F, I, W or B of a chunk, no earlier than ``ready``."""
    stage = instance.stages[rank, chunk]
    start = max(board.clock[rank], ready)
    if board.length[rank] == 0:
        board.first[rank] = start
    else:
        board.idle[rank] += start - board.clock[rank]
    end = start + instance.duration[letter, stage]
    board.clock[rank] = end
    board.held[rank] += instance.delta[letter, stage]
    board.code[rank, board.length[rank]] = chunk * 4 + letter
    board.length[rank] += 1
    if letter == F:
        board.forward_end[stage, board.done[F, stage]] = end
        board.done[F, stage] += 1
    elif letter == W:
        board.done[W, stage] += 1
    else:
        board.backward_end[stage, board.done[I, stage]] = end
        board.done[I, stage] += 1
        if letter == I:
            board.pending[rank, board.tail[rank]] = chunk
            board.tail[rank] += 1


@compiled
def pending_weight(board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """Chunk of the oldest waiting W of a rank, or -1."""
    if board.head[rank] == board.tail[rank]:
        return -1
    return int(board.pending[rank, board.head[rank]])


@compiled
def place_weight(instance: Instance, board: Board, rank: int) -> None:  # pragma: no cover - compiled
    """Lay the oldest waiting W of a rank."""
    chunk = int(board.pending[rank, board.head[rank]])
    board.head[rank] += 1
    place(instance, board, rank, chunk, W, board.clock[rank])


@compiled
def admits_forward(instance: Instance, board: Board, rank: int, chunk: int) -> bool:  # pragma: no cover
    """Whether memory allows the next F of a chunk now without risking a deadlock.

    The forwards of a microbatch are given back only after its last one, so a forward is admitted while
    room stays for those that follow it on this rank, or while an older microbatch has all of its own and
    will give back as much.
    """
    first, last = instance.stages[rank, 0], instance.stages[rank, instance.stages.shape[1] - 1]
    following = 0.0
    for later in range(chunk, instance.stages.shape[1]):
        following += instance.delta[F, instance.stages[rank, later]]
    if board.held[rank] + following <= instance.limit[rank]:
        return True
    own = instance.delta[F, instance.stages[rank, chunk]]
    fits = board.held[rank] + own <= instance.limit[rank]
    return bool(fits and board.done[F, last] > board.done[I, first])


@compiled
def backward_letter(instance: Instance, board: Board, rank: int, chunk: int) -> int:  # pragma: no cover
    """I or B for the next backward of a chunk: B where the caller fuses, or where I would overflow."""
    stage = instance.stages[rank, chunk]
    grows = max(0.0, instance.delta[I, stage])
    if instance.fuse[stage] or board.held[rank] + grows > instance.limit[rank]:
        return B
    return I


@compiled
def is_complete(board: Board) -> bool:  # pragma: no cover - compiled
    """Whether every stage has all of its backwards, and no W waits."""
    return bool(board.done[I].min() == board.forward_end.shape[1] and np.all(board.head == board.tail))
