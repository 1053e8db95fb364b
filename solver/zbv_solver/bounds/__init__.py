"""Proven lower bounds: no order of the problem can do better.

``lower_bound`` is the best of three bounds per rank: Jackson's one-machine bound with heads and tails that
ignore memory (:func:`one_machine_bounds`); the same with those that take the memory of all ranks into account
(:mod:`.heads`); and the rank's load plus the idle time that its ramps force (:mod:`.ramps`). A span is also
bounded by what every other rank must do within the rank's window. Where memory is tight, all schedules of a
few ranks (:mod:`.few_ranks`) prove more. The proofs are in PROOFS.md. This package constructs no orders.

Where microbatches differ, none of this holds but the one-machine bound, with the path of every microbatch
(:mod:`.differing`). The paths of one or two large microbatches, with those that pass them
(:mod:`.overtaking`), the idle time of a rank's ramps (:mod:`.differing_ramps`) and prices of the memory that
every microbatch holds while it is away (:mod:`.away_prices`) prove more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zbv_solver.bounds.copies import engine_bounds
from zbv_solver.bounds.directions import DOWN, FREED_BY_REST, HELD, REST_AFTER, UP, Direction, directions
from zbv_solver.bounds.pairs import pair_bounds
from zbv_solver.bounds.ramps import (
    Window,
    machine_bound,
    other_rank_bound,
    preemptive_bound,
    ramp_bound,
)
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.problem.problem import Problem

__all__ = ["Bound", "BoundEffort", "lower_bound"]

BoundEffort = Literal["quick", "full", "thorough"]

HEADS = 50_000
"""Heads and tails that a bound may compute, a microsecond each. If all of them are too many, the bound looks
only at the first and last microbatches, and for ``span`` only at the ranks with the best quick bounds."""


TIGHT = 0.7
"""Share of memory in use from which on it may bind."""


@dataclass(frozen=True)
class Bound:
    """A lower bound of the objective, and the argument that proves it."""

    value: float
    reason: str


def lower_bound(
    problem: Problem,
    effort: BoundEffort = "full",
    enough: float = math.inf,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Bound:
    """The best bound of the problem's objective, in its time unit, or one of at least ``enough``: Lemma 23.

    Once ``is_stopped`` is true, it is the best bound so far.

    ``quick`` takes about a millisecond at 16 ranks and 64 microbatches; ``full`` ten to a hundred times
    that, and is much stronger where memory is tight. ``thorough`` adds all schedules of a few ranks
    (:mod:`.few_ranks`); it takes up to three seconds and is stronger still at half of 1F1B's memory or less.
    Where microbatches differ, ``full`` takes 0.3 seconds there, and ``thorough``, with finer groups of
    microbatches on more ranks, up to a second. With copies to the host, only
    :func:`.engine_bounds` knows the memory that they free.
    """
    best = Bound(0.0, "nothing to do")
    given, copies = problem, problem.copies
    if problem.communication is not None:
        for rank, value in enumerate(pair_bounds(problem)):
            if value > best.value:
                best = Bound(value, f"load and first ramp of rank {rank}, with pairs")
        problem = problem.with_forwards_shortened()  # no other bound knows pairs
    if copies is not None:
        for rank, value in enumerate(engine_bounds(problem, copies)):
            if value > best.value:
                best = Bound(value, f"memory and engines of rank {rank}")
        problem = problem.without_what_copies_move()  # no other bound knows copies
    if problem.is_equal:
        quick = one_machine_bounds(problem)
    else:
        from zbv_solver.bounds.differing import differing_machine_bounds  # few problems need it

        quick = differing_machine_bounds(problem)
    for rank, value in enumerate(quick):
        if value > best.value:
            best = Bound(value, f"one-machine bound of rank {rank}")
    if effort == "quick":
        return best
    if not problem.is_equal:
        return _best([best], _differing_bounds(problem, effort), enough, is_stopped)
    by_strength = sorted(range(problem.pp_degree), key=lambda rank: -quick[rank])
    full = _makespan_bounds if problem.objective == "makespan" else _span_bounds
    best = _best([best, *full(problem, by_strength)], iter(()), enough, is_stopped)
    if effort != "thorough":
        return best
    best = _best([best], _thorough_bounds(problem, is_stopped), enough, is_stopped)
    return _best([best], _flow_bounds(given, best.value, enough, is_stopped), enough, is_stopped)


def _best(
    known: list[Bound], further: Iterator[Bound], enough: float, is_stopped: Callable[[], bool]
) -> Bound:
    best = max(known, key=lambda bound: bound.value)
    while best.value < enough and not is_stopped() and (bound := next(further, None)) is not None:
        best = max(best, bound, key=lambda bound: bound.value)
    return best


def _differing_bounds(problem: Problem, effort: BoundEffort) -> Iterator[Bound]:
    from zbv_solver.bounds import differing_ramps  # few problems need these
    from zbv_solver.bounds.away_prices import FULL, THOROUGH, away_bounds
    from zbv_solver.bounds.overtaking import passing_of_ranks

    ranks = passing_of_ranks(problem)
    for rank, passing in enumerate(ranks):
        yield Bound(passing.alone(), f"one microbatch and those that pass it, on rank {rank}")
    for rank, passing in enumerate(ranks):
        yield Bound(passing.of_pairs(), f"two microbatches and those that pass them, on rank {rank}")
    ramps = differing_ramps.THOROUGH if effort == "thorough" else differing_ramps.FULL
    for rank, value in differing_ramps.ramp_bounds(problem, ramps):
        yield Bound(value, f"load and ramps of rank {rank}, with memory")
    for prices in (FULL, THOROUGH) if effort == "thorough" else (FULL,):
        for rank, value in away_bounds(problem, prices):
            yield Bound(value, f"memory of rank {rank} while microbatches are away")


def _flow_bounds(
    problem: Problem, known: float, enough: float, is_stopped: Callable[[], bool]
) -> Iterator[Bound]:
    if problem.pp_degree == 1 or (problem.communication is None and problem.copies is None):
        return
    from zbv_solver.bounds.flow import flow_bound  # few problems need it

    value = flow_bound(problem, known, enough, is_stopped)
    yield Bound(value, f"flow of microbatches through ranks 0 and {problem.pp_degree - 1}")


def _thorough_bounds(problem: Problem, is_stopped: Callable[[], bool]) -> Iterator[Bound]:
    if not _memory_may_bind(directions(problem)[0]):
        return
    from zbv_solver.bounds.few_ranks import few_ranks_bounds  # few problems need it

    for ranks, value in few_ranks_bounds(problem, is_stopped):
        yield Bound(value, f"all schedules of ranks {', '.join(map(str, ranks))}")


def _memory_may_bind(direction: Direction) -> bool:
    """Whether some rank holds nearly all of its memory at every time if the busiest rank never idles.

    One microbatch holds memory at least from each F to the end of its backward and its W, along the shortest
    path. Much below 1, memory does not delay anything in the steady state.
    """
    chunks = direction.stages.shape[1]
    load = float(direction.work.sum(axis=(1, 2)).max())
    for rank, capacity in enumerate(direction.capacity):
        paths, work, memory = _shortest_gaps(direction, rank), direction.work[rank], direction.memory[rank]
        away = np.array([paths[j : 2 * chunks - 1 - j].sum() for j in range(chunks)]) + work[DOWN]
        held = memory[HELD] @ away + memory[FREED_BY_REST] @ work[REST_AFTER]
        if float(held) > TIGHT * float(capacity) * load:
            return True
    return False


def _shortest_gaps(direction: Direction, rank: int) -> FloatArray:
    """The least time from the start of every visit of a rank to that of the next one: Lemma 10."""
    p, chunks = direction.stages.shape
    n = p * chunks
    up, down = np.zeros(n), np.zeros(n)
    up[direction.stages], down[direction.stages] = direction.work[:, UP], direction.work[:, DOWN]
    latency = direction.latency[: n - 1]
    steps = np.concatenate([up + np.append(latency, 0.0), down[::-1] + np.append(latency[::-1], 0.0)])
    start = np.concatenate([[0.0], np.cumsum(steps)])
    own = direction.stages[rank]
    return np.diff(start[np.concatenate([own, 2 * n - 1 - own[::-1]])])


def _known(problem: Problem) -> int:
    """Number of microbatches to look at on either end: at least those that fill the pipeline."""
    affordable = HEADS // (4 * problem.n_stages)
    return min(problem.microbatches, max(affordable, 3 * problem.pp_degree))


def _makespan_bounds(problem: Problem, ranks: list[int]) -> list[Bound]:
    window = Window.of(*directions(problem), None, _known(problem), problem.microbatches)
    return [bound for rank in ranks for bound in _rank_bounds(window, rank)]


def _span_bounds(problem: Problem, ranks: list[int]) -> list[Bound]:
    forwards, backwards = directions(problem)
    n = _known(problem)
    bounds = []
    for rank in ranks[: max(1, HEADS // (4 * problem.n_stages * n))]:
        window = Window.of(forwards, backwards, rank, n, problem.microbatches)
        bounds += _rank_bounds(window, rank)
        for other in range(problem.pp_degree):
            if other != rank:
                value = other_rank_bound(window, other)
                bounds.append(Bound(value, f"ramps of rank {other} in the span of rank {rank}"))
    return bounds


def _rank_bounds(window: Window, rank: int) -> list[Bound]:
    """Bounds of one rank's window; Jackson's needs the heads and tails of all microbatches."""
    bounds = [Bound(ramp_bound(window, rank), f"load and ramps of rank {rank}")]
    if window.heads.shape[2] == window.microbatches:
        bounds.append(Bound(machine_bound(window, rank), f"one-machine bound of rank {rank} with memory"))
    return bounds


def one_machine_bounds(problem: Problem) -> list[float]:
    """Jackson's bound of every rank, with heads and tails that ignore memory: Lemma 7.

    Every action of a rank is a job with a head (its earliest start) and a tail (the time that must pass after
    its end). For ``makespan``, heads begin at the first start of all ranks, and tails end at the last end of
    all ranks. For ``span``, both begin and end on the rank whose window is bounded; another rank's W never
    enters a tail.

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
