"""Annealing of injections: of the times at which microbatches enter, and of the delays of ranks.

Microbatches that enter one after another at equal distances are rarely best. Rhythms of two to four
microbatches, and both ramps, emerge from moves that change one distance, every K-th one, or repeat a stretch.

Uneven stages make the search rugged. It therefore runs on smoothed costs, too, where every stage's cost is a
mean of its own and the average; the orders that it finds are timed with the real costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import Attempt, from_orders
from zbv_solver.construct.board import CLOCK, FIRST, Board
from zbv_solver.construct.injection import Choices, Injection, InjectionScheduler, inject
from zbv_solver.construct.tables import Tables, fuse_options
from zbv_solver.improve.annealing import anneal
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.problem import Costs, Problem

SHARES_OF_OWN = (1.0, 0.3, 0.0, 0.6)
"""Share of a stage's own cost in its smoothed cost, by run."""
RUNS = len(SHARES_OF_OWN)
PACES = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)
"""Distances between microbatches that are tried first, as multiples of the largest load per microbatch."""
WEIGHT_DELAYS = (0.0, 0.5, 1.0, 2.0)
FORWARD_DELAYS = (0.0, 0.5, -0.5)
"""Delays of W's and of the first chunk's F's that are tried first, as multiples of the mean duration."""
POLISH, COOL = 2_000, 0.05
"""Moves of annealing that every run ends with, and their temperature as a share of the mean duration."""
SLICES = 10
"""A run is divided into this many calls of the kernel, so that the caller can poll."""
WARMEST = 0.3
"""First temperature of a run, as a share of the mean duration; it falls with the square of the rest."""


class Best(NamedTuple):
    """Parameters of a run; kernels write into it.

    Attributes
    ----------
    gap, delay
        (m,) and (p, 3 * c): the current parameters; ``gap`` is the distance from the previous entry.
    best_gap, best_delay
        The best ones.
    value
        (2,): the objective of the current and of the best ones.
    """

    gap: FloatArray
    delay: FloatArray
    best_gap: FloatArray
    best_delay: FloatArray
    value: FloatArray


class Slice(NamedTuple):
    """A part of a run: which evaluations of how many, temperature at the beginning of the run, unit, seed."""

    begin: int
    end: int
    of: int
    temperature: float
    unit: float
    seed: int


def injection_search(
    problem: Problem,
    placements: int,
    seed: int = 0,
    halt: IntArray | None = None,
) -> Iterator[Attempt | None]:
    """Attempts, one per run, and None in between (so that the caller can poll).

    Parameters
    ----------
    placements
        Number of actions that all runs together may place.
    halt
        (1,) uint8: another thread sets it to end the current evaluation.
    """
    evaluations = placements // (RUNS * problem.max_actions)
    if evaluations < 1:
        return
    fuses = fuse_options(problem)
    unit = float(problem.arrays.duration[:3].mean())
    for run, share in enumerate(SHARES_OF_OWN):
        name, fuse = fuses[(seed + run) % len(fuses)]
        smooth = InjectionScheduler(smoothed(problem, share), fuse, halt)
        injection = None
        for injection in _run(smooth, evaluations, seed * RUNS + run):
            yield None
        if injection is None:
            return
        method = f"injection(own={share:g},fuse={name})"
        attempt = smooth.attempt(injection, method)
        if attempt is not None:
            orders = Attempt.retimed(method, problem, attempt.code, attempt.length).orders
            polished = anneal(problem, orders, moves=POLISH, temperature=COOL * unit, seed=seed * RUNS + run, halt=halt)
            yield Attempt.retimed(method, problem, *from_orders(polished.orders, problem))


def smoothed(problem: Problem, share: float) -> Problem:
    """The problem with costs of stages between their own (1) and the average of all stages (0)."""

    def of(times: tuple[float, ...]) -> tuple[float, ...]:
        row = np.array(times)
        return tuple((share * row + (1 - share) * row.mean()).tolist())

    costs = problem.costs
    return replace(
        problem,
        costs=Costs(
            of(costs.forward),
            of(costs.backward_input),
            of(costs.backward_weight),
            costs.p2p,
            None if costs.backward is None else of(costs.backward),
        ),
    )


def _run(scheduler: InjectionScheduler, evaluations: int, seed: int) -> Iterator[Injection]:
    """Anneal from the best of a few even injections; the best injection after every slice."""
    problem, m = scheduler.problem, scheduler.problem.microbatches
    unit = float(problem.arrays.duration[:3].mean())
    first = _first(scheduler, unit, evaluations)
    gap = np.diff(first.entry, prepend=0.0)
    state = Best(gap, first.delay, gap.copy(), first.delay.copy(), np.full(2, np.inf))
    ends = [evaluations * (part + 1) // SLICES for part in range(SLICES)]
    for part, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin < end:
            part_of = Slice(begin, end, evaluations, WARMEST * unit, unit, seed * SLICES + part)
            _anneal(
                scheduler.tables,
                scheduler.board,
                scheduler.choices,
                scheduler.least_loads,
                scheduler.is_span,
                state,
                part_of,
            )
        yield Injection(np.cumsum(state.best_gap), state.best_delay)


def _first(scheduler: InjectionScheduler, unit: float, most: int) -> Injection:
    """The best of at most ``most`` even injections."""
    problem, m = scheduler.problem, scheduler.problem.microbatches
    p, chunks = problem.pp_degree, problem.placement.chunks
    load = float(scheduler.tables.loads(least=True).max()) / m
    found, best = None, np.inf
    for pace in PACES:
        for weight in WEIGHT_DELAYS:
            for forward in FORWARD_DELAYS:
                delay = np.zeros((p, 3 * chunks))
                delay[:, 2 * chunks :] = weight * unit
                delay[:, 0] = forward * unit
                injection = Injection(np.arange(m) * load * pace, delay)
                value = scheduler.value(injection, best)
                if found is None or value < best:
                    found, best = injection, value
                most -= 1
                if most < 1:
                    return found
    assert found is not None
    return found


@compiled
def _anneal(
    tables: Tables,
    board: Board,
    choices: Choices,
    least_loads: FloatArray,
    is_span: bool,
    state: Best,
    part: Slice,
) -> None:  # pragma: no cover - compiled
    """Evaluate neighbours of the current parameters; accept better ones and, while warm, worse ones."""
    np.random.seed(part.seed)
    gap, delay = state.gap.copy(), state.delay.copy()
    entry = np.zeros(len(gap))
    for evaluation in range(part.begin, part.end):
        if board.halt[0]:
            return
        gap[:] = state.gap
        delay[:] = state.delay
        if evaluation > 0:
            if np.random.random() < DELAYS or len(gap) < 3:
                _change_delay(delay, part.unit)
            else:
                _change_gaps(gap, part.unit)
        time = 0.0
        for k in range(len(gap)):
            time += gap[k]
            entry[k] = time
        rest = 1.0 - evaluation / part.of
        # Accepting a loss d with probability exp(-d / temperature) is drawing the largest loss accepted.
        most = state.value[0] - part.temperature * rest * rest * np.log(1.0 - np.random.random())
        if inject(tables, board, choices, Injection(entry, delay), least_loads, is_span, most):
            last, first, longest = -np.inf, np.inf, -np.inf
            for rank in range(len(board.length)):
                begin, end = board.level[rank, FIRST], board.level[rank, CLOCK]
                last, first, longest = max(last, end), min(first, begin), max(longest, end - begin)
            value = longest if is_span else last - first
            if value <= most:
                state.value[0] = value
                state.gap[:] = gap
                state.delay[:] = delay
                if value < state.value[1]:
                    state.value[1] = value
                    state.best_gap[:] = gap
                    state.best_delay[:] = delay


DELAYS = 0.25
"""Share of moves that change a delay."""


@compiled
def _change_delay(delay: FloatArray, unit: float) -> None:  # pragma: no cover - compiled
    """Change the delay of a kind of action on all ranks, or on adjacent ones."""
    p, kind = delay.shape[0], np.random.randint(delay.shape[1])
    change = unit * 10.0 ** np.random.uniform(-1.0, 0.5) * np.random.normal()
    low, high = 0, p
    if np.random.random() < 0.6:
        low = np.random.randint(p)
        most = p if np.random.random() < 0.3 else 3
        high = min(p, low + 1 + np.random.randint(most))
    for rank in range(low, high):
        delay[rank, kind] += change


@compiled
def _change_gaps(gap: FloatArray, unit: float) -> None:  # pragma: no cover - compiled
    """Change one gap, every K-th gap of a stretch, scale a stretch, or repeat K gaps."""
    m, draw = len(gap), np.random.random()
    change = unit * 10.0 ** np.random.uniform(-1.0, 0.5) * np.random.normal()
    low = 1 + np.random.randint(m - 1)
    high = min(m, low + 1 + np.random.randint(m))
    step = 1 + np.random.randint(6)
    if draw < 0.4:
        change = max(change, -gap[low])
        gap[low] += change
        # Half the time, the following microbatches enter at the same times as before.
        if low + 1 < m and np.random.random() < 0.5:
            gap[low + 1] = max(0.0, gap[low + 1] - change)
    elif draw < 0.64:
        for k in range(low, high, step):
            gap[k] = max(0.0, gap[k] + change)
    elif draw < 0.78:
        factor = np.exp(0.1 * np.random.normal())
        for k in range(low, high):
            gap[k] *= factor
    else:
        for k in range(low + step, high):
            gap[k] = gap[k - step]
