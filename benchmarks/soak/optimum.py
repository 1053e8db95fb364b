"""The best order of a small problem, by enumerating all orders or with an independent CP-SAT model.

Only the solver is the same as in :mod:`zbv_solver.improve.cp_model`. This model has a pair of literals for
every two actions of a rank, B as a separate optional action, positions that keep actions without duration
acyclic, and memory as a sum over preceding actions. With copies, D and R are optional actions without
duration, and every copy has a start, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import gcd, lcm, prod

from ortools.sat.python import cp_model

from benchmarks.soak.pipeline import Action, B, D, F, I, O, Order, Pairs, Pipeline, R, W

MOST_ENUMERATED = 4_000
"""Most orders to enumerate; with more orders, CP-SAT solves the problem."""
GRID_BITS = 46
"""Sum of all durations in CP-SAT's grid if they must be rounded."""
EFFORT = 0.5
"""CP-SAT's deterministic time."""
NEARLY = Fraction(1, 10**10)
"""Relative error that the rounding of durations may cause."""


@dataclass(frozen=True)
class Optimum:
    """The best order found, with its exact objective."""

    value: Fraction
    """Its objective in the problem's unit of time."""
    order: Order
    is_exact: bool
    """Whether no order is better by more than the share ``NEARLY``."""
    method: str
    pairs: Pairs = frozenset()


def optimum(pipeline: Pipeline, *, effort: float = EFFORT, with_presolve: bool = True) -> Optimum:
    """Return the best order that the effort finds, for a feasible problem."""
    return enumerated(pipeline) or solved(pipeline, effort=effort, with_presolve=with_presolve)


def enumerated(pipeline: Pipeline) -> Optimum | None:
    """Return the best of all orders, with microbatches in any order; None if there are too many or copies."""
    ranks = []
    if pipeline.has_copies:
        return None
    for rank in range(pipeline.pp_degree):
        orders = []
        for order in _orders_of_rank(pipeline, rank):
            orders.append(order)
            if len(orders) > MOST_ENUMERATED:
                return None
        ranks.append(orders)
        if prod(map(len, ranks)) > MOST_ENUMERATED:
            return None
    best: Optimum | None = None
    for choice in product(*ranks):
        for pairs in _pairings(pipeline, choice):
            value = pipeline.value(choice, pairs)
            if value is not None and (best is None or value < best.value):
                best = Optimum(value, choice, True, "enumerated", pairs)
    return best


def _pairings(pipeline: Pipeline, order: Order) -> Iterator[Pairs]:
    """Every choice of F's that run with the backward after them."""
    may = [
        one
        for actions in (order if pipeline.hidden else ())
        for one, two in pairwise(actions)
        if one[0] == F and two[0] in (I, B) and one[2] != two[2]
    ]
    return (frozenset(some) for count in range(len(may) + 1) for some in combinations(may, count))


def _orders_of_rank(pipeline: Pipeline, rank: int) -> Iterator[tuple[Action, ...]]:
    """Yield every order of a rank that fits its memory.

    If all microbatches are equal, rank 0 runs stage 0 in ascending order.
    """
    m, stages = pipeline.microbatches, pipeline.stages_of[rank]
    limit = None if pipeline.limit is None else pipeline.limit[rank]
    is_equal = pipeline.is_equal
    order: list[Action] = []
    state = {(stage, j): 0 for stage in stages for j in range(m)}  # 0, 1 after F, 2 after I, 3 done

    def extend(held: int) -> Iterator[tuple[Action, ...]]:
        if all(progress == 3 for progress in state.values()):
            yield tuple(order)
            return
        for (stage, j), progress in list(state.items()):
            if is_equal and progress == 0 and stage == 0 and j and state[0, j - 1] == 0:
                continue
            for letter in ((F,), (I, B), (W,), ())[progress]:
                delta = pipeline.delta[letter][stage][j]
                if limit is not None and held + max(0, delta) > limit:
                    continue
                state[stage, j] = (1, 2, 3, 3)[letter]
                order.append((letter, stage, j))
                yield from extend(held + delta)
                order.pop()
                state[stage, j] = progress

    yield from extend(pipeline.static[rank])


def one_at_a_time(pipeline: Pipeline) -> Order:
    """One microbatch at a time: forward through all stages, then backward.

    Uses B where it may pay, because I might not fit there.
    """
    ranks: list[list[Action]] = [[] for _ in pipeline.stages_of]
    for j in range(pipeline.microbatches):
        for stage, rank in enumerate(pipeline.rank_of):
            ranks[rank].append((F, stage, j))
        for stage in reversed(range(pipeline.n_stages)):
            backward = (B,) if pipeline.may_fuse(stage) else (I, W)
            ranks[pipeline.rank_of[stage]] += [(letter, stage, j) for letter in backward]
    return tuple(map(tuple, ranks))


def solved(pipeline: Pipeline, *, effort: float = EFFORT, with_presolve: bool = True) -> Optimum:
    """Return the best order that CP-SAT finds; equal microbatches of a stage run in ascending order."""
    simple = one_at_a_time(pipeline)
    model = _Model(pipeline)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.cp_model_presolve = with_presolve
    solver.parameters.presolve_inclusion_work_limit = 0  # wrong in OR-Tools 9.15, see its issue 5293
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model.model)
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"CP-SAT rejects the model: {model.model.validate()}")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        value = pipeline.value(simple)
        if value is None:
            raise RuntimeError("one microbatch at a time deadlocks in the independent model.")
        return Optimum(value, simple, False, "one at a time")
    order, pairs = model.order(solver), model.pairs(solver)
    value = pipeline.value(order, pairs)
    if value is None or not all(pipeline.fits(rank, actions) for rank, actions in enumerate(order)):
        raise RuntimeError("the independent model found an order that breaks its own rules.")
    proven = model.unit * max(0, round(solver.best_objective_bound))
    is_exact = status == cp_model.OPTIMAL and model.admits_all and value <= proven * (1 + NEARLY)
    return Optimum(value, order, is_exact, "cp-sat", pairs)


class _Model:
    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.model = pipeline, cp_model.CpModel()
        # With copies, microbatches may pass each other, so only the F's of stage 0 ascend.
        self.is_equal = pipeline.is_equal and not pipeline.has_copies
        self._round_durations()
        self.actions = [
            [
                (letter, stage, j)
                for stage in stages
                for letter in (F, I, W, B, *((D, R) if pipeline.has_copies else ()))
                for j in range(pipeline.microbatches)
                if letter != B or pipeline.may_fuse(stage)
            ]
            for stages in pipeline.stages_of
        ]
        everything = [action for mine in self.actions for action in mine]
        self.start = {action: self.model.new_int_var(0, self.horizon, "") for action in everything}
        # Actions without duration may start at the same time; positions keep the order acyclic.
        self.position = {action: self.model.new_int_var(0, len(everything), "") for action in everything}
        self.one = self.model.new_constant(1)
        self.present = dict.fromkeys(everything, self.one)
        self.end = {action: self.start[action] + self._length(action) for action in everything}
        self.pair: dict[tuple[Action, Action], cp_model.IntVar] = {}
        self._choose_backwards()
        for mine in self.actions if pipeline.hidden else ():
            self._choose_pairs(mine)
        self._pass_on()
        self.before: dict[tuple[Action, Action], cp_model.IntVar] = {}
        self.copy: dict[Action, cp_model.IntVar] = {}
        for rank in range(pipeline.pp_degree):
            self._order(rank)
            self._copy(rank)
            self._keep_memory(rank)
        self._minimise()

    def _round_durations(self) -> None:
        """Durations in a grid. A span is the mean of a cycle, so the step is divided by all cycle lengths."""
        pipeline = self.pipeline
        tables = (*pipeline.duration, pipeline.lag)
        total = sum(value for table in tables for row in table for value in row) or 1
        shift = max(0, total.bit_length() - GRID_BITS)
        divisor = max(1 << shift, gcd(*(value for table in tables for row in table for value in row)))
        cycles = lcm(*range(1, pipeline.pp_degree + 1)) if pipeline.objective == "span" else 1
        self.unit = divisor * pipeline.time_unit / cycles

        self.step, self.divisor = cycles, divisor

        def rounded(table: tuple[tuple[int, ...], ...]) -> list[list[int]]:
            return [[value // divisor * cycles for value in row] for row in table]

        self.duration = [rounded(table) for table in pipeline.duration]
        self.lag = rounded(pipeline.lag)
        # A serial order takes the sum of all actions plus every transfer twice.
        self.longest = (total // divisor + 1) * 2 * cycles
        self.horizon = 3 * self.longest
        self.admits_all = True

    def _length(self, action: Action) -> int:
        return 0 if action[0] in (D, R) else self.duration[action[0]][action[1]][action[2]]

    def _choose_pairs(self, mine: list[Action]) -> None:
        """An F may start and end together with the I or B of another microbatch."""
        of = {action: list[cp_model.IntVar]() for action in mine if action[0] in (F, I, B)}
        ends = {action: self.model.new_int_var(0, self.horizon, "") for action in of}
        for both in product(mine, mine):
            if both[0][0] == F and both[1][0] in (I, B) and both[0][2] != both[1][2]:
                pair = self.pair[both] = self.model.new_bool_var("")
                self.model.add_implication(pair, self.present[both[1]])
                self.model.add(self.start[both[0]] == self.start[both[1]]).only_enforce_if(pair)
                for half in both:
                    end = self.start[half] + self.pipeline.together(*both) * self.step // self.divisor
                    self.model.add(ends[half] == end).only_enforce_if(pair)
                    of[half].append(pair)
        for action, pairs in of.items():
            alone = self.model.new_bool_var("")
            self.model.add_exactly_one([alone, *pairs])
            self.model.add(ends[action] == self.end[action]).only_enforce_if(alone)
        self.end |= ends

    def _choose_backwards(self) -> None:
        for action in list(self.start):
            if action[0] == B:
                fused = self.model.new_bool_var("")
                self.present[action] = fused
                split = self.model.new_bool_var("")
                self.model.add(fused + split == 1)
                self.present[I, *action[1:]] = self.present[W, *action[1:]] = split
            if action[0] == D:
                self.present[action] = self.present[R, *action[1:]] = self.model.new_bool_var("")

    def _after(self, second: Action, first: Action, lag: int = 0) -> None:
        """If both actions are present, the second starts after the end of the first."""
        both = [self.present[first], self.present[second]]
        self.model.add(self.start[second] >= self.end[first] + lag).only_enforce_if(both)
        self.model.add(self.position[second] >= self.position[first] + 1).only_enforce_if(both)

    def _backwards(self, stage: int, j: int) -> list[Action]:
        return [action for action in ((I, stage, j), (B, stage, j)) if action in self.start]

    def _pass_on(self) -> None:
        for stage in range(self.pipeline.n_stages):
            for j in range(self.pipeline.microbatches):
                self._after((W, stage, j), (I, stage, j))
                for backward in self._backwards(stage, j):
                    self._after(backward, (F, stage, j))
                if stage + 1 < self.pipeline.n_stages:
                    self._after((F, stage + 1, j), (F, stage, j), self.lag[stage][j])
                    for backward in self._backwards(stage, j):
                        for above in self._backwards(stage + 1, j):
                            self._after(backward, above, self.lag[stage][j])

    def _order(self, rank: int) -> None:
        """If two actions are present, one comes before the other."""
        model, actions, position = self.model, self.actions[rank], self.position
        for at, one in enumerate(actions):
            for two in actions[at + 1 :]:
                both = [self.present[one], self.present[two]]
                for first, second in ((one, two), (two, one)):
                    literal = self.before[first, second] = model.new_bool_var("")
                    unless = [self.pair[first, second].negated()] if (first, second) in self.pair else []
                    model.add(self.start[second] >= self.end[first]).only_enforce_if(literal, *unless)
                    for pair in unless:
                        model.add_implication(pair.negated(), literal)
                    model.add(position[second] >= position[first] + 1).only_enforce_if(literal)
                    model.add_implication(literal, both[0])
                    model.add_implication(literal, both[1])
                either = self.before[one, two] + self.before[two, one]
                model.add(either == 1).only_enforce_if(both)
                self._known(one, two)

    def _copy(self, rank: int) -> None:
        """Copies run between F and D, and between R and the backward, one at a time on each engine."""
        cells = [action[1:] for action in self.actions[rank] if action[0] == D]
        for letter, (stage, j) in product((O, R), cells):
            copy = self.copy[letter, stage, j] = self.model.new_int_var(0, self.horizon, "")
            there = self.present[D, stage, j]
            begins = self.end[F if letter == O else R, stage, j]
            self.model.add(copy >= begins).only_enforce_if(there)
            for action in [(D, stage, j)] if letter == O else self._backwards(stage, j):
                ends = self.model.add(self.start[action] >= copy + self.duration[letter][stage][j])
                ends.only_enforce_if(there, self.present[action])
        for letter, (one, two) in product((O, R), combinations(cells, 2)):
            first = self.model.new_bool_var("")
            for literal, a, b in ((first, one, two), (first.negated(), two, one)):
                ends = self.copy[letter, *a] + self.duration[letter][a[0]][a[1]]
                later = self.model.add(self.copy[letter, *b] >= ends)
                later.only_enforce_if(literal, self.present[D, *one], self.present[D, *two])
                if letter == R:  # in the order of the list
                    self.model.add_implication(self.before[(R, *a), (R, *b)], literal)
        for stage, j in cells:
            self._after((D, stage, j), (F, stage, j))
            self._after((R, stage, j), (D, stage, j))
            for backward in self._backwards(stage, j):
                self._after(backward, (R, stage, j))

    def _known(self, one: Action, two: Action) -> None:
        """Equal microbatches ascend; within a cell, F comes before I or B, and I before W."""
        (letter, stage, j), (other, stage_too, k) = one, two
        ascends = self.is_equal or (self.pipeline.is_equal and letter == F and stage == 0)
        if ascends and stage == stage_too and letter == other:
            self.model.add(self.before[max((j, one), (k, two))[1], min((j, one), (k, two))[1]] == 0)
        if stage == stage_too and j == k and not {D, R} & {letter, other}:
            self.model.add(self.before[two, one] == 0)
        backwards = (I, B)
        if self.is_equal and stage == stage_too and {letter, other} <= set(backwards) and j != k:
            self.model.add(self.before[max((j, one), (k, two))[1], min((j, one), (k, two))[1]] == 0)

    def _keep_memory(self, rank: int) -> None:
        pipeline = self.pipeline
        if pipeline.limit is None:
            return
        divisor = 1
        room = pipeline.limit[rank] - pipeline.static[rank]
        mine = self.actions[rank]
        most = sum(abs(self._delta(action)) for action in mine)
        if most.bit_length() > 55:
            # Round amounts up and the limit down, so that every order found fits.
            divisor = 1 << (most.bit_length() - 55)
            self.admits_all = False
        for action in mine:
            grown = self._delta(action)
            if grown <= 0:
                continue
            terms = [
                -(-self._delta(other) // divisor) * self.before[other, action]
                for other in mine
                if other != action and self._delta(other)
            ]
            fits = self.model.add(sum(terms) + -(-grown // divisor) <= min(room, most) // divisor)
            fits.only_enforce_if(self.present[action])

    def _delta(self, action: Action) -> int:
        return self.pipeline.delta[action[0]][action[1]][action[2]]

    def _minimise(self) -> None:
        model, pipeline = self.model, self.pipeline
        objective, zero = model.new_int_var(0, self.longest, ""), model.new_constant(0)
        for rank, stages in enumerate(pipeline.stages_of):
            first = self._first_start(stages[0]) if pipeline.objective == "span" else zero
            for action in self.actions[rank]:
                if action[0] in (W, B):
                    late = model.add(self.end[action] - first <= objective)
                    late.only_enforce_if(self.present[action])
            if pipeline.hidden is None:
                d, cells = self.duration, product(stages, range(pipeline.microbatches))
                work = (d[F][s][j] + min(d[B][s][j], d[I][s][j] + d[W][s][j]) for s, j in cells)
                model.add(objective >= sum(work))  # CP-SAT does not see it by itself
        model.minimize(objective)

    def _first_start(self, stage: int) -> cp_model.IntVar:
        """The start of the first F of a stage."""
        if self.is_equal:
            return self.start[F, stage, 0]
        first = self.model.new_int_var(0, self.horizon, "")
        for j in range(self.pipeline.microbatches):
            self.model.add(first <= self.start[F, stage, j])
        return first

    def pairs(self, solver: cp_model.CpSolver) -> Pairs:
        """Read the pairs."""
        return frozenset(one for (one, _), pair in self.pair.items() if solver.boolean_value(pair))

    def order(self, solver: cp_model.CpSolver) -> Order:
        """Read the order from the literals."""
        ranks = []
        for mine in self.actions:
            there = [action for action in mine if solver.boolean_value(self.present[action])]
            count = {
                action: sum(
                    solver.boolean_value(self.before[other, action]) for other in there if other != action
                )
                for action in there
            }
            ranks.append(self._with_copies_out(sorted(there, key=count.__getitem__), solver))
        return tuple(ranks)

    def _with_copies_out(self, entries: list[Action], solver: cp_model.CpSolver) -> tuple[Action, ...]:
        """A rank's list with an O for every D: as early as its F and the copies out before it allow."""
        cells, place = [entry[1:] for entry in entries if entry[0] == D], 0
        pairs = {one: two for (one, two), pair in self.pair.items() if solver.boolean_value(pair)}
        for cell in sorted(cells, key=lambda cell: solver.value(self.copy[O, *cell])):
            place = max(place, entries.index(pairs.get((F, *cell), (F, *cell))) + 1)
            entries.insert(place, (O, *cell))
            place += 1
        return tuple(entries)
