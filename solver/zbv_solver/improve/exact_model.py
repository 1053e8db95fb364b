"""The exact CP-SAT model of a problem.

One constraint family is one short method; its docstring is the sentence it states. Microbatches of a stage
run in ascending order, which loses nothing: any order can be relabelled so, because microbatches are alike.

CP-SAT counts in integers. Durations and memory deltas that are not integers are rounded down to a fine
grid, which relaxes the model: its bounds stay valid, and the order it finds is timed with the true numbers
(and verified) afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from zbv_solver.orders import Orders
from zbv_solver.problem import B, F, I, Problem, W
from zbv_solver.timing import evaluate, span_start_times

GRID = 1 << 20
"""Steps that the largest number is divided into when no decimal scale makes all of them integers."""
LARGEST_INTEGER = 1 << 40
ROUNDING = 1e-9

Expression = cp_model.LinearExpr
Cell = tuple[int, int]
"""(stage, microbatch)"""


class ExactModel:
    """Variables and constraints for a problem, with an incumbent as upper bound and complete hint.

    Parameters
    ----------
    incumbent
        A verified order with microbatches ascending per stage and letter.
    lower_bound
        A proven bound of the objective, in the problem's unit.
    """

    def __init__(self, problem: Problem, incumbent: Orders, lower_bound: float):
        self.problem = problem
        self.model = cp_model.CpModel()
        arrays = problem.arrays
        self.scale = integer_scale([*arrays.duration.ravel(), *arrays.transfer])
        self.duration = self._on_grid(arrays.duration)
        self.transfer = self._on_grid(arrays.transfer)
        self.cells = [(s, j) for s in range(problem.n_stages) for j in range(problem.microbatches)]
        self._read_incumbent(incumbent)
        self._make_variables()
        self._order_microbatches()
        self._pass_microbatches_on()
        self._one_action_at_a_time()
        self._keep_memory()
        self._minimise(lower_bound)
        self._hint()

    def _on_grid(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.floor(values * self.scale + ROUNDING).astype(np.int64)

    def _read_incumbent(self, incumbent: Orders) -> None:
        problem = self.problem
        timing = evaluate(problem, incumbent)
        if problem.objective == "span":
            value, start = timing.span, span_start_times(problem, incumbent)
        else:
            value, start = timing.makespan, timing.start
        actions = zip(
            incumbent.letter.tolist(),
            incumbent.stage.tolist(),
            incumbent.microbatch.tolist(),
            start.tolist(),
            strict=True,
        )
        self.hint_start: dict[tuple[int, int, int], float] = {
            (letter, stage, j): time for letter, stage, j, time in actions
        }
        self.upper = math.ceil(value * self.scale - ROUNDING)
        # For a span, let rank 0's window begin at 0. Every other rank begins before that window ends, for
        # rank 0's last backward needs all forwards; so all windows end within twice the span.
        self.horizon = self.upper if problem.objective == "makespan" else 2 * self.upper

    def _make_variables(self) -> None:
        """Every cell has an F, then a backward (I, or B when fused), then a W unless it was fused."""
        model, horizon = self.model, self.horizon
        self.forward = {cell: model.new_int_var(0, horizon, f"F{cell}") for cell in self.cells}
        self.backward = {cell: model.new_int_var(0, horizon, f"I{cell}") for cell in self.cells}
        self.weight = {cell: model.new_int_var(0, horizon, f"W{cell}") for cell in self.cells}
        fusable = [cell for cell in self.cells if self._may_fuse(cell[0])]
        self.fused = {cell: model.new_bool_var(f"fused{cell}") for cell in fusable}
        self.fusable_end = {cell: model.new_int_var(0, horizon, f"Iend{cell}") for cell in fusable}
        self.fusable_cell_end = {cell: model.new_int_var(0, horizon, f"end{cell}") for cell in fusable}
        for cell in fusable:
            weight = int(self.duration[W, cell[0]])
            model.add(self.fusable_cell_end[cell] == self.weight[cell] + weight * self.fused[cell].negated())
            model.add(self.fusable_end[cell] == self.backward[cell] + self._backward_length(cell))
        for cell in self.cells:
            model.add(self.backward[cell] >= self.forward_end(cell))
            model.add(self.weight[cell] >= self.backward_end(cell))
            if cell in self.fused:
                model.add(self.weight[cell] == self.backward_end(cell)).only_enforce_if(self.fused[cell])

    def _may_fuse(self, stage: int) -> bool:
        """Whether B can pay on a stage: it is cheaper, or I would grow memory under a limit."""
        costs, memory = self.problem.costs, self.problem.memory
        cheaper = costs.fused(stage) < costs.backward_input[stage] + costs.backward_weight[stage]
        return cheaper or (memory.limit is not None and memory.backward_input[stage] > 0)

    def forward_end(self, cell: Cell) -> Expression:
        """End of F."""
        return self.forward[cell] + int(self.duration[F, cell[0]])

    def backward_end(self, cell: Cell) -> Expression:
        """End of I, or of B when fused."""
        if cell in self.fused:
            return self.fusable_end[cell]
        return self.backward[cell] + int(self.duration[I, cell[0]])

    def _backward_length(self, cell: Cell) -> Expression | int:
        """Duration of I, or of B when fused."""
        inputs, full = int(self.duration[I, cell[0]]), int(self.duration[B, cell[0]])
        return inputs + (full - inputs) * self.fused[cell] if cell in self.fused else inputs

    def cell_end(self, cell: Cell) -> Expression:
        """End of W, or of B when fused."""
        if cell in self.fused:
            return self.fusable_cell_end[cell]
        return self.weight[cell] + int(self.duration[W, cell[0]])

    def _order_microbatches(self) -> None:
        """Microbatches of a stage run in ascending order, letter by letter."""
        for stage, j in self.cells:
            if j == 0:
                continue
            cell, previous = (stage, j), (stage, j - 1)
            self.model.add(self.forward[cell] >= self.forward_end(previous))
            self.model.add(self.backward[cell] >= self.backward_end(previous))
            if cell not in self.fused:
                self.model.add(self.weight[cell] >= self.cell_end(previous))

    def _pass_microbatches_on(self) -> None:
        """An F needs the F below, a backward the backward above, and the transfer between them."""
        for stage, j in self.cells:
            if stage + 1 < self.problem.n_stages:
                above, lag = (stage + 1, j), int(self.transfer[stage])
                self.model.add(self.forward[above] >= self.forward_end((stage, j)) + lag)
                self.model.add(self.backward[stage, j] >= self.backward_end(above) + lag)

    def _one_action_at_a_time(self) -> None:
        """A rank runs one action at a time."""
        for stages in self.problem.placement.stages_of:
            cells = [(stage, j) for stage in stages for j in range(self.problem.microbatches)]
            self.model.add_no_overlap([interval for cell in cells for interval in self._intervals(cell)])

    def _intervals(self, cell: Cell) -> Iterable[cp_model.IntervalVar]:
        model, stage = self.model, cell[0]
        length = int(self.duration[W, stage])
        yield model.new_fixed_size_interval_var(self.forward[cell], int(self.duration[F, stage]), "")
        end = self.backward_end(cell)
        yield model.new_interval_var(self.backward[cell], self._backward_length(cell), end, "")
        if cell in self.fused:
            split = self.fused[cell].negated()
            yield model.new_optional_fixed_size_interval_var(self.weight[cell], length, split, "")
        else:
            yield model.new_fixed_size_interval_var(self.weight[cell], length, "")

    def _keep_memory(self) -> None:
        """What the cells of a rank hold at any time fits its limit.

        From the start of F a cell holds what its backward frees until that ends, and the rest until the
        cell ends; an I that grows memory holds the growth from its start.
        """
        memory = self.problem.memory
        if memory.limit is None:
            return
        for rank, stages in enumerate(self.problem.placement.stages_of):
            room = memory.limit[rank] - memory.static[rank]
            deltas = [memory.forward, memory.backward_input, memory.backward_weight]
            scale = integer_scale([abs(delta[stage]) for delta in deltas for stage in stages])
            intervals, demands = [], []
            for stage in stages:
                for j in range(self.problem.microbatches):
                    for amount, interval in self._holdings((stage, j)):
                        intervals.append(interval)
                        demands.append(math.floor(amount * scale + ROUNDING))
            capacity = math.floor(room * scale * (1 + ROUNDING) + ROUNDING)
            self.model.add_cumulative(intervals, demands, min(capacity, sum(demands)))

    def _holdings(self, cell: Cell) -> Iterable[tuple[float, cp_model.IntervalVar]]:
        memory, model, stage = self.problem.memory, self.model, cell[0]
        change = memory.backward_input[stage]
        freed, grown = max(0.0, -change), max(0.0, change)
        begin = self.forward[cell]
        if freed > 0:
            end = self.backward_end(cell)
            yield freed, model.new_interval_var(begin, self._span_var(), end, "")
        if memory.forward[stage] - freed > 0:
            end = self.cell_end(cell)
            yield memory.forward[stage] - freed, model.new_interval_var(begin, self._span_var(), end, "")
        if grown > 0:
            end, split = self.cell_end(cell), self.fused[cell].negated()
            yield (
                grown,
                model.new_optional_interval_var(self.backward[cell], self._span_var(), end, split, ""),
            )

    def _span_var(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _minimise(self, lower_bound: float) -> None:
        """Minimise the time from first start to last end: of every rank (span), or of all (makespan)."""
        model, problem = self.model, self.problem
        low = math.ceil(lower_bound * self.scale * (1 - ROUNDING) - ROUNDING) if self._is_exact() else 0
        self.origin = model.new_constant(0)
        self.objective = model.new_int_var(max(0, min(low, self.upper)), self.upper, "objective")
        for stages in problem.placement.stages_of:
            begin = self.forward[stages[0], 0] if problem.objective == "span" else self.origin
            for stage in stages:
                for j in range(problem.microbatches):
                    model.add(self.objective >= self.cell_end((stage, j)) - begin)
        model.minimize(self.objective)

    def _is_exact(self) -> bool:
        """Whether no duration was rounded."""
        arrays = self.problem.arrays
        exact = np.allclose(self.duration, arrays.duration * self.scale, rtol=0, atol=ROUNDING)
        return exact and np.allclose(self.transfer, arrays.transfer * self.scale, rtol=0, atol=ROUNDING)

    def bound_in_units(self, bound: float) -> float:
        """CP-SAT's bound on the objective in the problem's unit."""
        return math.ceil(bound - 1e-6) / self.scale

    def _hint(self) -> None:
        """Hint the incumbent, every variable of it."""
        for cell in self.cells:
            fused = (B, *cell) in self.hint_start
            letter = B if fused else I
            end = self._hinted(letter, cell) + int(self.duration[letter, cell[0]])
            self.model.add_hint(self.forward[cell], self._hinted(F, cell))
            self.model.add_hint(self.backward[cell], self._hinted(letter, cell))
            self.model.add_hint(self.weight[cell], end if fused else self._hinted(W, cell))
            if cell in self.fused:
                cell_end = end if fused else self._hinted(W, cell) + int(self.duration[W, cell[0]])
                self.model.add_hint(self.fused[cell], fused)
                self.model.add_hint(self.fusable_end[cell], end)
                self.model.add_hint(self.fusable_cell_end[cell], cell_end)
        self.model.add_hint(self.objective, self.upper)

    def _hinted(self, letter: int, cell: Cell) -> int:
        time = self.hint_start[letter, cell[0], cell[1]]
        return math.floor(time * self.scale + ROUNDING)

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """The order of the start times found."""
        ranks = []
        for stages in self.problem.placement.stages_of:
            timed: list[tuple[tuple[int, ...], tuple[int, int, int]]] = []
            for stage in stages:
                for j in range(self.problem.microbatches):
                    timed += self._timed_actions(solver, (stage, j))
            ranks.append([row for _, row in sorted(timed)])
        return Orders.pack(ranks)

    def _timed_actions(
        self, solver: cp_model.CpSolver, cell: Cell
    ) -> Iterable[tuple[tuple[int, ...], tuple[int, int, int]]]:
        """Actions of a cell with their sort keys: start, end, then along the V, then microbatch.

        Only actions of length zero share a start; along the V they follow precedence on all ranks alike.
        """
        stage, j = cell
        n = self.problem.n_stages
        fused = cell in self.fused and solver.boolean_value(self.fused[cell])
        letter = B if fused else I
        for kind, variable, along in (
            (F, self.forward[cell], stage),
            (letter, self.backward[cell], 2 * n - stage),
            (W, self.weight[cell], 3 * n),
        ):
            if kind != W or not fused:
                start = solver.value(variable)
                yield (start, start + int(self.duration[kind, stage]), along, j), (stage, kind, j)


def integer_scale(values: Iterable[float]) -> float:
    """A factor that makes all values integers, or puts the largest at ``GRID`` steps if none does."""
    numbers = [float(value) for value in values if value != 0]
    if not numbers:
        return 1.0
    largest = max(map(abs, numbers))
    for decimals in range(7):
        scaled = [value * 10.0**decimals for value in numbers]
        if largest * 10.0**decimals > LARGEST_INTEGER:
            break
        if all(abs(value - round(value)) <= ROUNDING for value in scaled):
            divisor = math.gcd(*(round(value) for value in scaled))
            return float(10.0**decimals / divisor)
    return GRID / largest
