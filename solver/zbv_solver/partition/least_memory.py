"""The cut that needs the least memory, on any placement; and that none needs less.

Under V and single :mod:`.balance` knows it. Under loop a rank's stages lie all over the model: there a search
by moves is followed by CP-SAT, on the literals "part i lies before bound s", in which all that a rank holds
is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zbv_solver.partition.balance import smallest_cut
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.settle import settled_cut
from zbv_solver.plans.certificate import certify
from zbv_solver.problem.cut import Cut

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

EFFORT = 1.0
"""CP-SAT's deterministic time, some seconds, after which what is known has to do."""
GRID = 1 << 36
"""Steps into which the largest amount is divided."""


@dataclass(frozen=True)
class LeastMemory:
    """A cut, and what its worst rank needs beyond its room (negative where it fits).

    Attributes
    ----------
    bound
        No cut's worst rank needs less beyond its room; -inf where all that was asked is whether one fits.
    """

    cut: Cut
    excess: float
    bound: float

    @property
    def fits(self) -> bool:
        """Whether every rank has the room."""
        return self.excess <= 0


def least_memory_cut(
    space: CutSpace,
    start: Bounds,
    *,
    enough: float = -np.inf,
    seed: int = 0,
    seconds: float | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> LeastMemory:
    """The cut whose worst rank needs least beyond its room; every rank's room is finite. Lemma 36.

    Parameters
    ----------
    enough
        An excess that no smaller one is looked for below; 0 asks for any cut that fits.
    seconds
        A cap on the search, beside its effort.
    """
    if space.placement.kind != "loop":
        found = smallest_cut(space, start)
        if found is None:
            raise RuntimeError("there is no cut at all; this is a fault of ours, please report it.")
        return LeastMemory(found.cut, found.worst, found.worst)
    settled = settled_cut(space, start, seed)
    cut = space.cut(settled, space.leanest(settled))
    excess = space.excess(settled, cut.recompute)
    if excess <= enough:
        return LeastMemory(cut, excess, -np.inf)
    known = LeastMemory(cut, excess, -np.inf)
    return _Model(space).solve(known, enough, seed, seconds, cancelled)


def surely_lacking(space: CutSpace) -> float:
    """What some rank needs beyond its room whatever the cut: for one part, or of all together. Lemma 35."""
    tables = space.tables
    held = np.diff(tables.sums[:, 3], axis=1)
    workspace = np.array([np.diagonal(each, offset=1) for each in tables.workspace])
    alone = float((held + workspace).min(axis=0).max() - tables.room.max())
    together = float(held.min(axis=0).sum() - tables.room.sum()) / len(tables.room)
    return max(alone, together)


class _Model:
    """The literals, in a grid that rounds what is needed down: a bound of it is one of the truth."""

    def __init__(self, space: CutSpace):
        from ortools.sat.python import cp_model

        self.space, self.tables = space, space.tables
        self.model = cp_model.CpModel()
        tables = self.tables
        held, workspace = np.diff(tables.sums[:, 3], axis=1), tables.workspace
        self.held = held
        self.workspace = np.array([np.diagonal(each, offset=1) for each in workspace])
        self.largest = float(held.max(axis=0).sum() + workspace.max() + np.abs(tables.room).max())
        self.step = self.largest / GRID if self.largest > 0 else 1.0
        self.before = [[self.model.new_bool_var("") for _ in range(tables.n)] for _ in range(self.stages + 1)]
        self._keep_the_rules()
        self.again = [self.model.new_bool_var("") for _ in range(self.stages)]
        if tables.variants == 1:
            for stage in self.again:
                self.model.add(stage == 0)
        self.excess = self.model.new_int_var(-2 * GRID, 2 * GRID, "excess")
        for rank in range(space.placement.pp_degree):
            self._need(rank)
        self.model.minimize(self.excess)

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return self.space.n_stages

    def _keep_the_rules(self) -> None:
        """Bounds ascend, by at least a part where no stage may be empty, within their ranges."""
        model, n = self.model, self.tables.n
        for bound, (low, high) in enumerate(zip(*self.space.ranges, strict=True)):
            literals = self.before[bound]
            for part, literal in enumerate(literals):
                if part < low or part >= high:
                    model.add(literal == int(part < low))
            for one, after in pairwise(literals):
                model.add_implication(after, one)
        for lower, upper in pairwise(self.before):
            for part in range(n):
                if part + self.space.least < n:
                    model.add_implication(lower[part], upper[part + self.space.least])
                elif self.space.least:
                    model.add(lower[part] == 0)
            if self.space.least:
                model.add(upper[0] == 1)

    def _need(self, rank: int) -> None:
        """What the rank holds and its largest workspace are within its room, but for the excess."""
        model, needs = self.model, []
        largest = model.new_int_var(0, GRID, "workspace")
        for stage in self.space.placement.stages_of[rank]:
            for part in range(self.tables.n):
                inside = self.before[stage + 1][part] - self.before[stage][part]
                needs.append(self._steps(self.held[0, part]) * inside)
                model.add(largest >= self._steps(self.workspace[0, part]) * (inside - self.again[stage]))
                if self.tables.variants == 1:
                    continue
                recomputed = model.new_bool_var("")
                model.add(recomputed <= inside)
                model.add(recomputed <= self.again[stage])
                model.add(recomputed >= inside + self.again[stage] - 1)
                needs.append((self._steps(self.held[1, part]) - self._steps(self.held[0, part])) * recomputed)
                model.add(largest >= self._steps(self.workspace[1, part]) * recomputed)
        model.add(sum(needs) + largest - self._steps(self.tables.room[rank], up=True) <= self.excess)

    def solve(
        self,
        known: LeastMemory,
        enough: float,
        seed: int,
        seconds: float | None,
        cancelled: Callable[[], bool] | None,
    ) -> LeastMemory:
        """A cut that needs less than the known one, or that one, and the bound that was proved."""
        from ortools.sat.python import cp_model

        from zbv_solver.improve.exact import make_solver, stopped_when

        self._hint(known.cut)
        solver = make_solver(EFFORT, seconds, seed)
        solver.parameters.linearization_level = 1  # without recomputation the relaxation says nearly all
        if np.isfinite(enough):
            self.model.add(self.excess >= self._steps(enough))
        with stopped_when(cancelled, solver):
            status = solver.solve(self.model)
        cut, excess = known.cut, known.excess
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = self._cut(solver)
            reached = self.space.excess(self.space.bounds_of(found), found.recompute)
            if reached < excess:
                cut, excess = found, reached
        bound = max(solver.best_objective_bound * self.step, surely_lacking(self.space))
        if bound <= enough:
            return LeastMemory(cut, excess, -np.inf)
        # Both are differences of amounts, so rounding is relative to the amounts.
        proven = certify(self.space.problem, self.largest + excess, self.largest + bound, "cp-sat, cuts")
        return LeastMemory(cut, excess, proven.lower_bound - self.largest)

    def _hint(self, cut: Cut) -> None:
        for bound, place in enumerate(self.space.bounds_of(cut)):
            for part, literal in enumerate(self.before[bound]):
                self.model.add_hint(literal, part < place)
        for literal, recompute in zip(self.again, cut.recompute, strict=True):
            self.model.add_hint(literal, recompute)

    def _cut(self, solver: cp_model.CpSolver) -> Cut:
        bounds = tuple(sum(solver.boolean_value(literal) for literal in each) for each in self.before)
        return self.space.cut(bounds, self.space.leanest(bounds))

    def _steps(self, amount: float, *, up: bool = False) -> int:
        steps = amount / self.step
        return int(np.ceil(steps) if up else np.floor(steps))
