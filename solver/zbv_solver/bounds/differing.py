"""Bounds of problems whose microbatches differ and may run in any order.

Every microbatch has its own path through the stages and back, so every action has its own head and tail.
Nothing is known about the order: microbatches cannot be relabelled. The proofs are in PROOFS.md, section 8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.ramps import preemptive_bound
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.problem import Problem


class MicrobatchPaths(NamedTuple):
    """What the microbatches of every kind do, each alone, for K kinds: Lemma 43."""

    length: FloatArray
    """(2S, K) of position k < S, F of stage k, and of position k >= S, the virtual backward of stage
    2S-1-k."""
    rest: FloatArray
    """(S, K) length of the virtual rest of a stage."""
    start: FloatArray
    """(2S, K) start of every position if the microbatch starts at 0 and never waits."""

    @classmethod
    def of(cls, problem: Problem) -> MicrobatchPaths:
        """The paths of all kinds, with the virtual operations of Lemma 5: Lemma 43."""
        forward, inputs, weights, fused = problem.arrays.duration
        on_path = np.minimum(inputs, fused)
        rest = np.minimum(fused, inputs + weights) - on_path
        length = np.concatenate([forward, on_path[::-1]])
        transfer = problem.arrays.latency
        between = np.concatenate(
            [transfer, np.zeros_like(transfer, shape=(1, transfer.shape[1])), transfer[::-1]]
        )
        start = np.zeros_like(length)
        np.cumsum(length[:-1] + between, axis=0, out=start[1:])
        return cls(length, rest, start)

    def tails(self, exits: list[int]) -> FloatArray:
        """Time (2S, K) from the end of a position to the last end at the stages ``exits``: Lemma 43."""
        n = len(self.rest)
        end = self.start + self.length
        last = np.full_like(end, -np.inf)
        for stage in exits:
            last[2 * n - 1 - stage] = end[2 * n - 1 - stage] + self.rest[stage]
        latest = np.maximum.accumulate(last[::-1], axis=0)[::-1]
        return np.maximum(latest - end, 0.0)


def differing_machine_bounds(problem: Problem) -> list[float]:
    """Jackson's bound of every rank, with heads and tails of every microbatch's own path: Lemma 43."""
    paths, n = MicrobatchPaths.of(problem), problem.n_stages
    is_span = problem.objective == "span"
    kind_of = problem.arrays.kind_of
    tails = None if is_span else paths.tails(list(range(n)))
    bounds = []
    for stages in problem.placement.stages_of:
        own = list(stages)
        after = tails if tails is not None else paths.tails(own)
        origin = paths.start[own[0]] if is_span else 0.0
        backwards = [2 * n - 1 - stage for stage in own]
        visits = own + backwards
        head = paths.start[visits] - origin
        ready = head[len(own) :] + paths.length[backwards]
        rest = paths.rest[own]
        jobs = np.stack(
            [
                np.concatenate([head, ready]),
                np.concatenate([paths.length[visits], rest]),
                np.concatenate([after[visits], np.zeros_like(rest)]),
            ]
        )[:, :, kind_of].reshape(3, -1)
        bounds.append(preemptive_bound(jobs[0], jobs[1], jobs[2]))
    return bounds
