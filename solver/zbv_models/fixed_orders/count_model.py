"""The best cut under known terms of an order, as a CP-SAT model over the counts of :mod:`.runs`.

All numbers are rounded such that no cut is lost, so bounds are valid for the real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model
from zbv_solver.improve.cp_sat import make_solver, stopped_when
from zbv_solver.partition.fixed_order import FixedOrder, Terms
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed, Row, Runs
from zbv_solver.problem.numeric import MEMORY_TOLERANCE

STEPS = 44
"""Binary digits of the integer that stands for the value of the best known cut, or for a rank's limit."""


@dataclass(frozen=True)
class Proposal:
    """The result of a solve.

    Attributes
    ----------
    choices
        Cuts within the value asked for, as far as the known terms say; the best last.
    bound
        A proven bound on all cuts within the value asked for.
    is_exhausted
        Whether there is no cut within the value asked for.
    effort
        CP-SAT's deterministic time.
    """

    choices: list[Choice]
    bound: float
    is_exhausted: bool
    effort: float


class CountModel:
    """The cuts of a space that fit the memory limit, with an objective up to a value. Lemma 52.

    Parameters
    ----------
    value
        The objective of a known cut, for the scale.
    recompute
        What is recomputed; None lets the model choose for every stage.
    """

    def __init__(
        self,
        runs: Runs,
        order: FixedOrder,
        value: float,
        bound: float,
        recompute: Recomputed | First | None,
    ):
        self.runs, self.is_first = runs, isinstance(recompute, First)
        self.fixed = recompute if isinstance(recompute, tuple) else None
        self.stages = len(runs.lower) - 1
        self.size = runs.size.tolist()
        self.model = cp_model.CpModel()
        self.cancelled: Callable[[], bool] | None = None
        # A power of two keeps whole costs whole.
        self.scale = math.ldexp(1.0, STEPS - math.frexp(value)[1])
        self._add_counts()
        self.again: list[list[cp_model.LinearExpr]] = []
        self.recomputed: list[cp_model.IntVar] = []
        if isinstance(recompute, First):
            self._add_first(recompute)
        elif recompute is None:
            self._add_recomputation()
        least = max(0, math.floor(bound * self.scale) - 1)
        self.objective = self.model.new_int_var(least, 1 << (STEPS + 1), "objective")
        self.model.minimize(self.objective)
        self._add_memory(order)

    def _add_counts(self) -> None:
        model, runs = self.model, self.runs
        low, high = runs.counts(tuple(runs.lower)), runs.counts(tuple(runs.upper))
        self.counts = [
            [
                model.new_int_var(int(low[bound, run]), int(high[bound, run]), f"{run}<{bound}")
                for run in range(len(self.size))
            ]
            for bound in range(self.stages + 1)
        ]
        for row in self.counts[1:-1]:
            for run, (size, after) in enumerate(pairwise(self.size)):
                is_full = model.new_bool_var("")
                model.add(row[run] >= size * is_full)
                model.add(row[run + 1] <= after * is_full)
        for row, after in pairwise(self.counts):
            for one, other in zip(row, after, strict=True):
                model.add(one <= other)
            if runs.least:
                model.add(sum(after) >= sum(row) + runs.least)
        for stage, size in runs.sizes.items():
            model.add(sum(self.counts[stage + 1]) == sum(self.counts[stage]) + size)
        # Sums per rank help the solver to see that loads are whole parts.
        for stages in runs.space.placement.stages_of:
            for run, size in enumerate(self.size):
                if size > 1 and len(stages) > 1:
                    own = model.new_int_var(0, size, "")
                    model.add(own == sum(self._inside(stage, run) for stage in stages))

    def _inside(self, stage: int, run: int) -> cp_model.LinearExpr:
        """How many parts of a run a stage has."""
        return self.counts[stage + 1][run] - self.counts[stage][run]

    def _add_recomputation(self) -> None:
        model = self.model
        for stage in range(self.stages):
            chosen = model.new_bool_var(f"again{stage}")
            self.recomputed.append(chosen)
            self.again.append([])
            for run, size in enumerate(self.size):
                inside, both = self._inside(stage, run), model.new_int_var(0, size, "")
                model.add(both <= inside)
                model.add(both <= size * chosen)
                model.add(both >= inside - size * (1 - chosen))
                self.again[-1].append(both)

    def _add_first(self, first: First) -> None:
        """Of every stage as many first layers, which may lie in several runs."""
        model, able = self.model, self.runs.can_recompute > 0
        most = int(self.runs.size[able].sum())
        number = model.new_int_var(min(first.least, most), min(first.most, most), "first")
        self.recomputed = [number] * self.stages
        for stage in range(self.stages):
            self.again.append([])
            inside = before = cp_model.LinearExpr.sum([])
            for run, is_able in enumerate(able.tolist()):
                until: cp_model.LinearExpr = before
                if is_able:
                    inside = inside + self._inside(stage, run)
                    until = model.new_int_var(0, most, "")
                    model.add_min_equality(until, [number, inside])
                self.again[-1].append(until - before)
                before = until

    def _steps(self, row: Row, scale: float) -> cp_model.LinearExpr:
        """A row in integer steps, rounded down."""
        variables: list[cp_model.LinearExpr] = []
        slope = row.slope if self.fixed is None else row.with_stages(self.fixed)
        tables = [(self.counts, slope)] + ([(self.again, row.again)] if self.fixed is None else [])
        factors = []
        for rows, values in tables:
            steps = np.floor(values * scale).astype(np.int64)
            for one, other in np.argwhere(steps).tolist():
                variables.append(rows[one][other])
                factors.append(int(steps[one, other]))
        return cp_model.LinearExpr.weighted_sum(variables, factors) + math.floor(row.fixed * scale)

    def add(self, terms: Terms) -> None:
        """All further cuts keep these terms."""
        total = self._steps(self.runs.row_of_terms(terms), self.scale)
        self.model.add(total <= terms.length * self.objective + (terms.length - 1))

    def _add_memory(self, order: FixedOrder) -> None:
        problem = self.runs.space.problem
        if problem.limit is None:
            return
        scales = [math.ldexp(1.0, STEPS - math.frexp(limit or 1.0)[1]) for limit in problem.limit]
        workspaces = [self._workspace(rank, scale) for rank, scale in enumerate(scales)]
        for rank, numbers in zip(*order.held, strict=True):
            limit, scale = problem.limit[rank], scales[rank]
            room = limit * (1 + 2 * MEMORY_TOLERANCE) - problem.static[rank]
            held = self._steps(self.runs.row_of_memory(order.hosted[rank], numbers), scale)
            self.model.add(held + workspaces[rank] <= math.ceil(room * scale))

    def _workspace(self, rank: int, scale: float) -> cp_model.IntVar | int:
        """The largest workspace of a rank's parts, in steps."""
        model = self.model
        steps = np.minimum(np.floor(self.runs.workspace * scale), 1 << (STEPS + 1)).astype(np.int64)
        if not steps.any():
            return 0
        largest = model.new_int_var(0, int(steps.max()), f"workspace{rank}")
        for stage in self.runs.space.placement.stages_of[rank]:
            for run, size in enumerate(self.size):
                if self.is_first:
                    again = self.again[stage][run]
                    for variant, held in ((0, self._inside(stage, run) - again), (1, again)):
                        is_held = model.new_bool_var("")
                        model.add(held <= size * is_held)
                        model.add(largest >= int(steps[variant, run]) * is_held)
                    continue
                has = model.new_bool_var("")
                model.add(self._inside(stage, run) <= size * has)
                if self.fixed is not None:
                    model.add(largest >= int(steps[int(bool(self.fixed[stage])), run]) * has)
                else:
                    chosen = self.recomputed[stage]
                    model.add(largest >= int(steps[0, run])).only_enforce_if(has, chosen.negated())
                    model.add(largest >= int(steps[1, run])).only_enforce_if(has, chosen)
        return largest

    def solve(
        self, below: float, effort: float, seed: int, seconds: float | None = None, linear: int = 2
    ) -> Proposal:
        """Search the cut with the least objective under the known terms, up to ``below``.

        ``linear`` is CP-SAT's ``linearization_level``.
        """
        self.model.proto.variables[self.objective.index].domain[1] = math.floor(below * self.scale)
        solver = make_solver(effort, seconds, seed)
        solver.parameters.linearization_level = linear
        watch = _Watch(self)
        with stopped_when(self.cancelled, solver):
            status = solver.solve(self.model, watch)
        spent = solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return Proposal([], below, True, spent)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            raise RuntimeError(f"CP-SAT returned {solver.status_name(status)}; this is a bug in zbv.")
        return Proposal(watch.choices, (solver.best_objective_bound - 1) / self.scale, False, spent)


class _Watch(cp_model.CpSolverSolutionCallback):
    """Collects the cuts that a solve finds."""

    def __init__(self, model: CountModel):
        super().__init__()
        self.model = model
        self.choices: list[Choice] = []

    def on_solution_callback(self) -> None:
        """Called by CP-SAT."""
        model = self.model
        bounds = tuple(sum(self.value(count) for count in row) for row in model.counts)
        recompute = model.fixed
        if recompute is None:
            scale = 1 if model.is_first else WHOLE
            recompute = tuple(scale * self.value(chosen) for chosen in model.recomputed)
        self.choices.append((bounds, recompute))
