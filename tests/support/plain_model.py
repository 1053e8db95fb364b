"""The problem as an obvious CP-SAT model: no implied constraint, no bound, memory as intervals.

Slow, and independent of the solver's deductions. It shares with the solver only the integers for costs
and the ascending order of microbatches, which other tests check.
"""

from __future__ import annotations

from itertools import product

from ortools.sat.python import cp_model
from zbv_solver.improve.cp_sat import Grid, make_grid
from zbv_solver.problem.problem import B, F, I, Problem, W

Cell = tuple[int, int]


def optimum(problem: Problem, reached: float, effort: float = 20.0) -> float:
    """The least objective of all orders, one of which reaches ``reached``; memory must be integers."""
    grid = make_grid(problem)
    plain = _Plain(problem, grid, grid.strictly_below(reached) + grid.parts)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else the next Ctrl-C kills the tests
    solver.parameters.linearization_level = 0
    solver.parameters.max_deterministic_time = effort
    if solver.solve(plain.model) != cp_model.OPTIMAL:
        raise RuntimeError("the plain model is too slow for this problem")
    return int(solver.objective_value) // plain.grid.parts / plain.grid.steps


class _Plain:
    """Every cell runs its F, then either I and W or B."""

    def __init__(self, problem: Problem, grid: Grid, most: int):
        self.problem, self.grid, self.model = problem, grid, cp_model.CpModel()
        self.duration: list[list[int]] = grid.problem.arrays.of_equal().duration.astype(int).tolist()
        self.cells = list(product(range(problem.n_stages), range(problem.microbatches)))
        lags = grid.problem.arrays.of_equal().latency.astype(int).tolist()
        self.most, self.horizon = most, 2 * most
        self.start = {(letter, *cell): self.time() for letter, cell in product((F, I, W, B), self.cells)}
        self.fused = {cell: self.model.new_bool_var("") for cell in self.cells}
        self.backward_end = {cell: self.time() for cell in self.cells}
        self.cell_end = {cell: self.time() for cell in self.cells}
        for cell in self.cells:
            self.run(cell)
            stage, j = cell
            if stage + 1 < problem.n_stages:
                above, lag = (stage + 1, j), lags[stage]
                self.model.add(self.start[F, *above] >= self.end(F, cell) + lag)
                self.model.add(self.start[I, *cell] >= self.backward_end[above] + lag)
                self.model.add(self.start[B, *cell] >= self.backward_end[above] + lag)
            if j > 0:
                self.model.add(self.start[F, *cell] >= self.end(F, (stage, j - 1)))
                self.model.add(self.backward_end[cell] >= self.backward_end[stage, j - 1])
        self.model.add(self.start[F, 0, 0] == 0)
        for rank in range(problem.pp_degree):
            self.one_at_a_time(rank)
            self.keep_memory(rank)
        self.minimise()

    def time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def end(self, letter: int, cell: Cell) -> cp_model.LinearExpr:
        return self.start[letter, *cell] + self.duration[letter][cell[0]]

    def run(self, cell: Cell) -> None:
        model, fused, split = self.model, self.fused[cell], self.fused[cell].negated()
        model.add(self.start[I, *cell] >= self.end(F, cell))
        model.add(self.start[B, *cell] >= self.end(F, cell))
        model.add(self.start[W, *cell] >= self.end(I, cell))
        model.add(self.backward_end[cell] == self.end(I, cell)).only_enforce_if(split)
        model.add(self.cell_end[cell] == self.end(W, cell)).only_enforce_if(split)
        model.add(self.backward_end[cell] == self.end(B, cell)).only_enforce_if(fused)
        model.add(self.cell_end[cell] == self.end(B, cell)).only_enforce_if(fused)

    def cells_of(self, rank: int) -> list[Cell]:
        return list(product(self.problem.placement.stages_of[rank], range(self.problem.microbatches)))

    def one_at_a_time(self, rank: int) -> None:
        model, intervals = self.model, []
        for cell in self.cells_of(rank):
            split = self.fused[cell].negated()
            for letter, active in ((F, True), (I, split), (W, split), (B, self.fused[cell])):
                start, length = self.start[letter, *cell], self.duration[letter][cell[0]]
                intervals.append(model.new_optional_fixed_size_interval_var(start, length, active, ""))
        model.add_no_overlap(intervals)

    def keep_memory(self, rank: int) -> None:
        memory, model = self.problem.memory, self.model
        if memory.limit is None:
            return
        intervals, amounts = [], []
        for cell in self.cells_of(rank):
            change = int(memory.backward_input[cell[0]])
            freed = max(0, -change)
            begin, split = self.start[F, *cell], self.fused[cell].negated()
            for amount, since, until, active in (
                (freed, begin, self.backward_end[cell], True),
                (int(memory.forward[cell[0]]) - freed, begin, self.cell_end[cell], True),
                (max(0, change), self.start[I, *cell], self.cell_end[cell], split),
            ):
                intervals.append(model.new_optional_interval_var(since, self.time(), until, active, ""))
                amounts.append(amount)
        model.add_cumulative(intervals, amounts, int(memory.limit[rank] - memory.static[rank]))

    def minimise(self) -> None:
        objective = self.model.new_int_var(0, self.most, "")
        for rank in range(self.problem.pp_degree):
            cells = self.cells_of(rank)
            first = self.time()
            for cell in cells:
                self.model.add(first <= self.start[F, *cell])
                self.model.add(objective >= self.cell_end[cell] - first)
            if self.problem.objective == "makespan":
                self.model.add(first == 0)
        self.model.minimize(objective)
