"""Of the cuts that are nearly as good as the best one, the most regular.

The best cut is often irregular for the sake of a fraction of a percent, and stages that are empty or all of
different lengths are hard to read, to justify and to keep when something else changes. Regular means, in this
order: few empty stages, few different numbers of transformer layers, few changes of the number from one stage
to the next (a short layout string), and a small difference between the most and the fewest.

A few thousand simple patterns give a regular cut that is good. CP-SAT then proposes more regular ones, and at
last shorter ones that are as regular, under what is known of the order (:mod:`.count_model`). A proposal that
is too long adds its critical paths. If its effort lasts until no proposal is left, none is more regular.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.partition.cut_space import Boundaries
from zbv_solver.partition.descent import TIMED
from zbv_solver.partition.fixed_order import Terms
from zbv_solver.partition.runs import Choice, First
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING, SEARCH_MEMORY

from zbv_models.fixed_orders.count_model import CountModel
from zbv_models.fixed_orders.order_search import LEAST_EFFORT, MOST_LEARNED, SCREENED, OrderSearch

TOLERANCE = 0.01
"""How much longer than the best cut a more regular one may be."""
MOST_DEALT = 100_000
"""Cuts with evenly dealt middle stages that are compared at most."""
FEWEST_TIMED = 20
"""Cuts that are timed at least."""
MOST_EQUAL = 8
"""Equally regular good cuts that are timed to find the shortest of them."""
EXACT = {"quick": 0.2, "standard": 1.0, "thorough": 10.0}
"""CP-SAT's deterministic time for more regular cuts, and again for shorter ones."""
LINEAR = 1
"""CP-SAT's linearization: on Moonlight's cuts, the least deterministic time of 0, 1 and 2."""
MOST_LITERALS = 5000
"""Stages times numbers of layers for which CP-SAT is asked."""

Irregularity = tuple[int, ...]
"""Empty stages, different numbers of transformer layers, changes between neighbours, and their range."""


@dataclass(frozen=True, eq=False)
class Once:
    """What a step needs once, in addition to the objective.

    Attributes
    ----------
    parts
        (n,) of every part; the rank with the most counts.
    fixed
        In any case.
    """

    parts: FloatArray
    fixed: float = 0.0


def regular_cut(search: OrderSearch, once: Once | None = None) -> Choice:
    """The most regular cut that fits and is at most :data:`TOLERANCE` longer than the best cut of a search.

    It is not longer than the executor's own cut either, unless the best cut is. Of equally regular ones it is
    the shortest, as far as the effort allows. Once the search's time is over, the best cut is the result.

    Parameters
    ----------
    once
        With it, the step is at most :data:`TOLERANCE` longer, too.

    Raises
    ------
    ValueError
        When the search has no cut.
    """
    if search.best is None:
        raise ValueError("found a search without a cut.")
    if search.is_over or search.space.n_stages == 1:
        return search.best
    regular = _Regular(search, search.best, once)
    return _Proposals(regular, regular.simple()).found()


def irregularities(blocks: IntArray, parts: IntArray) -> IntArray:
    """(n, 4) irregularity of n cuts with these transformer layers and parts of stages, (n, S) each."""
    ordered = np.sort(blocks, axis=1)
    return np.stack(
        [
            (parts == 0).sum(axis=1),
            (np.diff(ordered, axis=1) > 0).sum(axis=1) + 1,
            (np.diff(blocks, axis=1) != 0).sum(axis=1),
            ordered[:, -1] - ordered[:, 0],
        ],
        axis=1,
    )


class _Regular:
    """What makes a cut regular, and good, around the best one of a search."""

    def __init__(self, search: OrderSearch, best: Choice, once: Once | None):
        self.search, self.best = search, best
        problem, runs = search.problem, search.runs
        self.blocks_before = np.array(problem.model.blocks_before)[problem.places]
        forward, inputs, weights, fused = np.repeat(runs.duration[0], runs.size, axis=1)
        work = forward + np.minimum(inputs + weights, fused)
        self.work_before = np.concatenate([[0.0], np.cumsum(work)])
        once = once or Once(np.zeros(len(work)))
        self.once = once.parts
        self.once_before = np.concatenate([[0.0], np.cumsum(once.parts)])
        self.most = search.value * (1 + TOLERANCE)
        if search.even >= search.value:
            self.most = min(self.most, search.even * (1 + ROUNDING))
        step = search.value + self._busiest(self.once_before, np.array([best[0]])).item()
        self.most_step = (step + once.fixed) * (1 + TOLERANCE) - once.fixed
        self.left = max(FEWEST_TIMED, SCREENED[search.effort] // (len(search.order.orders) + TIMED))

    def simple(self) -> Choice:
        """A regular cut: evenly dealt middle stages, from which layers move one by one."""
        choice = self._better(self.best, self._dealt())
        while True:
            moved = self._better(choice, self._moved(choice[0]))
            if moved == choice:
                return choice
            choice = moved

    def _better(self, choice: Choice, bounds: IntArray) -> Choice:
        """The most regular of a cut and of those with other boundaries (n, S+1) that are good."""
        most = self.irregularity(choice)
        found = self._irregularity(bounds)
        order = np.lexsort((self._work(bounds), *found.T[::-1]))
        good: list[tuple[float, Choice]] = []
        for at in order.tolist():
            irregularity = found[at].tolist()
            if irregularity >= most and (not good or irregularity > most):
                break
            if self.left <= 0 or len(good) == MOST_EQUAL:
                break
            other = tuple(bounds[at].tolist()), choice[1]
            value = self.value(other)
            if self.is_good(other, value):
                good.append((value, other))
                most = irregularity
        return min(good, default=(0.0, choice))[1]

    def irregularity(self, choice: Choice) -> list[int]:
        """How irregular a cut is."""
        found: list[int] = self._irregularity(np.array([choice[0]]))[0].tolist()
        return found

    def is_good(self, choice: Choice, value: float) -> bool:
        """Whether a cut with this objective is hardly longer than the best one."""
        step = value + self._busiest(self.once_before, np.array([choice[0]])).item()
        return value <= self.most and step <= self.most_step

    def _irregularity(self, bounds: IntArray) -> IntArray:
        return irregularities(np.diff(self.blocks_before[bounds], axis=1), np.diff(bounds, axis=1))

    def value(self, choice: Choice) -> float:
        """The objective of a cut; inf if it is not allowed or does not fit."""
        runs, order, limits = self.search.runs, self.search.order, self.search.problem.limit
        if not runs.allows(choice[0]):
            return math.inf
        self.left -= 1
        if (
            limits is not None
            and (runs.peaks(order, choice) > np.array(limits) * (1 + SEARCH_MEMORY / 2)).any()
        ):
            return math.inf
        return runs.value(order, choice)

    def _work(self, bounds: IntArray) -> FloatArray:
        """(n,) most work of a rank for one microbatch."""
        return self._busiest(self.work_before, bounds)

    def _busiest(self, before: FloatArray, bounds: IntArray) -> FloatArray:
        """(n,) the most of a sum over parts that a rank has."""
        stages = np.array(self.search.space.placement.stages_of)
        most: FloatArray = np.diff(before[bounds], axis=1)[:, stages].sum(axis=2).max(axis=1)
        return most

    def _dealt(self) -> IntArray:
        """(n, S+1) boundaries with evenly dealt middle stages, without those with too much work on a rank."""
        found = np.concatenate([*self._patterns()])
        kept: IntArray = found[
            self._work(found) * self.search.problem.microbatches <= self.most * (1 + ROUNDING)
        ]
        return kept

    def _patterns(self) -> Iterator[IntArray]:
        """All ends of the first stage and begins of the last two; longer middle stages are first or last."""
        bounds, n = np.array(self.best[0]), len(self.work_before) - 1
        free = min(3, len(bounds) - 2)
        width = int(MOST_DEALT ** (1 / free)) // 2
        places = bounds[[1, -2, -3][:free]]
        ranges = [np.arange(max(1, at - width), min(n - 1, at + width) + 1) for at in places.tolist()]
        chosen = [each.ravel() for each in np.meshgrid(*ranges, indexing="ij")]
        if free == 1:
            yield np.stack([0 * chosen[0], chosen[0], 0 * chosen[0] + n], axis=1)
            return
        head, end = chosen[:2]
        before = chosen[2] if free == 3 else head
        is_ordered = (head <= before) & (before <= end)
        head, before, end = head[is_ordered], before[is_ordered], end[is_ordered]
        middle = len(bounds) - 4
        each, rest = np.divmod(before - head, max(1, middle))
        for shift in (0 * rest, middle - rest):
            inner = [head + k * each + np.clip(k - shift, 0, rest) for k in range(middle + 1)]
            yield np.stack([0 * head, *inner, end, 0 * head + n], axis=1)

    def _moved(self, bounds: Boundaries) -> IntArray:
        """(n, S+1) boundaries after a part has moved from one stage to another."""
        stages = len(bounds) - 1
        found = []
        for one in range(stages):
            for other in range(stages):
                low, high = min(one, other), max(one, other)
                moved = np.array(bounds)
                moved[low + 1 : high + 1] += 1 if one > other else -1
                found.append(moved)
        return np.array(found)


class _Proposals:
    """Cuts that CP-SAT proposes because they are more regular than a known one, or shorter.

    Parameters
    ----------
    choice
        A good cut. Others recompute as it does.
    """

    def __init__(self, regular: _Regular, choice: Choice):
        self.regular, self.search, self.choice = regular, regular.search, choice
        recompute = self.search.recompute
        if isinstance(recompute, First):
            recompute = replace(recompute, least=choice[1][0], most=choice[1][0])
        elif recompute is None:
            recompute = choice[1]
        self.counts = CountModel(self.search.runs, self.search.order, regular.most, 0.0, recompute)
        self.model = self.counts.model
        self.terms: set[bytes] = set()
        for terms in self.search.terms.values():
            self._add(terms)
        self._learn(choice)

    def found(self) -> Choice:
        """The most regular good cut, and of these the shortest, as far as the effort allows."""
        regular, blocks = self.regular, self._by_run(np.diff(self.regular.blocks_before))
        if blocks is None or self.search.space.n_stages * (self._most_blocks() + 1) > MOST_LITERALS:
            return self.choice
        self._add_step()
        total = self._add_irregularity(blocks)
        self.model.minimize(total)
        self._improve(total, regular.most)
        if regular.irregularity(self.choice) == regular.irregularity(regular.best):
            return regular.best
        self.model.minimize(self.counts.objective)
        self._improve(total, regular.value(self.choice))
        return self.choice

    def _improve(self, total: cp_model.IntVar, below: float) -> None:
        """Replace the cut by better ones until none is left: more regular ones, or shorter ones."""
        left, is_shorter = EXACT[self.search.effort], below < self.regular.most
        while left > 0 and not self.search.is_over:
            most = self._packed(self.choice) - (not is_shorter)
            if most < 0:
                return
            self.model.proto.variables[total.index].domain[1] = most
            deadline = self.search.deadline
            seconds = None if math.isinf(deadline) else deadline - time.monotonic()
            proposal = self.counts.solve(below, left, self.search.seed, seconds, LINEAR)
            left -= max(LEAST_EFFORT, proposal.effort)
            is_new = False
            for choice in reversed(proposal.choices[-MOST_LEARNED:]):
                value = self.regular.value(choice)
                if self.regular.is_good(choice, value) and value < below * (1 + ROUNDING):
                    self.choice, is_new = choice, True
                    below = value * (1 - OPTIMAL_GAP) if is_shorter else below
                    break
                is_new = self._learn(choice) or is_new
            if proposal.is_exhausted or not is_new:
                return

    def _learn(self, choice: Choice) -> bool:
        """Add the critical paths of a cut; False if all are known."""
        runs, before = self.search.runs, len(self.terms)
        counts = runs.counts(choice[0])
        for terms in self.search.order.critical(*runs.costs(counts, runs.again(counts, choice[1]))):
            self._add(terms)
        return len(self.terms) > before

    def _add(self, terms: Terms) -> None:
        if terms.key not in self.terms:
            self.terms.add(terms.key)
            self.counts.add(terms)

    def _by_run(self, amounts: IntArray | FloatArray) -> list[float] | None:
        """What one part of every run has, if all parts of a run have the same."""
        runs = self.search.runs
        each = amounts[runs.begin[:-1]]
        return each.tolist() if (np.repeat(each, runs.size) == amounts).all() else None

    def _most_blocks(self) -> int:
        """More transformer layers do not fit into a stage: their work alone takes too long."""
        blocks, work = np.diff(self.regular.blocks_before), np.diff(self.regular.work_before)
        lightest = np.cumsum(np.sort(work[blocks > 0])) * self.search.problem.microbatches
        within = int((lightest <= self.regular.most * (1 + ROUNDING)).sum())
        return within * int(blocks.max())

    def _packed(self, choice: Choice) -> int:
        """The irregularity of a cut as one number, in the same order."""
        found = 0
        for amount, base in zip(self.regular.irregularity(choice), self._bases(), strict=True):
            found = found * base + amount
        return found

    def _bases(self) -> tuple[int, ...]:
        stages = self.search.space.n_stages
        return stages, stages + 1, stages, self._most_blocks() + 1

    def _inside(self, stage: int, of_run: Sequence[float]) -> cp_model.LinearExpr:
        """A sum over the parts of a stage, if a part of every run has these whole numbers."""
        before, after = self.counts.counts[stage : stage + 2]
        amounts = [math.floor(amount) for amount in of_run]
        return cp_model.LinearExpr.weighted_sum([*after, *before], [*amounts, *(-each for each in amounts)])

    def _add_step(self) -> None:
        """Let no rank need too much once per step."""
        once = self._by_run(self.regular.once)
        if once is None or not any(once):
            return
        scaled = [amount * self.counts.scale for amount in once]
        most = math.ceil(self.regular.most_step * self.counts.scale)
        for stages in self.search.space.placement.stages_of:
            total = sum(self._inside(stage, scaled) for stage in stages)
            self.model.add(self.counts.objective + total <= most)

    def _add_irregularity(self, blocks: Sequence[float]) -> cp_model.IntVar:
        """The irregularity as one number, as :func:`irregularities` has it."""
        model, stages, most = self.model, range(self.search.space.n_stages), self._most_blocks()
        is_used = [model.new_bool_var("") for _ in range(most + 1)]
        fewest, largest = model.new_int_var(0, most, ""), model.new_int_var(0, most, "")
        has, empty, changes = list[list[cp_model.IntVar]](), list[cp_model.IntVar](), list[cp_model.IntVar]()
        for stage in stages:
            inside = self._inside(stage, blocks)
            has.append([model.new_bool_var("") for _ in is_used])
            model.add_exactly_one(has[-1])
            model.add(inside == sum(number * each for number, each in enumerate(has[-1])))
            for each, used in zip(has[-1], is_used, strict=True):
                model.add_implication(each, used)
            model.add(fewest <= inside)
            model.add(largest >= inside)
            empty.append(model.new_bool_var(""))
            model.add(self._inside(stage, [1] * len(blocks)) >= 1 - empty[-1])
        for before, after in pairwise(has):
            changes.append(model.new_bool_var(""))
            for one, other in zip(before, after, strict=True):
                model.add(one - other <= changes[-1])
        packed: cp_model.LinearExpr | int = 0
        amounts = (sum(empty), sum(is_used), sum(changes), largest - fewest)
        for amount, base in zip(amounts, self._bases(), strict=True):
            packed = packed * base + amount
        total = model.new_int_var(0, math.prod(self._bases()), "irregularity")
        model.add(total >= packed)
        return total
