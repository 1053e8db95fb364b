"""Proven lower bounds: no order of the problem can do better.

Per rank, Jackson's preemptive one-machine bound (Carlier 1982): every action of the rank is a job with a
head (time that must pass before it can start) and a tail (time that must pass after it ends). Heads and
tails come from the path of a microbatch through the V and from the load of the slowest stage on that path.

For ``makespan`` heads begin at the first start of all ranks, and tails end at the last end of all. For
``span`` both begin and end on the rank itself, whose own window is being bounded; another rank's W never
enters a tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.jit import compiled
from zbv_solver.problem import Problem

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """A lower bound of the objective, and what proves it."""

    value: float
    reason: str


def lower_bound(problem: Problem) -> Bound:
    """The best simple bound of the problem's objective, in its time unit."""
    chain = _Chain(problem)
    best = Bound(0.0, "nothing to do")
    for rank in range(problem.pp_degree):
        heads, lengths, tails = chain.jobs(rank)
        value = float(_jackson(heads, lengths, tails))
        if value > best.value:
            best = Bound(value, f"one-machine bound of rank {rank}")
    return best


class _Chain:
    """Paths and bottlenecks along the V: forwards of stages 0 … S-1, then backwards S-1 … 0.

    Position k < S is F of stage k; position k >= S is the backward of stage 2S-1-k, whose share on the path
    is the cheaper of I and B. What of the backward's cheapest work is not on the path (W, mostly) is a job
    of its own without a tail.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        costs, n = problem.costs, problem.n_stages
        fused = np.array([costs.fused(stage) for stage in range(n)])
        split = np.array(costs.backward_input) + np.array(costs.backward_weight)
        on_path = np.minimum(np.array(costs.backward_input), fused)
        self.length = np.concatenate([costs.forward, on_path[::-1]])
        self.rest = np.minimum(fused, split) - on_path
        transfer = problem.arrays.transfer
        gaps = np.concatenate([transfer, [0.0], transfer[::-1]])
        # start[k]: start of position k when one microbatch runs alone.
        self.start = np.concatenate([[0.0], np.cumsum(self.length[:-1] + gaps)])

    def jobs(self, rank: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Heads, lengths and tails of a rank's jobs, k-th of every kind in execution order: each (jobs,)."""
        problem = self.problem
        n, m = problem.n_stages, problem.microbatches
        stages = problem.placement.stages_of[rank]
        if problem.objective == "span":
            origin, exits = stages[0], stages
        else:
            origin, exits = 0, tuple(range(n))
        order = np.arange(m, dtype=np.float64)
        heads, lengths, tails = [], [], []
        for stage in stages:
            for position in (stage, 2 * n - 1 - stage):
                head = self._head(origin, position) + order * self._slowest(origin, position)
                tail = self._tail(position, exits, order[::-1])
                heads.append(head)
                lengths.append(np.full(m, self.length[position]))
                tails.append(tail)
            heads.append(heads[-1] + self.length[position])
            lengths.append(np.full(m, self.rest[stage]))
            tails.append(np.zeros(m))
        return np.concatenate(heads), np.concatenate(lengths), np.concatenate(tails)

    def _head(self, origin: int, position: int) -> float:
        return float(self.start[position] - self.start[origin])

    def _slowest(self, origin: int, position: int) -> float:
        """Longest action before ``position``: the k-th microbatch comes k of those later."""
        return float(self.length[origin:position].max(initial=0.0))

    def _tail(self, position: int, exits: tuple[int, ...], remaining: FloatArray) -> FloatArray:
        """From the end of a position to the end of everything, while ``remaining`` microbatches follow it."""
        n = self.problem.n_stages
        end = self.start[position] + self.length[position]
        tail = np.zeros(len(remaining))
        for stage in exits:
            out = 2 * n - 1 - stage
            if out <= position:
                continue
            path = self.start[out] + self.length[out] + self.rest[stage] - end
            after = self.length[position + 1 : out + 1].copy()
            after[-1] += self.rest[stage]
            tail = np.maximum(tail, path + remaining * after.max())
        return tail


@compiled
def _jackson(heads: FloatArray, lengths: FloatArray, tails: FloatArray) -> float:  # pragma: no cover
    """Largest end + tail of the preemptive schedule that always runs the job with the longest tail."""
    n = len(heads)
    by_head = np.argsort(heads)
    queue = np.empty(n, np.int64)  # binary heap of job indices, longest tail on top
    left = lengths.copy()
    size, next_job, clock, worst = 0, 0, 0.0, 0.0
    while next_job < n or size > 0:
        if size == 0:
            clock = max(clock, heads[by_head[next_job]])
        while next_job < n and heads[by_head[next_job]] <= clock:
            child = size
            queue[child] = by_head[next_job]
            size += 1
            next_job += 1
            while child > 0 and tails[queue[(child - 1) // 2]] < tails[queue[child]]:
                parent = (child - 1) // 2
                queue[parent], queue[child] = queue[child], queue[parent]
                child = parent
        job = queue[0]
        until = heads[by_head[next_job]] if next_job < n else np.inf
        if clock + left[job] > until:
            left[job] -= until - clock
            clock = until
            continue
        clock += left[job]
        worst = max(worst, clock + tails[job])
        size -= 1
        queue[0] = queue[size]
        parent = 0
        while True:
            child = 2 * parent + 1
            if child >= size:
                break
            if child + 1 < size and tails[queue[child + 1]] > tails[queue[child]]:
                child += 1
            if tails[queue[parent]] >= tails[queue[child]]:
                break
            queue[parent], queue[child] = queue[child], queue[parent]
            parent = child
    return worst
