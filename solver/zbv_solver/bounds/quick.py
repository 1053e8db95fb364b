"""The quick bound: the one-machine bound of every rank, with heads and tails that ignore memory.

Jackson's preemptive one-machine bound (Carlier 1982): every action of a rank is a job with a head (its
earliest start) and a tail (the time that must pass after its end). Heads and tails come from the path of a
microbatch through the stages and from the slowest action on this path. The proof is in PROOFS.md, section 1.

For ``makespan``, heads begin at the first start of all ranks, and tails end at the last end of all ranks. For
``span``, both begin and end on the rank whose window is bounded; another rank's W never enters a tail.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.problem.problem import Problem


def one_machine_bounds(problem: Problem) -> list[float]:
    """Jackson's bound of every rank: Lemma 7.

    Position k < S is F of stage k, and position k >= S is the backward of stage 2S-1-k, which has the length
    of the cheaper of I and B. The rest of the backward's cheapest work (mostly W) is not on the path of a
    microbatch: it is a separate job, without a tail.
    """
    costs = problem.arrays.of_equal()
    forward, inputs, weights, fused = costs.duration
    on_path = np.minimum(inputs, fused)
    rest = np.minimum(fused, inputs + weights) - on_path
    length = np.concatenate([forward, on_path[::-1]])
    transfer = costs.latency
    latency = np.concatenate([transfer, [0.0], transfer[::-1]])
    # When every position starts if one microbatch runs alone.
    start = np.concatenate([[0.0], np.cumsum(length[:-1] + latency)])
    bounds = []
    for stages in problem.placement.stages_of:
        own = np.array(stages, dtype=np.int64)
        exits = own if problem.objective == "span" else np.arange(problem.n_stages)
        origin = stages[0] if problem.objective == "span" else 0
        jobs = _jobs(start, length, rest, own, exits, origin, problem.microbatches)
        bounds.append(preemptive_bound(jobs[0], jobs[1], jobs[2]))
    return bounds


def preemptive_bound(heads: FloatArray, lengths: FloatArray, tails: FloatArray) -> float:
    """Jackson's bound of one machine with jobs (n,): Lemma 6."""
    return float(_one_machine(np.argsort(heads), heads, lengths, tails))


@compiled
def _jobs(
    start: FloatArray,
    length: FloatArray,
    rest: FloatArray,
    stages: IntArray,
    exits: IntArray,
    origin: int,
    m: int,
) -> FloatArray:  # pragma: no cover - compiled
    """Heads, lengths and tails (3, jobs) of a rank's jobs; every kind has a block of m columns."""
    n = len(rest)
    jobs = np.zeros((3, 3 * m * len(stages)))
    block = 0
    for stage in stages:
        for position in (stage, 2 * n - 1 - stage):
            slowest = 0.0
            for before in range(origin, position):
                slowest = max(slowest, length[before])
            for k in range(m):
                jobs[0, block + k] = start[position] - start[origin] + k * slowest
                jobs[1, block + k] = length[position]
            _tails(start, length, rest, exits, position, jobs[2, block : block + m])
            block += m
        # The rest becomes available when its virtual backward, in the block just written, has ended. Its
        # tail is 0.
        for k in range(m):
            jobs[0, block + k] = jobs[0, block - m + k] + length[2 * n - 1 - stage]
            jobs[1, block + k] = rest[stage]
        block += m
    return jobs


@compiled
def _tails(
    start: FloatArray, length: FloatArray, rest: FloatArray, exits: IntArray, position: int, tails: FloatArray
) -> None:  # pragma: no cover - compiled
    """Write the tails of a position's m microbatches, of which m-1 … 0 others follow: Lemma 7 (ii).

    Every exit gives a tail of path + microbatches · slowest action. The exit with the longest path nearly
    always has the slowest action too, and then the other exits need no loop over microbatches.
    """
    n, m, count = len(rest), len(tails), 0
    path, slowest = np.zeros(len(exits)), np.zeros(len(exits))
    end, after, slow, longest = start[position] + length[position], position + 1, 0.0, 0
    # Exits in descending order of stages have ascending positions, so `slow` is the largest length of the
    # positions between this one and the exit.
    for i in range(len(exits) - 1, -1, -1):
        out = 2 * n - 1 - exits[i]
        if out <= position:
            continue
        while after < out:
            slow = max(slow, length[after])
            after += 1
        path[count] = start[out] + length[out] + rest[exits[i]] - end
        slowest[count] = max(slow, length[out] + rest[exits[i]])
        if path[count] >= path[longest]:
            longest = count
        count += 1
    for i in range(count):
        if i == longest or slowest[i] > slowest[longest]:
            for k in range(m):
                tails[k] = max(tails[k], path[i] + (m - 1 - k) * slowest[i])


@compiled
def _one_machine(
    by_head: IntArray, heads: FloatArray, lengths: FloatArray, tails: FloatArray
) -> float:  # pragma: no cover
    """Largest end + tail of the preemptive schedule that always runs the job with the longest tail."""
    n = len(heads)
    queue = np.empty(n, np.int64)  # binary heap of job indices, longest tail on top
    left = lengths.copy()
    size, next_job, clock, worst = 0, 0, 0.0, 0.0
    # Every pass releases or completes a job, and the heap costs O(log n) per job: O(n log n) in all.
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
        # The next job may have a longer tail, so the current one runs only until its release.
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
