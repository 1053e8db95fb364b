"""The cut that needs the least memory, with a proof, on any placement.

For V and single, :mod:`.balance` finds it. For loop, where a rank's stages are spread over the model, a local
search is followed by CP-SAT with the literals "part i is before boundary s", in which memory is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zbv_solver.partition.balance import smallest_cut
from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables, ScoredCut
from zbv_solver.partition.settle import settled_cut
from zbv_solver.plans.plan import certify
from zbv_solver.problem.cut import Cut

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

EFFORT = 1.0
"""CP-SAT's deterministic time, which is some seconds."""
GRID = 1 << 36
"""Steps of the integer grid in the largest amount."""


def least_memory_cut(
    space: CutSpace,
    start: Boundaries,
    *,
    enough: float = -np.inf,
    seed: int = 0,
    seconds: float | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> ScoredCut:
    """The cut whose value, the most that a rank needs beyond its room, is least. Lemma 36.

    Every rank must have a limit. The bound is -inf if the search only looked for a cut that fits.

    Parameters
    ----------
    enough
        Stop once the excess is at most this; 0 asks for any cut that fits.
    seconds
        Time limit of the search, in addition to its effort.
    """
    if space.placement.kind != "loop":
        found = smallest_cut(space, start)
        if found is None:
            raise RuntimeError("no cut was found; this is a bug in zbv, please report it.")
        return found
    cut = space.leanest(settled_cut(space, start, seed))
    known = ScoredCut(cut, space.excess(cut))
    if known.value <= enough:
        return known
    return _Model(space).solve(known, enough, seed, seconds, cancelled)


def surely_lacking(tables: CutTables) -> float:
    """A lower bound on the excess of every cut, from single parts and from the total. Lemma 35."""
    held = np.diff(tables.sums[:, :, 3])
    workspace = np.diagonal(tables.workspace, offset=1, axis1=2, axis2=3)
    alone = float((held + workspace).min(axis=(0, 1)).max() - tables.room.max())
    together = float(held.min(axis=(0, 1)).sum() - tables.room.sum()) / len(tables.room)
    return max(alone, together)


class _Model:
    """The CP-SAT model. Needs are rounded down to the grid, so its lower bounds hold for the real excess."""

    def __init__(self, space: CutSpace):
        from ortools.sat.python import cp_model

        self.space, self.tables = space, space.tables
        self.model, tables, stages = cp_model.CpModel(), space.tables, space.n_stages
        held, workspace = np.diff(tables.sums[:, :, 3]), tables.workspace
        self.held = held
        self.workspace = np.diagonal(workspace, offset=1, axis1=2, axis2=3)
        self.largest = float(held.max(axis=(0, 1)).sum() + workspace.max() + np.abs(tables.room).max())
        self.step = self.largest / GRID if self.largest > 0 else 1.0
        self.before = [[self.model.new_bool_var("") for _ in range(tables.n)] for _ in range(stages + 1)]
        self._keep_the_rules()
        self.again = [self.model.new_bool_var("") for _ in range(stages)]
        if tables.variants == 1:
            for stage in self.again:
                self.model.add(stage == 0)
        self.excess = self.model.new_int_var(-2 * GRID, 2 * GRID, "excess")
        for rank in range(space.placement.pp_degree):
            self._need(rank)
        self.model.minimize(self.excess)

    def _keep_the_rules(self) -> None:
        """Boundaries ascend within their ranges, by at least one part if no stage may be empty."""
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
                    # If part i is before one boundary, part i + `least` is before the next.
                    model.add_implication(lower[part], upper[part + self.space.least])
                elif self.space.least:
                    model.add(lower[part] == 0)
            if self.space.least:
                model.add(upper[0] == 1)

    def _need(self, rank: int) -> None:
        """What the rank holds plus its largest workspace is at most its room plus the excess."""
        model, needs, kind = self.model, [], self.tables.kind_of[rank]
        held, workspace = self.held[kind], self.workspace[kind]
        largest = model.new_int_var(0, GRID, "workspace")
        for stage in self.space.placement.stages_of[rank]:
            for part in range(self.tables.n):
                inside = self.before[stage + 1][part] - self.before[stage][part]
                needs.append(self._steps(held[0, part]) * inside)
                # The difference is 1 only if the part is inside and the stage is plain.
                model.add(largest >= self._steps(workspace[0, part]) * (inside - self.again[stage]))
                if self.tables.variants == 1:
                    continue
                recomputed = model.new_bool_var("")
                # Linear form of the product: recomputed = inside and again.
                model.add(recomputed <= inside)
                model.add(recomputed <= self.again[stage])
                model.add(recomputed >= inside + self.again[stage] - 1)
                needs.append((self._steps(held[1, part]) - self._steps(held[0, part])) * recomputed)
                model.add(largest >= self._steps(workspace[1, part]) * recomputed)
        model.add(sum(needs) + largest - self._steps(self.tables.room[rank], up=True) <= self.excess)

    def solve(
        self,
        known: ScoredCut,
        enough: float,
        seed: int,
        seconds: float | None,
        cancelled: Callable[[], bool] | None,
    ) -> ScoredCut:
        """The better one of a found cut and the known cut, and the proved bound."""
        from ortools.sat.python import cp_model

        from zbv_solver.improve.cp_sat import make_solver, stopped_when

        self._hint(known.cut)
        solver = make_solver(EFFORT, seed, seconds)
        solver.parameters.linearization_level = 1  # without recomputation the relaxation is nearly exact
        if np.isfinite(enough):
            self.model.add(self.excess >= self._steps(enough))
        with stopped_when(cancelled, solver):
            status = solver.solve(self.model)
        best = known
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = self._cut(solver)
            best = min(known, ScoredCut(found, self.space.excess(found)), key=lambda each: each.value)
        bound = max(solver.best_objective_bound * self.step, surely_lacking(self.tables))
        if bound <= enough:
            return best
        # Excess and bound are differences of amounts, so rounding is relative to the amounts.
        proven = certify(self.space.problem, self.largest + best.value, self.largest + bound, "cp-sat, cuts")
        return replace(best, bound=proven.lower_bound - self.largest)

    def _hint(self, cut: Cut) -> None:
        for bound, place in enumerate(self.space.bounds_of(cut)):
            for part, literal in enumerate(self.before[bound]):
                self.model.add_hint(literal, part < place)
        for literal, recompute in zip(self.again, cut.recompute, strict=True):
            self.model.add_hint(literal, recompute)

    def _cut(self, solver: cp_model.CpSolver) -> Cut:
        bounds = tuple(sum(solver.boolean_value(literal) for literal in each) for each in self.before)
        return self.space.leanest(bounds)

    def _steps(self, amount: float, *, up: bool = False) -> int:
        steps = amount / self.step
        return int(np.ceil(steps) if up else np.floor(steps))
