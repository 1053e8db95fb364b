"""Proven lower bounds: no order of the problem can do better.

``lower_bound`` is the best of three bounds per rank: Jackson's one-machine bound with simple heads and tails
(:mod:`.quick`); the same with heads and tails that take the memory of all ranks into account (:mod:`.heads`);
and the rank's load plus the idle time that its ramps force (:mod:`.ramps`). A span is also bounded by what
every other rank must do within the rank's window. Where memory is tight, all schedules of a few ranks
(:mod:`.few_ranks`) prove more. The proofs are in PROOFS.md. This package constructs no orders.

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

from zbv_solver.bounds.directions import directions
from zbv_solver.bounds.few_ranks import few_ranks_bounds
from zbv_solver.bounds.quick import one_machine_bounds
from zbv_solver.bounds.ramps import Window, machine_bound, other_rank_bound, ramp_bound
from zbv_solver.problem.problem import Problem

__all__ = ["Bound", "BoundEffort", "lower_bound"]

BoundEffort = Literal["quick", "full", "thorough"]

HEADS = 50_000
"""Heads and tails that a bound may compute, a microsecond each. If all of them are too many, the bound looks
only at the first and last microbatches, and for ``span`` only at the ranks with the best quick bounds."""


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
    microbatches on more ranks, up to a second.
    """
    if problem.is_equal:
        quick = one_machine_bounds(problem)
    else:
        from zbv_solver.bounds.differing import differing_machine_bounds  # few problems need it

        quick = differing_machine_bounds(problem)
    best = Bound(0.0, "nothing to do")
    for rank, value in enumerate(quick):
        if value > best.value:
            best = Bound(value, f"one-machine bound of rank {rank}")
    if effort == "quick":
        return best
    if not problem.is_equal:
        return _best([best], _differing_bounds(problem, effort), enough, is_stopped)
    by_strength = sorted(range(problem.pp_degree), key=lambda rank: -quick[rank])
    full = _makespan_bounds if problem.objective == "makespan" else _span_bounds
    further = _thorough_bounds(problem, is_stopped) if effort == "thorough" else iter(())
    return _best([best, *full(problem, by_strength)], further, enough, is_stopped)


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


def _thorough_bounds(problem: Problem, is_stopped: Callable[[], bool]) -> Iterator[Bound]:
    for ranks, value in few_ranks_bounds(problem, is_stopped):
        yield Bound(value, f"all schedules of ranks {', '.join(map(str, ranks))}")


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
