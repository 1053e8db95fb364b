"""Bounds by the paths of one or two microbatches that others precede, follow or overtake.

Strong where few microbatches are much larger than the others: the path of one may take longer than the work
of any rank. The proofs are in PROOFS.md, sections 8 and 13.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.problem import Problem

KINDS = 24
"""Kinds of microbatches that pairs are made of: those with the strongest bounds alone."""
TURNS = 3
"""Turns that pairs are looked at; a placement V has no more."""


@dataclass(frozen=True, eq=False)
class Passing:
    """What microbatches of K kinds need to pass another one in the window of a rank."""

    paths: MicrobatchPaths
    """Lemma 43."""
    count: IntArray
    """(K,) number of microbatches."""
    first: int
    last: int
    """Positions of the rank's outermost stage."""
    turns: Sequence[int]
    """Positions between these whose next one is on the same rank."""
    delay: FloatArray
    """(K,) the least time for which one overtakes the other."""
    cost: FloatArray
    """(K,) the least time to precede, follow or overtake the other."""

    @property
    def forward(self) -> FloatArray:
        """(K,) length of the first position."""
        lengths: FloatArray = self.paths.length[self.first]
        return lengths

    @property
    def rest(self) -> FloatArray:
        """(K,) length of the rest after the last position."""
        lengths: FloatArray = self.paths.rest[self.first]
        return lengths

    @property
    def after(self) -> FloatArray:
        """(K,) length of the last position with the rest."""
        lengths: FloatArray = self.paths.length[self.last] + self.rest
        return lengths

    def path(self, kind: IntArray, start: int, end: int) -> FloatArray:
        """Time from the start of a position to the end of another one, of each of the kinds given."""
        paths = self.paths
        times: FloatArray = paths.start[end, kind] + paths.length[end, kind] - paths.start[start, kind]
        return times

    def alone(self) -> float:
        """The bound of the best microbatch: Lemma 48."""
        return float(self._alone().max())

    def _alone(self) -> FloatArray:
        kinds = np.arange(len(self.count))
        own = self.path(kinds, self.first, self.last) + self.rest
        values: FloatArray = own - self.cost + self.cost @ self.count
        return values

    def of_pairs(self) -> float:
        """The bound of the best pair, whichever of the two comes first: Lemma 58."""
        strongest = np.argsort(-self._alone(), kind="stable")[:KINDS]
        one, two = np.meshgrid(strongest, strongest, indexing="ij")
        others = self.cost @ self.count - self.cost[one] - self.cost[two]
        leads = np.minimum(
            np.minimum(self.leaves_last(one, two), self.overtakes(one, two)), self.leads(one, two)
        )
        bound = np.minimum(leads, leads.T) + others
        return float(bound[(one != two) | (self.count[one] > 1)].max(initial=0.0))

    def leaves_last(self, one: IntArray, two: IntArray) -> FloatArray:
        """Bound where ``one`` comes first and leaves last."""
        path_of_two = self.path(two, self.first, self.last) + self.rest[two]
        path_of_one = self.path(one, self.first, self.last) + self.rest[one]
        return np.maximum(self.forward[one] + path_of_two + self.after[one], path_of_one + self.delay[two])

    def overtakes(self, one: IntArray, two: IntArray) -> FloatArray:
        """Bound where ``one`` comes and leaves first, but is behind somewhere."""
        path_of_one, path_of_two = (self.path(each, self.first, self.last) for each in (one, two))
        return np.maximum(
            path_of_one + self.delay[two] + self.rest[one] + self.after[two],
            self.forward[one] + path_of_two + self.delay[one] + self.rest[two],
        )

    def leads(self, one: IntArray, two: IntArray) -> FloatArray:
        """Bound where ``one`` is first everywhere, over all sets of turns at which ``two`` comes between."""
        least = np.full(one.shape, np.inf)
        for chosen in product((False, True), repeat=len(self.turns)):
            within = tuple(turn for turn, is_within in zip(self.turns, chosen, strict=True) if is_within)
            least = np.minimum(least, self.leads_within(one, two, within))
        return least

    def leads_within(self, one: IntArray, two: IntArray, within: Collection[int]) -> FloatArray:
        """Bound where ``one`` is first everywhere, and ``two`` comes between at some of the turns."""
        length = self.paths.length
        path_of_one = self.path(one, self.first, self.last) + self.rest[one] + self.after[two]
        path_of_two = self.forward[one] + self.path(two, self.first, self.last) + self.rest[two]
        longest: FloatArray = np.maximum(
            path_of_one + sum(length[turn, two] for turn in within),
            path_of_two + sum(length[turn + 1, one] for turn in within),
        )
        for change in set(self.turns) - set(within):
            both = self.path(one, self.first, change + 1) + self.path(two, change, self.last) + self.rest[two]
            before = sum(length[turn, two] for turn in within if turn < change)
            behind = sum(length[turn + 1, one] for turn in within if turn > change)
            longest = np.maximum(longest, both + before + behind)
        return longest


def passing_of_ranks(problem: Problem) -> list[Passing]:
    """What microbatches need to pass another one, by rank: Lemmas 48 and 58."""
    paths, n = MicrobatchPaths.of(problem), problem.n_stages
    count = np.bincount(problem.arrays.kind_of)
    host = np.concatenate([problem.arrays.rank_of, problem.arrays.rank_of[::-1]])
    is_turn = host[:-1] == host[1:]
    delay = _delays(paths, count, is_turn)
    both = (paths.length[:-1] + paths.length[1:]) @ count
    ranks = []
    for stages in problem.placement.stages_of:
        first, last = stages[0], 2 * n - 1 - stages[0]
        turns = sorted((np.flatnonzero(is_turn[first:last]) + first).tolist(), key=lambda turn: -both[turn])
        least = delay[first:last].min(axis=0)
        after = paths.length[last] + paths.rest[first]
        cost = np.minimum(np.minimum(paths.length[first], after), least)
        ranks.append(Passing(paths, count, first, last, turns[:TURNS], least, cost))
    return ranks


def _delays(paths: MicrobatchPaths, count: IntArray, is_turn: FloatArray) -> FloatArray:
    """Time (2S - 1, K) for which a microbatch waits after a position if one of a kind overtakes it there."""
    transfer = np.diff(paths.start, axis=0) - paths.length[:-1]
    ahead = transfer.max(axis=1, keepdims=True) - transfer
    at, following = (
        np.maximum(own - np.maximum((ahead - other) * (1 + TINY), 0.0), 0.0)
        for own, other in ((paths.length[:-1], paths.length[1:]), (paths.length[1:], paths.length[:-1]))
    )
    # Of both, the one that proves more if all microbatches overtake there; on one rank, both count.
    delay = np.where((at @ count >= following @ count)[:, None], at, following)
    return np.where(is_turn[:, None], paths.length[:-1] + paths.length[1:], delay)
