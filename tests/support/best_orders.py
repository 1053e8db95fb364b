"""Best orders of small problems, by separate models in CP-SAT."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise, product
from typing import Literal, cast

from ortools.sat.python import cp_model
from zbv_solver.problem.problem import F, I, Problem, W


def begin(interval: cp_model.IntervalVar) -> cp_model.LinearExpr:
    """The start, typed: the solver's own method has no type."""
    return cast(cp_model.LinearExpr, interval.start_expr())


def end(interval: cp_model.IntervalVar) -> cp_model.LinearExpr:
    return cast(cp_model.LinearExpr, interval.end_expr())


Case = Literal["leaves last", "overtakes", "leads"]
"""How two microbatches pass each other."""
Cell = tuple[int, int]
Both = tuple[cp_model.IntervalVar, cp_model.IntervalVar]


class _WithCopies:
    """Times of all actions and copies. All numbers of the problem are integers, and no duration is 0.

    Memory is the amount held over time, not a sum along a list, and copies are intervals of two engines.
    Microbatches ascend on the first stage alone: with copies, another order may be better on the others.
    ``known`` is the objective of some order.
    """

    def __init__(self, problem: Problem, known: int):
        self.problem, self.model = problem, cp_model.CpModel()
        self.cells = list(product(range(problem.n_stages), range(problem.microbatches)))
        self.duration = problem.arrays.duration[:, :, 0].astype(int).tolist()
        self.known, self.horizon = known, 3 * known // 2
        self.interval = {
            (letter, *cell): self._interval(self.duration[letter][cell[0]])
            for letter in (F, I, W)
            for cell in self.cells
        }
        self.copied = {cell: self.model.new_bool_var("") for cell in self.cells}
        self._pass_on()
        self.engines, self.moments = self._copies()
        for rank in range(problem.pp_degree):
            self._use_rank(rank)
        self._minimise()

    def _interval(self, size: int, present: cp_model.IntVar | None = None) -> cp_model.IntervalVar:
        start = self.model.new_int_var(0, self.horizon, "")
        if present is None:
            return self.model.new_fixed_size_interval_var(start, size, "")
        return self.model.new_optional_fixed_size_interval_var(start, size, present, "")

    def _after(self, later: cp_model.IntervalVar, earlier: cp_model.IntervalVar, lag: int = 0) -> None:
        self.model.add(begin(later) >= end(earlier) + lag)

    def _pass_on(self) -> None:
        lags = self.problem.arrays.latency[:, 0].astype(int).tolist()
        for stage, j in self.cells:
            self._after(self.interval[I, stage, j], self.interval[F, stage, j])
            self._after(self.interval[W, stage, j], self.interval[I, stage, j])
            if stage:
                lag = lags[stage - 1]
                self._after(self.interval[F, stage, j], self.interval[F, stage - 1, j], lag)
                self._after(self.interval[I, stage - 1, j], self.interval[I, stage, j], lag)
            elif j:
                self._after(self.interval[F, 0, j], self.interval[F, 0, j - 1])

    def _copies(self) -> tuple[dict[Cell, Both], dict[Cell, Both]]:
        """The copies out and in of every cell, and the moments at which its memory is freed and taken."""
        copies = self.problem.copies
        if copies is None:
            raise ValueError("the problem has no copies.")
        engines, moments = {}, {}
        for cell in self.cells:
            stage, there = cell[0], self.copied[cell]
            away = self._interval(int(copies.offload[stage]), there)
            back = self._interval(int(copies.reload[stage]), there)
            freed, taken = self._interval(0, there), self._interval(0, there)
            chain = (self.interval[F, *cell], away, freed, taken, back, self.interval[I, *cell])
            for earlier, later in pairwise(chain):
                self.model.add(begin(later) >= end(earlier)).only_enforce_if(there)
            engines[cell], moments[cell] = (away, back), (freed, taken)
        return engines, moments

    def _use_rank(self, rank: int) -> None:
        """One action at a time, one copy at a time in either direction, and no more memory than the limit."""
        problem, arrays = self.problem, self.problem.arrays
        mine = [cell for cell in self.cells if problem.placement.rank_of[cell[0]] == rank]
        actions = [self.interval[letter, *cell] for cell in mine for letter in (F, I, W)]
        # A moment lies between two actions, because it is an entry of the rank's list.
        self.model.add_no_overlap(actions + [moment for cell in mine for moment in self.moments[cell]])
        for direction in (0, 1):
            self.model.add_no_overlap([self.engines[cell][direction] for cell in mine])
        demands = []
        for cell in mine:
            held = arrays.delta[:, cell[0], 0].astype(int).tolist()
            moved = int(problem.copies.offloadable[cell[0]]) if problem.copies else 0
            first, last = begin(self.interval[F, *cell]), end(self.interval[I, *cell])
            freed, taken = map(begin, self.moments[cell])
            there = self.copied[cell]
            demands += [
                (self._while(first, last), held[F] - moved),
                (self._while(first, last, there.negated()), moved),
                (self._while(first, freed, there), moved),
                (self._while(taken, last, there), moved),
                (self._while(last, end(self.interval[W, *cell])), held[F] + held[I]),
            ]
        times, amounts = zip(*demands, strict=True)
        self.model.add_cumulative(times, amounts, int(arrays.limit[rank] - arrays.static[rank]))

    def _while(
        self, since: cp_model.LinearExprT, until: cp_model.LinearExprT, present: cp_model.LiteralT = True
    ) -> cp_model.IntervalVar:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_optional_interval_var(since, length, until, present, "")

    def _minimise(self) -> None:
        window = self.model.new_int_var(0, self.known, "")
        for (_, stage, _), last in self.interval.items():
            rank = self.problem.placement.rank_of[stage]
            first = self.problem.placement.stages_of[rank][0]
            opens = begin(self.interval[F, first, 0]) if self.problem.objective == "span" else 0
            if first == 0 or self.problem.objective == "makespan":
                self.model.add(window >= end(last) - opens)
                continue
            for j in range(self.problem.microbatches):
                self.model.add(window >= end(last) - begin(self.interval[F, first, j]))
        for stages in self.problem.placement.stages_of:
            work = sum(self.duration[letter][stage] for letter in (F, I, W) for stage in stages)
            self.model.add(window >= work * self.problem.microbatches)
        self.model.minimize(window)


def solved(model: cp_model.CpModel, effort: float) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """The solver after this deterministic time."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.presolve_inclusion_work_limit = 0  # wrong in OR-Tools 9.15, see its issue 5293
    solver.parameters.catch_sigint_signal = False  # else the next Ctrl-C kills the tests
    return solver, solver.solve(model)


def best_with_copies(problem: Problem, known: float, *, effort: float) -> tuple[float, bool]:
    """The best objective that CP-SAT finds, at most the one that is known, and whether no order is better."""
    solver, status = solved(_WithCopies(problem, math.floor(known)).model, effort)
    if status in (cp_model.MODEL_INVALID, cp_model.INFEASIBLE):
        raise RuntimeError("CP-SAT finds no order that is as good as the one that is known.")
    is_exact = status == cp_model.OPTIMAL
    return (solver.objective_value if status != cp_model.UNKNOWN else known), is_exact


class PassingOrder:
    """Orders in which microbatch ``one`` begins on the first stage of a rank before microbatch ``two``.

    Position z < S is F of stage z, and z >= S is I of stage 2S - 1 - z. Durations are whole numbers. There is
    no fused backward and no memory limit.
    """

    def __init__(self, problem: Problem, rank: int, one: int, two: int):
        self.problem, self.model = problem, cp_model.CpModel()
        arrays, stages = problem.arrays, problem.n_stages
        kinds = arrays.kind_of
        longest = int(2 * problem.microbatches * (arrays.duration[:3].sum() + arrays.latency.sum())) + 1
        self.one, self.two = one, two
        self.first = problem.placement.stages_of[rank][0]
        self.last = 2 * stages - 1 - self.first
        self.start: dict[tuple[int, int], cp_model.LinearExprT] = {}
        self.end: dict[tuple[int, int], cp_model.LinearExprT] = {}
        intervals = defaultdict(list)
        begin, end = (self.model.new_int_var(0, longest, name) for name in ("begin", "end"))
        for j in range(problem.microbatches):
            for at in range(3 * stages):  # the last third: W of stage at - 2S
                letter, stage = divmod(at, stages)
                stage = stages - 1 - stage if letter == 1 else stage
                length = int(arrays.duration[letter, stage, kinds[j]])
                start = self.model.new_int_var(0, longest, f"{at},{j}")
                host = int(arrays.rank_of[stage])
                intervals[host].append(self.model.new_fixed_size_interval_var(start, length, ""))
                self.start[at, j], self.end[at, j] = start, start + length
                if host == rank:
                    self.model.add(begin <= start)
                    self.model.add(end >= start + length)
            latency = arrays.latency[:, kinds[j]].astype(int).tolist()
            for at, wait in enumerate([*latency, 0, *latency[::-1]]):
                self.model.add(self.start[at + 1, j] >= self.end[at, j] + wait)
            for stage in range(stages):
                self.model.add(self.start[2 * stages + stage, j] >= self.end[2 * stages - 1 - stage, j])
        for each in intervals.values():
            self.model.add_no_overlap(each)
        self.model.minimize(end - begin)
        self._precedes(one, two, self.first)

    def shortest(self, case: Case, turns: Collection[int] = (), within: Collection[int] = ()) -> float | None:
        """The shortest window found, proved or not; None if no order is of this kind.

        Parameters
        ----------
        within
            The ``turns`` at which ``two`` comes between both actions of ``one``. Elsewhere it does not.
        """
        one, two = self.one, self.two
        if case == "leaves last":
            self._precedes(two, one, self.last)
        elif case == "overtakes":
            self._precedes(one, two, self.last)
            behind = []
            for at in range(self.first + 1, self.last):
                behind.append(self.model.new_bool_var(""))
                self.model.add(self.start[at, one] >= self.end[at, two]).only_enforce_if(behind[-1])
            self.model.add_bool_or(behind)
        else:
            for at in range(self.first, self.last + 1):
                self._precedes(one, two, at)
            for turn in turns:
                before, after = ((turn, two), (turn + 1, one))[:: 1 if turn in within else -1]
                self.model.add(self.start[after] >= self.end[before])
        solver, status = solved(self.model, effort=0.1)
        return solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    def _precedes(self, one: int, two: int, at: int) -> None:
        self.model.add(self.start[at, two] >= self.end[at, one])
