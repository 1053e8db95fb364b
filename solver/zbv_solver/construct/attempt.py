"""A constructed order: the method, the codes of its actions, and its objective at earliest start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zbv_solver.construct.board import Board
from zbv_solver.construct.rules import Rule
from zbv_solver.construct.tables import Tables
from zbv_solver.kernels.arrays import IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.timing.start_times import earliest_start_values


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
