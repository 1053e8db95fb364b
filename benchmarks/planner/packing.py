"""Packings of global batches: against other methods with the same search, and against what is usual.

The other methods are written from their papers. All take a whole batch, so nothing may wait for a later step.
Where a method leaves the distribution over replicas open, the microbatches go to the replicas in turn, as
data loaders do. What is usual: microbatches of equal tokens in the order of arrival, dealt to the replicas in
turn, run by a plan for the mean microbatch.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.packing.arrange import Arrangement, Packer, Replicas, dealt, equal_tokens
from zbv_solver.packing.batch import Batch, parse_batch
from zbv_solver.packing.packing import Packing, pack, packer_of, plans_of, step_time
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate

from benchmarks.findings import Finding, at_least
from benchmarks.planner.lengths import PackingInstance

LEAST_GAIN_PERCENT = 15.0
"""On batches with a long tail, against what is usual."""
USUAL = "equal tokens, given order, mean plan"
HEADER = (
    f"{'batch':27}{'step':>10}{'gap':>7}{'m':>5}{'s':>6}"
    f"{'ff':>7}{'eq':>7}{'bw':>7}{'dp':>7}{'mean':>8} {'1f1b':>8}\n"
)
"""Step, gap to the bound over all packings, microbatches, seconds; then by how many percent the step is
shorter than those of first-fit, equal-tokens, balanced-work, dynamic-program, and of the mean plan and 1F1B
in the given order. A star: that one exceeds the memory limit."""


class GivenOrder(NamedTuple):
    """The step of the slowest replica, and whether every replica keeps the memory limit."""

    step_time: float
    fits: bool


def packing_table(
    chosen: Sequence[PackingInstance], options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Pack, print a row per batch, and return the gains."""
    write(HEADER)
    findings = []
    for each in chosen:
        batch = parse_batch(each.document())
        found = pack(batch, options)
        others = [plans_of(batch, each, options) for each in other_packings(batch)]
        usual = in_given_order(batch, options)
        gain = shorter(found.step_time, usual[0].step_time)
        write(_row(each.name, found, [*map(step_time, others)], usual))
        target = at_least(LEAST_GAIN_PERCENT) if each.law.name == "tail" else None
        findings.append(Finding(f"{each.name}: shorter than {USUAL}", gain, "%", target))
    return findings


def other_packings(batch: Batch) -> list[Arrangement]:
    """What the methods of :data:`PACKERS` make of a batch."""
    packer = packer_of(batch)
    return [Arrangement.of(packer, method(packer)) for method in PACKERS.values()]


def in_given_order(batch: Batch, options: SearchOptions) -> tuple[GivenOrder, GivenOrder]:
    """Steps of equal tokens in the given order: by plans for the mean microbatch, and by 1F1B."""
    # microbatches of equal tokens in the given order, dealt to the replicas in turn
    problems = [batch.problem_of(contents) for contents in equal_tokens(packer_of(batch))]
    planned = [(problem, search(problem.averaged(), options).orders) for problem in problems]
    return _given_order(planned), _given_order([baseline("1f1b", problem) for problem in problems])


def _given_order(replicas: Sequence[tuple[Problem, Orders]]) -> GivenOrder:
    timings = [(problem, evaluate(without_limit(problem), orders)) for problem, orders in replicas]
    fits = [
        not any(map(exceeds, timing.peak_memory, problem.memory.limit or ())) for problem, timing in timings
    ]
    return GivenOrder(
        max(objective_value(problem.objective, timing) for problem, timing in timings), all(fits)
    )


def shorter(step: float, than: float) -> float:
    """By how many percent a step is shorter than another."""
    return 100 * (1 - step / than)


def _row(name: str, found: Packing, others: Sequence[float], usual: Sequence[GivenOrder]) -> str:
    microbatches = sum(len(each.microbatches) for each in found.replicas)
    gains = [shorter(found.step_time, step) for step in others]
    given = [f"{shorter(found.step_time, each.step_time):8.1f}{' ' if each.fits else '*'}" for each in usual]
    return (
        f"{name:27}{found.step_time:10.4g}{found.gap:7.1%}{microbatches:5}{found.seconds:6.1f}"
        f"{''.join(f'{gain:7.1f}' for gain in gains)}{''.join(given)}\n"
    )


Contents = list[list[int]]
_MOST_LIMITS = 48
"""Values of the largest microbatch that the dynamic program tries."""
_MOST_SEQUENCES = 512
"""Of a microbatch of the dynamic program. It bounds time and memory for batches of very short sequences."""


def first_fit(packer: Packer) -> Replicas:
    """Each sequence, in the given order, into the first microbatch with room (Johnson 1973)."""
    made: Contents = []
    sums: list[tuple[int, int]] = []
    for index, length in enumerate(packer.lengths):
        grown = ((tokens + length, squares + length * length) for tokens, squares in sums)
        place = next((place for place, each in enumerate(grown) if packer.fits_sums(*each)), len(made))
        if place == len(made):
            made.append([])
            sums.append((0, 0))
        made[place].append(index)
        sums[place] = sums[place][0] + length, sums[place][1] + length * length
    return dealt(packer, made)


def balanced_work(packer: Packer) -> Replicas:
    """WLB-LLM's heuristic packing with variable lengths (Wang et al. 2025, arXiv 2503.17924).

    The longest sequence first, each into the microbatch with the least work so far, or, if it is too large
    for that, into the one with the fewest tokens. There are as many microbatches as :func:`equal_tokens`
    makes. WLB-LLM keeps outliers and what fits nowhere for a later step; here the latter forms a further
    microbatch.
    """
    made: Contents = [[] for _ in range(sum(map(len, equal_tokens(packer))))]
    sums, work = [(0, 0)] * len(made), [0.0] * len(made)
    for index in by_length(packer.lengths):
        length = packer.lengths[index]
        lightest = min(range(len(made)), key=lambda place: (work[place], place))
        shortest = min(range(len(made)), key=lambda place: (sums[place], place))
        for place in (lightest, shortest):
            tokens, squares = sums[place][0] + length, sums[place][1] + length * length
            if not made[place] or packer.fits_sums(tokens, squares):
                break
        else:
            place, tokens, squares = len(made), length, length * length
            made.append([])
            sums.append((0, 0))
            work.append(0.0)
        made[place].append(index)
        sums[place], work[place] = (tokens, squares), packer.costs.work(tokens, squares)
    return dealt(packer, [contents for contents in made if contents])


def dynamic_program(packer: Packer) -> Replicas:
    """DynaPipe's dynamic program for microbatches (Jiang et al. 2023, arXiv 2311.10418).

    Sequences are sorted by length and cut into consecutive microbatches. For every limit on the longest
    microbatch, a dynamic program minimises the sum of all; the best limit minimises (stages - 1) · longest
    / chunks + sum / replicas. Largest differencing distributes the microbatches.
    """
    order = by_length(packer.lengths)[::-1]
    times = _times(packer, order)
    chunks = len(packer.costs.stages_of[0])
    stages = len(packer.costs.stages_of) * chunks
    best: tuple[float, list[int]] | None = None
    for longest in _limits(times):
        total, cuts = _least_sum(times, longest)
        value = (stages - 1) * longest / chunks + total / packer.replicas
        if cuts and (best is None or value < best[0]):
            best = value, cuts
    cuts = [] if best is None else best[1]
    made = [order[first:last] for first, last in zip([0, *cuts], cuts, strict=False)]
    return largest_differencing(packer, made)


def _times(packer: Packer, order: Sequence[int]) -> list[FloatArray]:
    """Work of the microbatches that begin at each place of the order, by their last place."""
    lengths = np.array([packer.lengths[index] for index in order], dtype=np.float64)
    sums = np.stack([np.concatenate([[0.0], np.cumsum(lengths**power)]) for power in (1, 2)])
    tokens, times = sums[0], []
    for first in range(len(order)):
        # Needs grow with the last place, so those that fit come first. One sequence always fits.
        last = int(np.searchsorted(tokens, tokens[first] + packer.capacity, side="right")) - 1
        last = max(first + 1, min(last, first + _MOST_SEQUENCES))
        own = sums[:, first + 1 : last + 1] - sums[:, first : first + 1]
        fitting = bisect_left(
            range(1, own.shape[1]), True, key=lambda place: not packer.fits_sums(*own[:, place])
        )
        times.append(_works(packer, own[:, : 1 + fitting]))
    return times


def _works(packer: Packer, sums: FloatArray) -> FloatArray:
    """The work of the busiest rank for microbatches (2, n): tokens and squares."""
    load = packer.costs.load
    works: FloatArray = (load[:, :1] + load[:, 1:] @ sums).max(axis=0)
    return works


def _limits(times: Sequence[FloatArray]) -> list[float]:
    """Limits on the longest microbatch: quantiles of all times, and the longest that one sequence needs."""
    least = max(float(row[0]) for row in times)
    values = np.concatenate(times)
    values = np.unique(values[values >= least])
    places = np.unique(np.linspace(0, len(values) - 1, _MOST_LIMITS).round().astype(int))
    return [float(value) for value in values[places]]


def _least_sum(times: Sequence[FloatArray], longest: float) -> tuple[float, list[int]]:
    """The least sum of consecutive microbatches, none longer than the limit, and the ends of these."""
    count = len(times)
    total, before = np.full(count + 1, math.inf), np.zeros(count + 1, dtype=int)
    total[0] = 0.0
    for first in range(count):
        row = times[first]
        fitting = int(np.searchsorted(row, longest, side="right"))
        ends = slice(first + 1, first + 1 + fitting)
        reached = total[first] + row[:fitting]
        better = reached < total[ends]
        total[ends] = np.where(better, reached, total[ends])
        before[ends][better] = first
    if not math.isfinite(total[count]):
        return math.inf, []
    cuts = [count]
    while before[cuts[-1]] > 0:
        cuts.append(int(before[cuts[-1]]))
    return float(total[count]), cuts[::-1]


def largest_differencing(packer: Packer, made: Contents) -> Replicas:
    """Microbatches on replicas by the largest differencing method for several sets (Karmarkar and Karp 1982).

    Partial partitions wait in a heap, by the difference between their largest and smallest sum; the two with
    the largest differences are joined, the largest set of one with the smallest of the other.
    """
    made = [list(contents) for replica in dealt(packer, made) for contents in replica]
    heap: list[tuple[float, int, list[tuple[float, Contents]]]] = []
    for place, contents in enumerate(made):
        work = packer.costs.work(*_sums(packer, contents))
        others: list[tuple[float, Contents]] = [(0.0, []) for _ in range(packer.replicas - 1)]
        heapq.heappush(heap, (-work, place, [*others, (work, [contents])]))
    place = len(made)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [
            (sum_one + sum_other, [*set_one, *set_other])
            for (sum_one, set_one), (sum_other, set_other) in zip(one, reversed(other), strict=True)
        ]
        joined.sort(key=lambda each: each[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], place, joined))
        place += 1
    sets = heap[0][2]
    if not all(each for _, each in sets):
        return dealt(packer, made)  # microbatches that cost nothing may leave a replica without any
    return tuple(tuple(tuple(contents) for contents in each) for _, each in sets)


def _sums(packer: Packer, contents: Sequence[int]) -> tuple[int, int]:
    """Tokens and squares."""
    lengths = [packer.lengths[index] for index in contents]
    return sum(lengths), sum(length * length for length in lengths)


def by_length(lengths: Sequence[int]) -> list[int]:
    """Indices of sequences, the longest first; equally long ones in reverse of the given order."""
    return sorted(range(len(lengths)), key=lambda index: (lengths[index], index), reverse=True)


PACKERS: dict[str, Callable[[Packer], Replicas]] = {
    "first-fit": first_fit,
    "equal-tokens": equal_tokens,
    "balanced-work": balanced_work,
    "dynamic-program": dynamic_program,
}
