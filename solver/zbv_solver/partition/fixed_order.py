"""A fixed order as a function of the costs of its stages.

The durations of actions do not change which action waits for which. So the graph of an order is built once,
any costs are then timed by longest paths in it (:mod:`zbv_solver.timing.start_times`). The span is the
largest of many sums: the lengths of cycles of critical paths. :class:`Terms` says how often every duration
and every transfer occurs in one of them, which makes it a linear function of the costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, F, I, Objective, Problem, W
from zbv_solver.timing.start_times import Graph, execute, longest_paths, policy_iteration


@dataclass(frozen=True, eq=False)
class Terms:
    """A cycle of critical paths: ``count · durations + transfers · latencies <= length * objective``."""

    count: FloatArray
    """(4, S) how often an action of every letter and stage occurs."""
    transfers: FloatArray
    """(S-1,) how often every boundary is crossed."""
    length: int
    """Number of paths: a cycle of k paths is k times the mean that bounds the span."""

    def value(self, duration: FloatArray, latency: FloatArray) -> float:
        """The bound on the objective that these terms give for costs (4, S) and (S-1,)."""
        return float((self.count * duration).sum() + self.transfers @ latency) / self.length

    @property
    def key(self) -> bytes:
        """Equal for equal terms."""
        return self.count.tobytes() + self.transfers.tobytes() + bytes([self.length])


@dataclass(frozen=True, eq=False)
class FixedOrder:
    """The order of a problem, for the costs of other cuts of the same layers."""

    orders: Orders
    graph: Graph
    """The order as it executes, with the costs of one cut."""
    letter: IntArray
    stage: IntArray
    """(n,) of every action."""
    hosted: IntArray
    """(p, chunks) stages of every rank."""
    objective: Objective

    @classmethod
    def of(cls, problem: Problem, orders: Orders) -> FixedOrder:
        """The order of a problem; raises :class:`InvalidPlan` when it deadlocks."""
        return cls(
            orders,
            execute(problem, orders),
            orders.letter.astype(np.int64),
            orders.stage.astype(np.int64),
            np.array(problem.placement.stages_of),
            problem.objective,
        )

    @cached_property
    def kind(self) -> IntArray:
        """(n,) number of letter and stage: the index in a flat (4, S)."""
        return self.letter * self.hosted.size + self.stage

    @cached_property
    def boundary(self) -> IntArray:
        """(n,) the boundary that the remote input of an action crosses, or -1."""
        crossed = np.where(self.letter == F, self.stage - 1, self.stage)
        return np.where(self.graph.source >= 0, crossed, -1)

    def value(self, duration: FloatArray, latency: FloatArray) -> float:
        """The objective of stages with costs (4, S) and (S-1,)."""
        graph = self._with(duration, latency)
        release = np.zeros(len(graph.offset) - 1)
        if self.objective == "span":
            return float(policy_iteration(graph, release, ROUNDING))
        _, length = longest_paths(graph, release)
        return float(length[graph.offset[1:] - 1].max())

    def critical(self, duration: FloatArray, latency: FloatArray) -> Iterator[Terms]:
        """Terms that bound the objective from below for all costs (Lemma 51); the first is exact for these.

        For a span, the others are every rank's longest path from its own first start to its own last end.
        """
        graph = self._with(duration, latency)
        p = len(graph.offset) - 1
        if self.objective == "makespan":
            origin, length = longest_paths(graph, np.zeros(p))
            last = int(graph.offset[1:][np.argmax(length[graph.offset[1:] - 1])]) - 1
            yield self._terms(graph, [(origin, length, last)])
            return
        # `paths[r]` are the longest paths from the first start of rank r.
        paths = []
        for rank in range(p):
            release = np.full(p, -np.inf)
            release[rank] = 0.0
            paths.append(longest_paths(graph, release))
        lasts = graph.offset[1:] - 1
        between = np.array(
            [
                np.where(origin[lasts] == rank, length[lasts], -np.inf)
                for rank, (origin, length) in enumerate(paths)
            ]
        )
        cycle = largest_mean_cycle(between)
        for ranks in (cycle, *([rank] for rank in range(p))):
            ends = [*ranks[1:], ranks[0]]
            yield self._terms(
                graph, [(*paths[rank], int(lasts[end])) for rank, end in zip(ranks, ends, strict=True)]
            )

    def path_of(self, rank: int, duration: FloatArray, latency: FloatArray) -> Terms:
        """A rank's longest path from its own first start to its own last end, for these costs (Lemma 51)."""
        graph = self._with(duration, latency)
        release = np.full(len(graph.offset) - 1, -np.inf)
        release[rank] = 0.0
        return self._terms(graph, [(*longest_paths(graph, release), int(graph.offset[rank + 1]) - 1)])

    def load_of(self, rank: int) -> Terms:
        """The path through all actions of a rank."""
        part = self.orders.slice_of(rank)
        count = np.zeros((4, self.hosted.size))
        np.add.at(count, (self.letter[part], self.stage[part]), 1)
        return Terms(count, np.zeros(max(0, self.hosted.size - 1)), 1)

    def _with(self, duration: FloatArray, latency: FloatArray) -> Graph:
        crossing = np.where(self.boundary >= 0, latency[self.boundary] if len(latency) else 0.0, -1.0)
        return self.graph._replace(duration=duration[self.letter, self.stage], latency=crossing)

    def _terms(self, graph: Graph, paths: list[tuple[IntArray, FloatArray, int]]) -> Terms:
        """Count the terms of longest paths, each given by a sweep and its last action."""
        stages = self.hosted.size
        count, transfers = np.zeros(4 * stages), np.zeros(max(0, stages - 1))
        for origin, length, last in paths:
            _tally(graph, (origin, length), last, self.kind, self.boundary, count, transfers)
        return Terms(count.reshape(4, stages), transfers, len(paths))

    def moments(self) -> tuple[IntArray, FloatArray]:
        """What ranks hold at local peaks: ranks (n,), and numbers (n, 2, chunks) of microbatches.

        The first row counts those after F, the second those between I and W, whose deltas add up to what an
        F and an I leave. Both amounts are at least 0.
        """
        ranks, found = [], []
        for rank, stages in enumerate(self.hosted):
            part = self.orders.slice_of(rank)
            letter, stage = self.letter[part], self.stage[part]
            # An F adds to what was held before it, and a W or B only takes from it.
            is_peak = np.append(letter[1:] != F, True) & (letter != W) & (letter != B)
            numbers = np.empty((int(is_peak.sum()), 2, len(stages)))
            for chunk, own in enumerate(stages):
                is_own = stage == own
                inputs = is_own & ((letter == I) | (letter == B))
                weights = is_own & ((letter == W) | (letter == B))
                begun, passed, done = (
                    np.cumsum(each)[is_peak] for each in (is_own & (letter == F), inputs, weights)
                )
                numbers[:, 0, chunk], numbers[:, 1, chunk] = begun - passed, passed - done
            ranks.append(np.full(len(numbers), rank))
            found.append(numbers)
        return np.concatenate(ranks), np.concatenate(found)

    @cached_property
    def held(self) -> tuple[IntArray, FloatArray]:
        """The moments with numbers that no other numbers of the rank exceed."""
        ranks, numbers = self.moments()
        found = [
            _maximal(numbers[ranks == rank].reshape(-1, numbers[0].size)) for rank in range(len(self.hosted))
        ]
        return (
            np.repeat(np.arange(len(found)), [len(each) for each in found]),
            np.concatenate(found).reshape(-1, *numbers.shape[1:]),
        )


@compiled
def _tally(
    graph: Graph,
    paths: tuple[IntArray, FloatArray],
    last: int,
    kind: IntArray,
    boundary: IntArray,
    count: FloatArray,
    crossed: FloatArray,
) -> None:  # pragma: no cover - compiled
    """Count the actions and the transfers of the longest path to ``last``.

    ``count`` grows at the kinds (n,) of the path's actions, ``crossed`` at the boundaries (n,) over which
    they received their inputs, if the path came from there. ``paths`` are those of
    :func:`.longest_paths`.
    """
    origin, length = paths
    offset, rank = graph.offset, origin[last]
    at = last
    begin = offset[np.searchsorted(offset, at, side="right") - 1]  # of the rank that hosts `at`
    while True:
        count[kind[at]] += 1.0
        if at == offset[rank]:
            break
        along = length[at - 1] if at > begin and origin[at - 1] == rank else -np.inf
        feed = graph.source[at]
        # Like the longest paths: a path along the rank stays on a tie.
        if feed >= 0 and origin[feed] == rank and length[feed] + graph.latency[at] > along:
            crossed[boundary[at]] += 1.0
            at = feed
            begin = offset[np.searchsorted(offset, at, side="right") - 1]
        else:
            at -= 1


def _maximal(rows: FloatArray) -> FloatArray:
    """The distinct rows (n, k) that no other row exceeds or equals everywhere."""
    left, kept = np.unique(rows, axis=0)[::-1], []
    while len(left):  # in descending order, so no later row exceeds the first
        kept.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(kept)


def largest_mean_cycle(weight: FloatArray) -> list[int]:
    """The nodes of a cycle with the largest mean weight (Karp 1978); ``weight`` is (p, p), -inf for no arc.

    Every node must have an arc into it that lies on some cycle.
    """
    p = len(weight)
    best, parents = [np.zeros(p)], []
    for _ in range(p):
        reached = best[-1][:, None] + weight
        parents.append(reached.argmax(axis=0))
        best.append(reached.max(axis=0))
    means = [min((best[p][node] - best[k][node]) / (p - k) for k in range(p)) for node in range(p)]
    at = int(np.argmax(means))
    walk = [at]
    for parent in reversed(parents):
        walk.append(int(parent[walk[-1]]))
    walk.reverse()
    cycles = [
        walk[begin:end]
        for begin in range(p)
        for end in range(begin + 1, p + 1)
        if walk[begin] == walk[end] and len(set(walk[begin:end])) == end - begin
    ]

    def mean(cycle: list[int]) -> float:
        return float(sum(weight[a, b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))) / len(
            cycle
        )

    return max(cycles, key=mean)
