"""CP-SAT for small problems with pairs or copies: one model of the order, of pairs, and of what is moved.

Annealing changes one rank at a time. In a small problem, often only a change on two ranks leads on, and there
are few enough orders for CP-SAT. If no number is rounded, it also proves bounds: Lemma 64. An order counts by
its true objective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from zbv_solver.bounds.directions import may_fuse
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.cp_sat import make_solver, stopped_when
from zbv_solver.improve.cp_search import ExactResult
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, OPTIMAL_GAP, STEP_ROUNDING, integer_scale
from zbv_solver.problem.problem import B, D, F, I, O, Problem, R, W
from zbv_solver.problem.stages import pair_duration
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

GRID = 1 << 20
"""The largest integer of a time or an amount of memory if they have no common unit."""

HARDER = 4
"""CP-SAT gets this many times the effort of single actions, to prove 2 ranks × 4 microbatches with pairs."""
MOST_CYCLES = 840
"""Steps are divided into at most so many: enough for spans of 8 ranks."""

Cell = tuple[int, int]
"""(stage, microbatch)"""
OUT, INTO = -1, -2
"""The copies themselves; D and R are the entries of a list that free and take memory."""
FREED, TAKEN, LEAVES, ALONE, SECOND, WAITS = range(6)
"""The order of entries at one time: an action begins after the entries of copies before it."""
Key = tuple[int, int, int]
"""(letter, stage, microbatch). The letter of a backward is I, though it may run as a B."""


def refine_entries(
    problem: Problem,
    incumbent: Orders,
    *,
    effort: float,
    seed: int = 0,
    cancelled: Callable[[], bool] | None = None,
) -> ExactResult:
    """Search the whole problem for a better order than the incumbent. All microbatches are equal.

    Parameters
    ----------
    effort
        That of a problem of as many single actions, in CP-SAT's deterministic time; this one takes
        :data:`HARDER` times as long.
    """
    value = objective_of(problem, incumbent)
    model = _Model(problem, value)
    solver = make_solver(HARDER * effort, seed)
    with stopped_when(cancelled, solver):
        status = solver.solve(model.model)
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"CP-SAT rejects the model: {model.model.validate()}")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        proved = status == cp_model.INFEASIBLE and model.admits_all
        return ExactResult(None, value if proved else 0.0, proved)
    orders = model.orders(solver)
    try:
        verify_orders(problem, orders)
    except InvalidPlan:  # rounded numbers misled CP-SAT
        return ExactResult(None, 0.0, False)
    found = objective_of(problem, orders)
    bound = min(found, solver.best_objective_bound / model.scale) if model.admits_all else 0.0
    return ExactResult(orders if found < value else None, bound, bound >= found * (1 - OPTIMAL_GAP))


class _Model:
    """Times of all actions, pairs and copies, and a literal for every two of a rank that says which is first.

    An action runs alone or in one of its pairs, and a backward is an I or a B. There are no intervals: with
    optional ones, OR-Tools 9.15 reports optima that are none.
    """

    def __init__(self, problem: Problem, value: float):
        self.problem, self.model = problem, cp_model.CpModel()
        arrays, copies = problem.arrays, problem.copies
        moving = () if copies is None else (*copies.offload, *copies.reload)
        times = [*arrays.duration.ravel(), *arrays.latency.ravel(), *self._together().values(), *moving]
        exact = integer_scale(times, GRID)
        # A span is a multiple of a step divided by the number of ranks in a cycle, as for cp_sat's grid.
        cycles = math.lcm(*range(1, problem.pp_degree + 1)) if problem.objective == "span" else 1
        self.scale = min(cycles, MOST_CYCLES) * (GRID / max(times) if exact is None else exact)
        least = min(*arrays.duration.ravel(), *moving)
        self.admits_all = exact is not None and cycles <= MOST_CYCLES and least > 0
        self.duration = self._steps(arrays.duration[:, :, 0])
        self.most = max(1, math.ceil(value * self.scale) - 1)
        self.horizon = 2 * self.most  # Lemma 26
        self.cells = list(product(range(problem.n_stages), range(problem.microbatches)))
        self.start: dict[Key, cp_model.IntVar] = {}
        self.end: dict[Key, cp_model.IntVar] = {}
        self.modes: defaultdict[Key, list[cp_model.IntVar]] = defaultdict(list)
        self.before: dict[tuple[Key, Key], cp_model.IntVar] = {}
        self.fused: dict[Cell, cp_model.IntVar] = {}
        self.pairs: dict[tuple[Cell, Cell, int], cp_model.IntVar] = {}
        self.copied: dict[Cell, cp_model.IntVar] = {}
        self._run_alone()
        self._run_in_pairs()
        for modes in self.modes.values():
            self.model.add_exactly_one(modes)
        self._pass_on()
        self._one_at_a_time()
        self._copy()
        if problem.memory.limit is not None:
            for rank in range(problem.pp_degree):
                self._keep_memory(rank)
        self._minimise()

    def _steps(self, times: NDArray[np.float64]) -> list[list[int]]:
        """Times as integers. No action takes no time, because then starts would not say their order."""
        found: list[list[int]] = np.maximum(1, np.rint(times * self.scale)).astype(int).tolist()
        return found

    def _literal(self) -> cp_model.IntVar:
        return self.model.new_bool_var("")

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _fusable(self) -> list[bool]:
        """Stages where B can pay, alone or in a pair."""
        may, together = may_fuse(self.problem).tolist(), self._together()
        weights = self.problem.arrays.duration[W, :, 0].tolist()
        for one, two, letter in together:
            if letter == B:
                may[two] |= together[one, two, B] < together[one, two, I] + weights[two]
        return [bool(stage) for stage in may]

    def _together(self) -> dict[Key, float]:
        """The time of every pair: of the stage of its F, and the stage and letter of its backward."""
        arrays, hidden = self.problem.arrays, self.problem.arrays.communication
        if hidden is None:
            return {}
        times, shared = arrays.duration[:, :, 0], hidden[:, :, 0]
        return {
            (one, two, letter): float(
                pair_duration(
                    times[F, one],
                    times[letter, two],
                    (shared[F, one], shared[letter, two]),
                    self.problem.pair_factor,
                )
            )
            for stages in self.problem.placement.stages_of
            for one, two, letter in product(stages, stages, (I, B))
        }

    def _run_alone(self) -> None:
        """F's, backwards and W's; a backward may be a B, and then its W takes no time at its end."""
        may = self._fusable()
        for cell in self.cells:
            for letter in (F, I, W):
                self.start[letter, *cell], self.end[letter, *cell] = self._time(), self._time()
                self._mode([(letter, *cell)], self.duration[letter][cell[0]])
            if may[cell[0]]:
                fused = self.fused[cell] = self._literal()
                self.model.add_implication(fused, self.modes[I, *cell][0].negated())
                alone = self._mode([(I, *cell)], self.duration[B][cell[0]])
                at_once = self._mode([(W, *cell)], 0)
                self.model.add_implication(alone, fused)
                self.model.add(at_once == fused)
                self.model.add(self.end[W, *cell] == self.end[I, *cell]).only_enforce_if(fused)

    def _mode(self, actions: list[Key], length: int) -> cp_model.IntVar:
        """A way to run an action alone, or two together."""
        present, last = self._literal(), actions[-1]
        self.model.add(self.end[last] == self.start[last] + length).only_enforce_if(present)
        for action in actions[:-1]:
            self.model.add(self.start[action] == self.start[last]).only_enforce_if(present)
            self.model.add(self.end[action] == self.end[last]).only_enforce_if(present)
        for action in actions:
            self.modes[action].append(present)
        return present

    def _run_in_pairs(self) -> None:
        """An F may run with the backward of another microbatch on its rank."""
        for (stage, of_backward, letter), time in self._together().items():
            ((length,),) = self._steps(np.array([[time]]))
            for j, k in permutations(range(self.problem.microbatches), 2):
                one, two = (stage, j), (of_backward, k)
                fused = self.fused.get(two)
                if fused is None and letter == B:
                    continue
                pair = self.pairs[one, two, letter] = self._mode([(F, *one), (I, *two)], length)
                if fused is not None:
                    self.model.add_implication(pair, fused if letter == B else fused.negated())

    def _pass_on(self) -> None:
        """An F needs the F below, a backward the one above and its F, a W its I; transfers take time."""
        lags = np.rint(self.problem.arrays.latency[:, 0] * self.scale).astype(int).tolist()
        for stage, j in self.cells:
            self.model.add(self.start[I, stage, j] >= self.end[F, stage, j])
            self.model.add(self.start[W, stage, j] >= self.end[I, stage, j])
            if stage:
                lag = lags[stage - 1]
                self.model.add(self.start[F, stage, j] >= self.end[F, stage - 1, j] + lag)
                self.model.add(self.start[I, stage - 1, j] >= self.end[I, stage, j] + lag)
            if j:
                self._ascend(stage, j)

    def _ascend(self, stage: int, j: int) -> None:
        """Microbatches run in ascending order; with copies, only those of stage 0's F."""
        letters: tuple[int, ...] = (F, I) if (stage, j) in self.fused else (F, I, W)
        if self.problem.copies is not None:
            letters = (F,) if stage == 0 else ()
        for letter in letters:
            self.model.add(self.start[letter, stage, j] >= self.end[letter, stage, j - 1])

    def _is_first(self, first: Key, second: Key) -> cp_model.IntVar:
        """If true, the first has ended when the second starts."""
        if (first, second) not in self.before:
            literal = self.before[first, second] = self._literal()
            self.model.add(self.end[first] <= self.start[second]).only_enforce_if(literal)
        return self.before[first, second]

    def _on(self, rank: int) -> list[Cell]:
        return [cell for cell in self.cells if self.problem.placement.rank_of[cell[0]] == rank]

    def _one_at_a_time(self) -> None:
        """Of two actions of a rank, one comes first, or they are a pair."""
        together: defaultdict[tuple[Key, Key], list[cp_model.IntVar]] = defaultdict(list)
        for (one, two, _), pair in self.pairs.items():
            together[(F, *one), (I, *two)].append(pair)
        for rank in range(self.problem.pp_degree):
            actions: list[Key] = [(letter, *cell) for letter in (F, I, W) for cell in self._on(rank)]
            for both in combinations(actions, 2):
                either = [self._is_first(*both), self._is_first(*both[::-1])]
                self.model.add_exactly_one([*either, *together[both]])

    def _copy(self) -> None:
        """What an F keeps may leave before its backward and come back; engines run one copy at a time.

        Memory is freed (D) and taken (R) between two actions, because these are entries of the rank's list.
        """
        copies = self.problem.copies
        if copies is None:
            return
        for cell in self.cells:
            stage = cell[0]
            if copies.offloadable[stage] <= 0:
                continue
            there = self.copied[cell] = self._literal()
            ((away, back),) = self._steps(np.array([[copies.offload[stage], copies.reload[stage]]]))
            out, freed, taken, into = ((kind, *cell) for kind in (OUT, D, R, INTO))
            for key, length in ((out, away), (freed, 0), (taken, 0), (into, back)):
                self.start[key] = self._time()
                self.end[key] = self._time()
                self.model.add(self.end[key] == self.start[key] + length)
            for earlier, later in pairwise(((F, *cell), out, freed, taken, into, (I, *cell))):
                self.model.add(self.start[later] >= self.end[earlier]).only_enforce_if(there)
        for rank in range(self.problem.pp_degree):
            mine = [cell for cell in self._on(rank) if cell in self.copied]
            number = {cell: self.model.new_int_var(0, len(mine), "") for cell in mine}
            for cell, kind in product(mine, (D, R)):
                for letter, other in product((F, I, W), self._on(rank)):
                    self._apart((kind, *cell), (letter, *other), [self.copied[cell]])
            for one, two in combinations(mine, 2):
                for kind in (OUT, INTO):
                    self._apart((kind, *one), (kind, *two), [self.copied[one], self.copied[two]])
                # Some may take memory at the same moment. The second then needs room for both.
                for first, second in ((one, two), (two, one)):
                    is_first = self._is_first((R, *first), (R, *second))
                    self.model.add(number[second] >= number[first] + 1).only_enforce_if(is_first)

    def _apart(self, one: Key, two: Key, condition: list[cp_model.IntVar]) -> None:
        either = [self._is_first(one, two), self._is_first(two, one)]
        self.model.add_bool_or(either).only_enforce_if(*condition)

    def _keep_memory(self, rank: int) -> None:
        """Whenever something allocates, what its rank holds fits the limit.

        Amounts are rounded down, so that no order is lost; the verifier sees the true ones. An order that
        needs too much memory of the host does not count either.
        """
        arrays, copies = self.problem.arrays, self.problem.copies
        held, grown = (arrays.delta[letter, :, 0] for letter in (F, I))
        moved = np.zeros(self.problem.n_stages) if copies is None else np.array(copies.offloadable)
        exact = integer_scale([*held, *grown, *moved], GRID)
        if exact is None and copies is not None:
            self.admits_all = False  # the memory that a copy frees is rounded, too
        scale = GRID / max(*np.abs(held), *np.abs(grown), 1e-300) if exact is None else exact
        parts = [np.floor(of * scale + STEP_ROUNDING).astype(int).tolist() for of in (held, grown, moved)]
        mine = self._on(rank)
        limit = float(arrays.limit[rank] * (1 + 2 * MEMORY_TOLERANCE) - arrays.static[rank]) * scale
        room = math.floor(min(limit, 2.0 * sum(abs(part[stage]) for part in parts for stage, _ in mine)))
        for cell in mine:
            of_forward, of_input, of_copy = (part[cell[0]] for part in parts)
            allocating: list[tuple[Key, int, cp_model.LiteralT]] = [((F, *cell), of_forward, False)]
            if of_input > 0:
                allocating.append(((I, *cell), of_input, self.fused.get(cell, False)))
            if cell in self.copied:
                allocating.append(((R, *cell), of_copy, self.copied[cell].negated()))
            for event, amount, unless in allocating:
                terms = [term for other in mine for term in self._held(other, event, parts)]
                does = self._unless(unless)
                self.model.add(sum(terms) <= room - amount).only_enforce_if(does)

    def _held(self, cell: Cell, event: Key, parts: list[list[int]]) -> Iterator[cp_model.LinearExprT]:
        """What a cell holds when something allocates, without what that allocates itself."""
        of_forward, of_input, of_copy = (part[cell[0]] for part in parts)
        forward, inputs, weight, freed, taken = ((letter, *cell) for letter in (F, I, W, D, R))
        if event == forward:
            return
        yield of_forward * (1 - self._is_first(event, forward))
        if of_input <= 0:  # the W of a fused cell ends with its B
            yield of_input * self._is_first(inputs, event)
        elif event != inputs:
            fused = [self.fused[cell]] if cell in self.fused else []
            begun = self._unless(*fused, self._is_first(event, inputs))
            self.model.add_implication(self._is_first(weight, event), begun)
            yield of_input * begun
        yield -(of_forward + of_input) * self._is_first(weight, event)
        if cell in self.copied:
            there = self.copied[cell]
            away = self._literal()
            self.model.add_implication(away, there)
            self.model.add_implication(away, self._is_first(freed, event))
            yield -of_copy * away
            if event != taken:
                yield of_copy * self._unless(there.negated(), self._is_first(event, taken))

    def _unless(self, *others: cp_model.LiteralT) -> cp_model.IntVar:
        """A literal that is true if none of the others is."""
        literal = self._literal()
        self.model.add_bool_or([literal, *others])
        return literal

    def _minimise(self) -> None:
        """The time from the first start to the last end, of every rank (span) or of all."""
        objective = self.model.new_int_var(0, self.most, "")
        is_span = self.problem.objective == "span"
        for stages in self.problem.placement.stages_of:
            for stage, j in product(stages, range(self.problem.microbatches)):
                starts = [self.start[F, stages[0], k] for k in range(self.problem.microbatches)]
                for late in (self.end[I, stage, j], self.end[W, stage, j]):
                    for begin in starts if is_span else [0]:
                        self.model.add(objective >= late - begin)
        self.model.minimize(objective)

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """The order of a solution, with its pairs and copies."""
        rows: list[list[tuple[int, ...]]] = [[] for _ in self.problem.placement.stages_of]
        partner = {two: one for (one, two, _), pair in self.pairs.items() if solver.value(pair)}
        paired = set(partner.values())
        for cell in self.cells:
            stage, j = cell
            mine = rows[self.problem.placement.rank_of[stage]]
            is_fused = cell in self.fused and solver.value(self.fused[cell])
            at = {letter: solver.value(self.start[letter, *cell]) for letter in (F, I, W)}
            if cell not in paired:
                mine.append((at[F], ALONE, 0, stage, F, j, 0))
            if cell in partner:
                other = partner[cell]
                mine.append((at[I], ALONE, 0, other[0], F, other[1], 1))
            mine.append((at[I], SECOND, 0, stage, B if is_fused else I, j, 0))
            if not is_fused:
                mine.append((at[W], ALONE, 0, stage, W, j, 0))
            if cell in self.copied and solver.value(self.copied[cell]):
                mine.append((*self._leaves(solver, cell), stage, O, j, 0))
                for letter in (D, R):
                    moment = solver.value(self.start[letter, *cell])
                    mine.append((moment, FREED if letter == D else TAKEN, 0, stage, letter, j, 0))
        ordered = [np.array([row[3:] for row in sorted(mine)], np.int32) for mine in rows]
        begins = np.concatenate([each[:, 3] for each in ordered]).astype(np.bool_)
        orders = Orders.of_entries([each[:, :3] for each in ordered], begins)
        return orders if begins.any() else replace(orders, paired=None)

    def _leaves(self, solver: cp_model.CpSolver, cell: Cell) -> tuple[int, int, int]:
        """Where the entry of a copy out is: before the action that runs when it starts, or in a wait."""
        time = solver.value(self.start[OUT, *cell])
        last, begin = (F, *cell), solver.value(self.start[F, *cell])
        for letter, other in product((F, I, W), self._on(self.problem.placement.rank_of[cell[0]])):
            start = solver.value(self.start[letter, *other])
            if begin < start <= time:
                last, begin = (letter, *other), start
        return begin, LEAVES if solver.value(self.end[last]) > time else WAITS, time
