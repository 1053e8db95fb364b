"""The state of list scheduling by injections, and marks to return to.

Changing when a late microbatch enters leaves the beginning of the order as it is. So a construction marks
some of its states, and the next one begins at the last mark before the first difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import Board
from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_inline, compiled_leaf
from zbv_solver.problem.problem import F, I


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


@compiled_leaf
def accept(marks: Marks, same: int) -> None:  # pragma: no cover - compiled
    """Let the last injection, which was complete, be the last accepted one; ``same`` is as in its call."""
    for number in range(max(0, (same - 1) // marks.every), len(marks.used)):
        marks.used[number] = 1 - marks.used[number]


@compiled_leaf
def mark(board: Board, choices: Choices, marks: Marks, number: int) -> None:  # pragma: no cover - compiled
    """Write the copy of a mark that belongs to the injection in progress."""
    copy, at = 1 - marks.used[number], 0
    _copy(marks.level[copy, number], board.level)
    _copy(marks.placed[copy, number], board.placed)
    _copy(marks.length[copy, number], board.length)
    _copy(marks.weights[copy, number], choices.weights)
    _copy(marks.first[copy, number], choices.first)
    _copy(marks.least[copy, number], choices.least)
    _copy(marks.begin[copy, number], choices.begin)
    _copy(marks.action[copy, number], choices.action)
    _copy(marks.ready[copy, number], choices.ready)
    for here in range(len(board.placed) - 1):
        for k in range(board.placed[here + 1], board.placed[here]):
            marks.end[copy, number, at] = board.end[here, k]
            at += 1


@compiled_leaf
def return_to(
    board: Board, choices: Choices, marks: Marks, number: int
) -> None:  # pragma: no cover - compiled
    """Restore what :func:`mark` wrote for the last accepted injection."""
    copy, at = marks.used[number], 0
    _copy(board.level, marks.level[copy, number])
    _copy(board.placed, marks.placed[copy, number])
    _copy(board.length, marks.length[copy, number])
    _copy(choices.weights, marks.weights[copy, number])
    _copy(choices.first, marks.first[copy, number])
    _copy(choices.least, marks.least[copy, number])
    _copy(choices.begin, marks.begin[copy, number])
    _copy(choices.action, marks.action[copy, number])
    _copy(choices.ready, marks.ready[copy, number])
    for here in range(len(board.placed) - 1):
        for k in range(board.placed[here + 1], board.placed[here]):
            board.end[here, k] = marks.end[copy, number, at]
            at += 1


@compiled_inline
def _copy(into: FloatArray, source: FloatArray) -> None:  # pragma: no cover - compiled
    """Copy numbers between arrays of one shape."""
    target, values = into.reshape(-1), source.reshape(-1)
    for at in range(len(values)):
        target[at] = values[at]
