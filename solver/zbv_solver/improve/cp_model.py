"""The CP-SAT model of a window of an order; the whole problem is the window that nothing surrounds.

Each family of constraints is one short method, and its docstring is the sentence that it states. Equal
microbatches run in ascending order on every stage, which loses nothing: any order can be relabelled so
(Lemmas 1 and 49). Microbatches that differ may run in any order, on every stage in another one. Where all of
a cell's backward is inside the window and B can pay, the model chooses between I and W, and B.

Facts that CP-SAT would have to discover by search are given to it where they can be computed: see
:mod:`.cp_states`. Memory does not depend on time, only on which actions come before which. One literal per
pair of actions states their order, and one linear constraint per allocating action sums what is held. CP-SAT
handles these sums far better than intervals of held memory (a cumulative or a reservoir): it learns from the
literals, which the constraints on the rank's order share.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model
from ortools.sat.python.cp_model_helper import Literal

from zbv_solver.bounds.directions import may_fuse
from zbv_solver.improve.cp_sat import Action, Amounts, FreeWindow, Grid
from zbv_solver.improve.cp_states import Implied
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W

Cell = tuple[int, int]
"""(stage, microbatch)"""
Expression = cp_model.LinearExpr


class CpModel:
    """Variables and constraints of a window.

    Parameters
    ----------
    grid
        The problem's costs in parts.
    amounts
        Memory of every rank; None without a limit.
    most
        Orders that take at most this many parts are searched.
    known
        What memory implies, per rank: of the whole problem only.
    minimise
        Whether to search for the best order; otherwise any order within ``most`` will do.
    poll
        Called between steps; may raise to stop.
    """

    def __init__(
        self,
        problem: Problem,
        grid: Grid,
        amounts: list[Amounts] | None,
        window: FreeWindow,
        most: int,
        *,
        known: list[Implied | None] | None = None,
        minimise: bool = True,
        poll: Callable[[], None] = lambda: None,
    ):
        self.problem, self.amounts, self.window, self.most, self.poll = problem, amounts, window, most, poll
        arrays = grid.problem.arrays
        self.kind_of: list[int] = arrays.kind_of.tolist()
        self.duration: list[list[list[int]]] = arrays.duration[:, :, self.kind_of].astype(np.int64).tolist()
        self.transfer: list[list[int]] = arrays.latency[:, self.kind_of].astype(np.int64).tolist()
        self.may_fuse: list[bool] = may_fuse(problem).tolist()
        self.known = known or [None] * problem.pp_degree
        self.model = cp_model.CpModel()
        self.literals: dict[tuple[Action, Action], cp_model.IntVar] = {}
        self.objective: cp_model.IntVar | None = None
        if minimise:
            self.objective = self.model.new_int_var(min(window.floor, most), most, "objective")
            self.model.minimize(self.objective)
        self._make_variables()
        self._begin_ranks()
        self._limit_objective()
        self._follow_dependencies()
        self._order_microbatches()
        self.true = self.model.new_constant(1)
        for rank in range(problem.pp_degree):
            self._one_action_at_a_time(rank)
            self._keep_memory(rank)
            self._follow_implications(rank)
            self._order_equal_weights(rank)

    def _make_variables(self) -> None:
        """Every action starts between its head and its tail; a W that is fused starts at the end of its B."""
        window, old, model = self.window, self.window.orders, self.model
        self.begin: dict[Action, cp_model.IntVar] = {}
        self.tail: dict[Action, int] = {}
        hints: dict[Action, tuple[int, int]] = {}
        was_fused: set[Cell] = set()
        rows = zip(
            *(of[window.free].tolist() for of in (old.letter, old.stage, old.microbatch)),
            *(of.tolist() for of in (window.start, window.head, window.tail, window.closing)),
            strict=True,
        )
        for letter, stage, j, start, head, tail, closing in rows:
            action = (I if letter == B else letter, stage, j)
            self.tail[action] = tail
            hints[action] = (start, head)
            if letter == B:
                was_fused.add((stage, j))
                self.tail[W, stage, j] = closing
                hints[W, stage, j] = (start + self._length((B, stage, j)), head)
        cells = [(stage, j) for letter, stage, j in hints if letter == I and (W, stage, j) in hints]
        self.inside: list[list[Action]] = [[] for _ in self.problem.placement.stages_of]
        for action in hints:
            self.inside[self.problem.placement.rank_of[action[1]]].append(action)
        self.fused = {cell: model.new_bool_var(f"fused{cell}") for cell in cells if self.may_fuse[cell[0]]}
        # For a span, let rank 0's window begin at 0. Every other rank begins before this window ends, as rank
        # 0's last backward needs all forwards; so all windows end within twice the span (Lemma 26).
        is_free = window.is_whole and self.problem.objective == "span"
        self.horizon = 2 * self.most if is_free else self.most
        for action, (start, head) in hints.items():
            latest = self.horizon - self.tail[action]
            if action[1:] not in self.fused:
                latest -= self._length(action)
            self.begin[action] = model.new_int_var(head, max(head, latest), str(action))
            model.add_hint(self.begin[action], start)
        self.ends: dict[Action, cp_model.IntVar] = {}
        for cell, fused in self.fused.items():
            model.add_hint(fused, cell in was_fused)
            for letter in (I, W):
                end = self.ends[letter, *cell] = model.new_int_var(0, self.horizon, f"end{letter, *cell}")
                model.add(end == self.begin[letter, *cell] + self._actual_length((letter, *cell)))
            weight, inputs = self.begin[W, *cell], self.ends[I, *cell]
            model.add(weight == inputs).only_enforce_if(fused)

    def _length(self, action: Action) -> int:
        letter, stage, microbatch = action
        return self.duration[letter][stage][microbatch]

    def _actual_length(self, action: Action) -> Expression | int:
        """The duration; of an I that is fused, that of the B, and of its W, 0."""
        letter, cell, length = action[0], action[1:], self._length(action)
        if letter == F or cell not in self.fused:
            return length
        return length + self.fused[cell] * ((self._length((B, *cell)) if letter == I else 0) - length)

    def start(self, action: Action) -> cp_model.IntVar:
        """Start of an action; of a W that is fused, the end of its B."""
        return self.begin[action]

    def end(self, action: Action) -> Expression:
        """End of an action; of an I that is fused, and of its W, the end of the B."""
        return self.ends[action] if action in self.ends else self.begin[action] + self._length(action)

    def _begin_ranks(self) -> None:
        """For the span of the whole problem, a rank begins with its first F, and rank 0 at 0."""
        self.rank_begin: list[cp_model.IntVar] = []
        if not self.window.is_whole:
            return
        for stages in self.problem.placement.stages_of:
            forwards = [self.begin[F, stages[0], j] for j in range(self.problem.microbatches)]
            first = forwards[0]
            if not self.problem.is_equal:
                first = self.model.new_int_var(0, self.horizon, "")
                for forward in forwards:
                    self.model.add(first <= forward)
            self.rank_begin.append(first)
        # All actions follow rank 0's first one, and only differences matter.
        self.model.add(self.rank_begin[0] == 0)

    def _limit_objective(self) -> None:
        """The objective is the time from first start to last end: per rank (span), or of all (makespan)."""
        for action in self.begin:
            tail, rank = self.tail[action], self.problem.placement.rank_of[action[1]]
            facts = self.known[rank]
            if facts is not None:
                tail = int(facts.tail[facts.chains.index(action[:2]), action[2]])
            if self.window.is_whole and tail == 0 and action[0] != W:
                continue  # a W follows
            late = self.end(action) + tail
            if self.window.is_whole and self.problem.objective == "span":
                late = late - self.rank_begin[rank]
            # A constant makes this a difference constraint, which propagates better.
            self.model.add(late <= (self.most if self.objective is None else self.objective))

    def _follow_dependencies(self) -> None:
        """An F needs the F below, a backward the backward above and its F, a W its I; transfers take time."""
        place = {action: at for at, action in enumerate(self.begin)}
        rows = []
        for letter, stage, j in self.begin:
            if letter == W:
                needs = [((I, stage, j), 0)]
            elif letter == I:
                needs = [((F, stage, j), 0)]
                if stage + 1 < self.problem.n_stages:
                    needs.append(((I, stage + 1, j), self.transfer[stage][j]))
            else:
                needs = [((F, stage - 1, j), self.transfer[stage - 1][j])] if stage else []
            rows += [(place[n], place[letter, stage, j], lag, n) for n, lag in needs if n in place]
        actions = list(self.begin)
        for _, at, lag, needed in sorted(rows):
            self.model.add(self.start(actions[at]) >= self.end(needed) + lag)

    def _order_microbatches(self) -> None:
        """Equal microbatches of a stage run in ascending order: F's, backwards of both kinds, W's."""
        previous: dict[tuple[int, int, int], Action] = {}
        for action in sorted(self.begin, key=lambda a: a[2]):
            letter, stage, j = action
            chain = (letter, stage, self.kind_of[j])
            if chain in previous and not (letter == W and self.may_fuse[stage]):
                self.model.add(self.start(action) >= self.end(previous[chain]))
            previous[chain] = action

    def _one_action_at_a_time(self, rank: int) -> None:
        """A rank runs one action at a time."""
        intervals = []
        for action in self.inside[rank]:
            start, length, cell = self.start(action), self._length(action), action[1:]
            if action[0] == F or cell not in self.fused:
                interval = self.model.new_fixed_size_interval_var(start, length, "")
            elif action[0] == I:
                interval = self.model.new_interval_var(
                    start, self._actual_length(action), self.end(action), ""
                )
            else:
                split = self.fused[cell].negated()
                interval = self.model.new_optional_fixed_size_interval_var(start, length, split, "")
            intervals.append(interval)
        self.model.add_no_overlap(intervals)

    def _is_known(self, first: Action, second: Action) -> bool:
        """Whether memory or the order of equal microbatches puts the first before the second."""
        (letter, stage, i), (other, stage_too, j) = first, second
        if self.kind_of[i] != self.kind_of[j]:
            return False
        if first[:2] == second[:2]:
            return i < j and not (letter == W and self.may_fuse[stage])
        if stage == stage_too and letter < other and i <= j:
            return True
        facts = self.known[self.problem.placement.rank_of[stage]]
        if facts is None:
            return False
        index = facts.chains.index
        return bool(i < facts.before[index(second[:2]), j, index(first[:2])])

    def before(self, first: Action, second: Action) -> Literal:
        """True if the first ends before the second starts; a constant if that is known."""
        if self._is_known(first, second):
            return self.true
        if self._is_known(second, first):
            return self.true.negated()
        if (second, first) in self.literals:
            return self.literals[second, first].negated()
        if (first, second) not in self.literals:
            literal = self.model.new_bool_var(f"{first}<{second}")
            self.model.add(self.end(first) <= self.start(second)).only_enforce_if(literal)
            self.model.add(self.end(second) <= self.start(first)).only_enforce_if(literal.negated())
            self.literals[first, second] = literal
        return self.literals[first, second]

    def _keep_memory(self, rank: int) -> None:
        """Whenever an action allocates, what its rank holds fits the limit."""
        actions = self.inside[rank]
        if self.amounts is None or not actions:
            return
        amounts, (before, _) = self.amounts[rank], self._outside(rank)
        held = sum(amounts.change((letter, stage, j)) for stage, letter, j in before.tolist())
        for action in actions:
            allocated = amounts.change(action)
            if allocated <= 0:
                continue
            self.poll()
            terms = [
                amounts.change(other) * self.before(other, action)
                for other in actions
                if other != action and amounts.change(other) != 0
            ]
            constraint = self.model.add(sum(terms) <= amounts.capacity - held - allocated)
            cell = action[1:]
            if action[0] == I and cell in self.fused:
                constraint.only_enforce_if(self.fused[cell].negated())  # a B never grows
            self._release_fused_at_once(action, actions)

    def _release_fused_at_once(self, action: Action, actions: list[Action]) -> None:
        """The W of a fused cell is before an action exactly if its backward is."""
        for letter, stage, j in actions:
            cell = (stage, j)
            if letter == W and cell in self.fused and cell != action[1:]:
                weight, inputs = self.before((W, *cell), action), self.before((I, *cell), action)
                self.model.add(weight == inputs).only_enforce_if(self.fused[cell])

    def _follow_implications(self, rank: int) -> None:
        """What memory puts before an action ends before it, and a rank's work before it takes its time."""
        facts = self.known[rank]
        if facts is None:
            return
        self.poll()
        for at, (letter, stage) in enumerate(facts.chains):
            for j in range(self.problem.microbatches):
                start = self.start((letter, stage, j))
                self.model.add(start >= self.rank_begin[rank] + int(facts.head[at, j]))
                for other, (kind, where) in enumerate(facts.chains):
                    count = facts.before[at, j, other]
                    # Smaller counts are implied: the chain's previous action already waits for them.
                    if other != at and count > (facts.before[at, j - 1, other] if j else 0):
                        self.model.add(start >= self.end((kind, where, int(count) - 1)))

    def _order_equal_weights(self, rank: int) -> None:
        """Of two ready W's that take equally long, the one that releases more runs first: Lemma 29.

        Ties go to the stage that is first in the list. Stages whose W's may be fused are left out.
        """
        if not self.problem.is_equal or not self.window.is_whole:
            return
        release = self.problem.arrays.delta[W, :, 0]
        plain = [s for s in self.problem.placement.stages_of[rank] if not self.may_fuse[s]]
        for y, x in combinations(sorted(plain, key=lambda s: (release[s], s)), 2):
            if self.duration[W][x] == self.duration[W][y]:
                for i in range(self.problem.microbatches):
                    for j in range(self.problem.microbatches):
                        weights = self.before((W, x, i), (W, y, j))
                        self.model.add(weights == self.before((W, x, i), (I, y, j)))

    def _outside(self, rank: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """A rank's actions before and after the window: (n, 3) each, stage, letter and microbatch."""
        old = self.window.orders
        part = old.slice_of(rank)
        rows = np.column_stack((old.stage[part], old.letter[part], old.microbatch[part])).astype(np.int32)
        first, stop = np.searchsorted(self.window.free, (part.start, part.stop))
        at = int(self.window.free[first]) - part.start if first < stop else 0
        return rows[:at], rows[at + int(stop - first) :]

    def orders(self, value: Callable[[cp_model.IntVar], int]) -> Orders:
        """The order of the start times; every action takes at least one part, so no two starts are equal."""
        ranks = []
        for rank, actions in enumerate(self.inside):
            timed = []
            for letter, stage, j in actions:
                is_fused = (stage, j) in self.fused and value(self.fused[stage, j]) == 1
                if not (letter == W and is_fused):
                    kind = B if letter == I and is_fused else letter
                    timed.append((value(self.begin[letter, stage, j]), (stage, kind, j)))
            inside = np.array([row for _, row in sorted(timed)], dtype=np.int32).reshape(-1, 3)
            before, after = self._outside(rank)
            ranks.append(np.concatenate((before, inside, after)))
        return Orders.of_rows(ranks)
