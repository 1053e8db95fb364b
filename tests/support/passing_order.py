"""The shortest window of a rank if two microbatches pass each other in a given way, by CP-SAT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Literal

from ortools.sat.python import cp_model
from zbv_solver.problem.problem import Problem

Case = Literal["leaves last", "overtakes", "leads"]
EFFORT = 0.1
"""CP-SAT's deterministic time."""


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
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = EFFORT
        solver.parameters.presolve_inclusion_work_limit = 0  # wrong in OR-Tools 9.15, see its issue 5293
        solver.parameters.catch_sigint_signal = False  # else the next Ctrl-C kills the tests
        status = solver.solve(self.model)
        return solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    def _precedes(self, one: int, two: int, at: int) -> None:
        self.model.add(self.start[at, two] >= self.end[at, one])
