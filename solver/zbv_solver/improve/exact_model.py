"""The exact CP-SAT model of a problem.

Each family of constraints is one short method, and its docstring is the sentence that it states. Equal
microbatches run in ascending order on every stage, which loses nothing: any order can be relabelled so
(Lemmas 1 and 49). Microbatches that differ may run in any order, on every stage in another one.

Facts that CP-SAT would have to discover by search are given to it where they can be computed: see
:mod:`.exact_states` and :mod:`.exact_memory`. Numbers are integers: see :mod:`.exact_grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

import numpy as np
from ortools.sat.python import cp_model
from ortools.sat.python.cp_model_helper import Literal

from zbv_solver.bounds.directions import may_fuse
from zbv_solver.improve.exact_grid import Grid
from zbv_solver.improve.exact_memory import Action, Amounts, Expression, Pairs
from zbv_solver.improve.exact_states import Implied, implied
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.timing.start_times import evaluate, span_start_times

Cell = tuple[int, int]
"""(stage, microbatch)"""


def implications(
    problem: Problem, grid: Grid, poll: Callable[[], None] = lambda: None
) -> list[Implied | None]:
    """What memory implies on every rank, with work in parts of the grid; ``poll`` may raise to stop."""
    fusable = np.flatnonzero(may_fuse(problem)).tolist()
    facts = []
    for rank in range(problem.pp_degree):
        poll()
        facts.append(implied(grid.problem, rank, fusable))
    return facts


class ExactModel:
    """Variables and constraints for a problem.

    Parameters
    ----------
    grid
        The problem's costs in parts.
    lower, upper
        The range of the objective, in parts, in which orders are searched.
    known
        What memory implies, per rank; None or an empty list if that was not computed.
    minimise
        Whether to search for the best order; otherwise any order within ``upper`` will do.
    poll
        Called between steps; may raise to stop.
    """

    def __init__(
        self,
        problem: Problem,
        grid: Grid,
        *,
        lower: int,
        upper: int,
        known: list[Implied | None] | None = None,
        minimise: bool = True,
        poll: Callable[[], None] = lambda: None,
    ):
        self.problem = problem
        self.may_fuse = may_fuse(problem).tolist()
        self.grid = grid
        self.model = cp_model.CpModel()
        arrays = grid.problem.arrays
        self.kind_of: list[int] = arrays.kind_of.tolist()
        self.duration: list[list[list[int]]] = arrays.duration[:, :, self.kind_of].astype(np.int64).tolist()
        self.transfer: list[list[int]] = arrays.latency[:, self.kind_of].astype(np.int64).tolist()
        self.cells = [(s, j) for s in range(problem.n_stages) for j in range(problem.microbatches)]
        self.known = known or [None] * problem.pp_degree
        self.upper = max(0, upper)
        # For a span, let rank 0's window begin at 0. Every other rank begins before this window ends, as rank
        # 0's last backward needs all forwards; so all windows end within twice the span (Lemma 26).
        self.horizon = self.upper if problem.objective == "makespan" else 2 * self.upper
        self.poll = poll
        self._make_variables()
        self._order_microbatches()
        self._pass_microbatches_on()
        self._one_action_at_a_time()
        self.pairs = [self._make_pairs(rank) for rank in range(problem.pp_degree)]
        self._keep_memory()
        self._follow_implications()
        self._order_equal_weights()
        self._limit_objective(max(0, min(lower, self.upper)), minimise)

    def _make_variables(self) -> None:
        """Every cell has an F, then a backward (I, or B when fused), then a W unless it was fused."""
        model, horizon = self.model, self.horizon
        self.forward = {cell: model.new_int_var(0, horizon, f"F{cell}") for cell in self.cells}
        self.backward = {cell: model.new_int_var(0, horizon, f"I{cell}") for cell in self.cells}
        self.weight = {cell: model.new_int_var(0, horizon, f"W{cell}") for cell in self.cells}
        self.begins = [self._first_start(stages[0]) for stages in self.problem.placement.stages_of]
        fusable = [cell for cell in self.cells if self.may_fuse[cell[0]]]
        self.fused = {cell: model.new_bool_var(f"fused{cell}") for cell in fusable}
        self.fusable_end = {cell: model.new_int_var(0, horizon, f"Iend{cell}") for cell in fusable}
        self.fusable_cell_end = {cell: model.new_int_var(0, horizon, f"end{cell}") for cell in fusable}
        for cell in fusable:
            weight = self._length((W, *cell))
            model.add(self.fusable_cell_end[cell] == self.weight[cell] + weight * self.fused[cell].negated())
            model.add(self.fusable_end[cell] == self.backward[cell] + self._backward_length(cell))
        for cell in self.cells:
            model.add(self.backward[cell] >= self.end((F, *cell)))
            model.add(self.weight[cell] >= self.end((I, *cell)))
            if cell in self.fused:
                model.add(self.weight[cell] == self.end((I, *cell))).only_enforce_if(self.fused[cell])

    def _first_start(self, stage: int) -> cp_model.IntVar:
        """A time before which no F of a stage starts; where microbatches are equal, its first F's start."""
        if self.problem.is_equal:
            return self.forward[stage, 0]
        first = self.model.new_int_var(0, self.horizon, f"begin{stage}")
        for j in range(self.problem.microbatches):
            self.model.add(first <= self.forward[stage, j])
        return first

    def _backward_length(self, cell: Cell) -> Expression | int:
        """Duration of I, or of B when fused."""
        inputs, full = self._length((I, *cell)), self._length((B, *cell))
        return inputs + (full - inputs) * self.fused[cell] if cell in self.fused else inputs

    def _length(self, action: Action) -> int:
        letter, stage, microbatch = action
        return self.duration[letter][stage][microbatch]

    def start(self, action: Action) -> cp_model.IntVar:
        """Start of an action; of a W that is fused, the end of its B."""
        return (self.forward, self.backward, self.weight)[action[0]][action[1:]]

    def end(self, action: Action) -> Expression:
        """End of an action; of an I that is fused, and of its W, the end of the B."""
        letter, cell = action[0], action[1:]
        if letter != F and cell in self.fused:
            return (self.fusable_end if letter == I else self.fusable_cell_end)[cell]
        return self.start(action) + self._length(action)

    def _actions(self, rank: int) -> list[Action]:
        stages = self.problem.placement.stages_of[rank]
        return [
            (letter, stage, j)
            for letter in (F, I, W)
            for stage in stages
            for j in range(self.problem.microbatches)
        ]

    def _order_microbatches(self) -> None:
        """Equal microbatches of a stage run in ascending order, letter by letter."""
        previous = self._equal_before()
        for stage, j in self.cells:
            for letter in (F, I, W):
                if j in previous and not (letter == W and (stage, j) in self.fused):
                    self.model.add(self.start((letter, stage, j)) >= self.end((letter, stage, previous[j])))

    def _equal_before(self) -> dict[int, int]:
        """The last microbatch before each that equals it, of those that have one."""
        before, last = {}, dict[int, int]()
        for j, kind in enumerate(self.kind_of):
            if kind in last:
                before[j] = last[kind]
            last[kind] = j
        return before

    def _pass_microbatches_on(self) -> None:
        """An F needs the F below, a backward the backward above, and the transfer between them."""
        for stage, j in self.cells:
            if stage + 1 < self.problem.n_stages:
                above, lag = (stage + 1, j), self.transfer[stage][j]
                self.model.add(self.forward[above] >= self.end((F, stage, j)) + lag)
                self.model.add(self.backward[stage, j] >= self.end((I, *above)) + lag)

    def _one_action_at_a_time(self) -> None:
        """A rank runs one action at a time."""
        for stages in self.problem.placement.stages_of:
            cells = [(stage, j) for stage in stages for j in range(self.problem.microbatches)]
            self.model.add_no_overlap([interval for cell in cells for interval in self._intervals(cell)])

    def _intervals(self, cell: Cell) -> Iterable[cp_model.IntervalVar]:
        model, length = self.model, self._length((W, *cell))
        yield model.new_fixed_size_interval_var(self.forward[cell], self._length((F, *cell)), "")
        end = self.end((I, *cell))
        yield model.new_interval_var(self.backward[cell], self._backward_length(cell), end, "")
        if cell in self.fused:
            split = self.fused[cell].negated()
            yield model.new_optional_fixed_size_interval_var(self.weight[cell], length, split, "")
        else:
            yield model.new_fixed_size_interval_var(self.weight[cell], length, "")

    def _make_pairs(self, rank: int) -> Pairs:
        facts = self.known[rank]
        index = {chain: at for at, chain in enumerate(facts.chains)} if facts else {}

        def known(first: Action, second: Action) -> bool:
            """Whether memory or the order of equal microbatches puts the first before the second."""
            if self.kind_of[first[2]] != self.kind_of[second[2]]:
                return False
            if first[:2] == second[:2]:
                return first[2] < second[2] and not (first[0] == W and first[1:] in self.fused)
            if first[1] == second[1] and first[0] < second[0] and first[2] <= second[2]:
                return True
            if facts is None:
                return False
            return bool(first[2] < facts.before[index[second[:2]], second[2], index[first[:2]]])

        return Pairs(self.model, self.start, self.end, known)

    def _keep_memory(self) -> None:
        """Whenever an action allocates, what its rank holds fits the limit."""
        if self.problem.memory.limit is None:
            return
        for rank, pairs in enumerate(self.pairs):
            amounts, actions = Amounts.of(self.problem, rank), self._actions(rank)
            allocating = [action for action in actions if amounts.change(action) > 0]
            for action in allocating:
                self.poll()
                cell = action[1:]
                enforced: list[Literal] = []
                if action[0] == I and cell in self.fused:
                    enforced.append(self.fused[cell].negated())  # a B never grows
                pairs.fits(action, actions, amounts, 0, enforced)
                self._release_fused_at_once(pairs, action, actions)

    def _release_fused_at_once(self, pairs: Pairs, action: Action, actions: list[Action]) -> None:
        """The W of a fused cell is before an action exactly if its backward is."""
        for letter, stage, j in actions:
            cell = (stage, j)
            if letter == W and cell in self.fused and cell != action[1:]:
                weight, inputs = pairs.before((W, *cell), action), pairs.before((I, *cell), action)
                self.model.add(weight == inputs).only_enforce_if(self.fused[cell])

    def _follow_implications(self) -> None:
        """What memory puts before an action ends before it, and a rank's work before it takes its time."""
        for rank, facts in enumerate(self.known):
            self.poll()
            if facts is None:
                continue
            first = self.forward[self.problem.placement.stages_of[rank][0], 0]
            for at, (letter, stage) in enumerate(facts.chains):
                for j in range(self.problem.microbatches):
                    action = (letter, stage, j)
                    self.model.add(self.start(action) >= first + int(facts.head[at, j]))
                    for other, (kind, where) in enumerate(facts.chains):
                        count = facts.before[at, j, other]
                        # Smaller counts are implied: the chain's previous action already waits for them.
                        if other != at and count > (facts.before[at, j - 1, other] if j else 0):
                            self.model.add(self.start(action) >= self.end((kind, where, int(count) - 1)))

    def _order_equal_weights(self) -> None:
        """Of two ready W's that take equally long, the one that releases more runs first: Lemma 29.

        Ties go to the stage that is first in the list. Stages whose W's may be fused are left out.
        """
        if not self.problem.is_equal:
            return
        release, duration = self.problem.arrays.delta[W, :, 0], self.duration[W]
        for rank, stages in enumerate(self.problem.placement.stages_of):
            plain = [s for s in stages if not self.may_fuse[s]]
            for y, x in combinations(sorted(plain, key=lambda s: (release[s], s)), 2):
                if duration[x] == duration[y]:
                    self._prefer(self.pairs[rank], y, x)

    def _prefer(self, pairs: Pairs, favoured: int, other: int) -> None:
        """A W of ``other`` runs before one of ``favoured`` exactly if it runs before that one's I."""
        for i in range(self.problem.microbatches):
            for j in range(self.problem.microbatches):
                weights = pairs.before((W, other, i), (W, favoured, j))
                self.model.add(weights == pairs.before((W, other, i), (I, favoured, j)))

    def _limit_objective(self, lower: int, minimise: bool) -> None:
        """The objective is the time from first start to last end: per rank (span), or of all (makespan)."""
        model, problem = self.model, self.problem
        origin = model.new_constant(0)
        self.objective = model.new_int_var(lower, self.upper, "objective") if minimise else None
        for rank in range(problem.pp_degree):
            begin = self.begins[rank] if problem.objective == "span" else origin
            facts = self.known[rank]
            tails = {chain: facts.tail[at] for at, chain in enumerate(facts.chains)} if facts else {}
            for action in self._actions(rank):
                tail = int(tails[action[:2]][action[2]]) if tails else 0
                if tail > 0 or action[0] == W:
                    # With a constant this is a difference constraint, which propagates better than one of
                    # three variables.
                    model.add(self.end(action) + tail - begin <= self.upper)
                    if self.objective is not None:
                        model.add(self.objective >= self.end(action) + tail - begin)
        if self.objective is not None:
            model.minimize(self.objective)
        # All actions follow rank 0's first one, and only differences matter.
        model.add(self.begins[0] == 0)

    def hint(self, incumbent: Orders) -> None:
        """Hint the start of every action of an order."""
        problem = self.grid.problem
        timed = span_start_times if problem.objective == "span" else _earliest_starts
        rows = zip(
            incumbent.letter.tolist(),
            incumbent.stage.tolist(),
            incumbent.microbatch.tolist(),
            timed(problem, incumbent).tolist(),
            strict=True,
        )
        starts = {(letter, stage, j): int(time) for letter, stage, j, time in rows}
        if not problem.is_equal:
            for first, stages in zip(self.begins, problem.placement.stages_of, strict=True):
                own = (starts[F, stages[0], j] for j in range(problem.microbatches))
                self.model.add_hint(first, min(own))
        for cell in self.cells:
            fused = (B, *cell) in starts
            begin = starts[B if fused else I, *cell]
            end = begin + self._length((B if fused else I, *cell))
            weight = end if fused else starts[W, *cell]
            self.model.add_hint(self.forward[cell], starts[F, *cell])
            self.model.add_hint(self.backward[cell], begin)
            self.model.add_hint(self.weight[cell], weight)
            if cell in self.fused:
                self.model.add_hint(self.fused[cell], fused)
                self.model.add_hint(self.fusable_end[cell], end)
                length = 0 if fused else self._length((W, *cell))
                self.model.add_hint(self.fusable_cell_end[cell], weight + length)

    def orders(self, value: Callable[[cp_model.IntVar], int]) -> Orders:
        """The order of the start times; every action takes at least one part, so no two starts are equal."""
        ranks = []
        for rank in range(self.problem.pp_degree):
            timed = []
            for letter, stage, j in self._actions(rank):
                fused = (stage, j) in self.fused and value(self.fused[stage, j]) == 1
                if not (letter == W and fused):
                    kind = B if letter == I and fused else letter
                    timed.append((value(self.start((letter, stage, j))), (stage, kind, j)))
            ranks.append([row for _, row in sorted(timed)])
        return Orders.pack(ranks)


def _earliest_starts(problem: Problem, orders: Orders) -> FloatArray:
    return evaluate(problem, orders).start
