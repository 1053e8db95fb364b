"""The memory limit of a rank as sums over pairs of actions.

Memory does not depend on time, only on which actions come before which. One literal per pair of actions
states their order, and one linear constraint per allocating action sums what is held. CP-SAT handles these
sums far better than intervals of held memory (a cumulative or a reservoir): it learns from the literals,
which the constraints on the rank's order share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from ortools.sat.python import cp_model
from ortools.sat.python.cp_model_helper import Literal

from zbv_solver.improve.exact_grid import GRID, LARGEST_INTEGER
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, integer_scale
from zbv_solver.problem.problem import B, F, I, Problem, W

Expression = cp_model.LinearExpr
Action = tuple[int, int, int]
"""(letter, stage, microbatch); letter I stands for I or B."""


@dataclass(frozen=True)
class Amounts:
    """Memory deltas and capacity of a rank as integers, rounded so that every order that fits still fits.

    Lemma 27.

    Attributes
    ----------
    delta
        Of a (letter, stage, kind of microbatch).
    kind_of
        The kind of every microbatch.
    capacity
        Most that the actions may hold together, static memory excluded.
    """

    delta: dict[tuple[int, int, int], int]
    kind_of: list[int]
    capacity: int

    @classmethod
    def of(cls, problem: Problem, rank: int) -> Amounts:
        """Amounts of a rank whose limit is not None."""
        arrays = problem.arrays
        limit, static = float(arrays.limit[rank]), float(arrays.static[rank])
        stages = problem.placement.stages_of[rank]
        keys = [
            (letter, stage, kind) for letter in (F, I, W) for stage in stages for kind in range(arrays.kinds)
        ]
        true = np.array([arrays.delta[key] for key in keys])
        scale = integer_scale(true.tolist(), LARGEST_INTEGER)
        if scale is None:
            scale = GRID / float(np.abs(true).max())
            # A sum of rounded-down deltas is an integer and at most the true sum, so every order that fits
            # also fits the rounded-down capacity below.
            scaled = np.floor(true * scale)
        else:
            scaled = np.rint(true * scale)
        delta = dict(zip(keys, map(int, scaled.tolist()), strict=True))
        capacity = (limit - static + 2 * MEMORY_TOLERANCE * abs(limit)) * scale
        # More than the sum of all allocations is never needed; this keeps the integers small.
        count = arrays.count.tolist()
        most = sum(max(0, value) * count[kind] for (_, _, kind), value in delta.items())
        for stage, kind in product(stages, range(arrays.kinds)):
            delta[B, stage, kind] = delta[I, stage, kind] + delta[W, stage, kind]
        return cls(delta, arrays.kind_of.tolist(), min(math.floor(capacity), most))

    def change(self, action: Action) -> int:
        """The change of memory at an action."""
        letter, stage, microbatch = action
        return self.delta[letter, stage, self.kind_of[microbatch]]


class Pairs:
    """One literal for every two actions of a rank, true if the first ends before the second starts."""

    def __init__(
        self,
        model: cp_model.CpModel,
        start: Callable[[Action], Expression],
        end: Callable[[Action], Expression],
        known: Callable[[Action, Action], bool],
    ):
        self.model, self.start, self.end, self.known = model, start, end, known
        self.literals: dict[tuple[Action, Action], cp_model.IntVar] = {}
        self.true = model.new_constant(1)

    def before(self, first: Action, second: Action) -> Literal:
        """The literal of two actions, made at its first use; it is a constant for ``known`` pairs."""
        if self.known(first, second):
            return self.true
        if self.known(second, first):
            return self.true.negated()
        if (second, first) in self.literals:
            return self.literals[second, first].negated()
        if (first, second) not in self.literals:
            literal = self.model.new_bool_var(f"{first}<{second}")
            self.model.add(self.end(first) <= self.start(second)).only_enforce_if(literal)
            self.model.add(self.end(second) <= self.start(first)).only_enforce_if(literal.negated())
            self.literals[first, second] = literal
        return self.literals[first, second]

    def fits(
        self,
        action: Action,
        actions: list[Action],
        amounts: Amounts,
        held: int,
        enforced: list[Literal],
    ) -> None:
        """The memory held before an action, and what the action allocates, fit the rank's capacity."""
        others = [other for other in actions if other != action and amounts.change(other) != 0]
        terms = [amounts.change(other) * self.before(other, action) for other in others]
        allocated = max(0, amounts.change(action))
        constraint = self.model.add(sum(terms) <= amounts.capacity - held - allocated)
        if enforced:
            constraint.only_enforce_if(enforced)
