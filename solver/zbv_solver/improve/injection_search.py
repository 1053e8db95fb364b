"""Annealing of injections: of the times at which microbatches enter, and of the delays of ranks.

Microbatches that enter one after another at equal distances are rarely best. Rhythms of two to four
microbatches, and both ramps, emerge from moves that change one distance, every K-th one, or repeat a stretch.

Uneven stages make the search rugged. It therefore runs on smoothed costs, too, where every stage's cost lies
between its real cost and the average; the orders that it finds are timed with the real costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import Attempt, Board, clear, from_orders, value_of
from zbv_solver.construct.dispatch import Candidates, ListScheduler, dispatch
from zbv_solver.construct.rules import PEAKS, Rule, injection, mountain, no_delay
from zbv_solver.construct.tables import Tables, fuse_options, mean_duration, sizes, swap
from zbv_solver.improve.annealing import anneal
from zbv_solver.kernels.jit import ZERO, BoolArray, FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.problem.problem import B, I, Problem, W

SHARES_OF_OWN = (1.0, 0.3, 0.0, 0.6)
"""Share of a stage's own cost in its smoothed cost, by run."""
PACES = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)
"""Distances between microbatches that are tried first, as multiples of the largest load per microbatch."""
EVEN_DELAYS = ((0.5, 0.0), (1.0, 0.5), (1.0, 0.0), (0.5, -0.5), (1.0, -0.5), (0.5, 0.5))
"""Delays of W's and of the first chunk's F's that are tried first, as multiples of the mean duration; those
that were best most often come first."""
LEADS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Where microbatches differ: how much earlier F and I of the mean microbatch start, in the same unit, and
larger ones in proportion. They are tried with the best even delays."""
FEW_EVEN = 14
"""Even injections that every run tries, however large the problem."""
FEW_MICROBATCHES = 2
"""Times p: even injections are compared with this many microbatches, and the FINALISTS best with all."""
FINALISTS = 3
FEW_EVALUATIONS = 60
"""With fewer evaluations, there is one run instead of one per share."""
POLISH, COOL = 2_000, 0.05
"""Most moves of annealing at the end of a run, and their temperature as a share of the mean duration."""
SLICES = 10
"""A run is divided into this many calls of the kernel, so that the caller can poll in between."""
ENTRIES, NEAR = 0.3, 4
"""Where microbatches differ: share of moves that swap two of them, and how far apart these are at most in
most of the swaps."""
DELAYS = 0.25
"""Share of moves that change a delay; the others change gaps."""
ADJACENT, FAR = 0.6, 0.3
"""Probability that a change of a delay concerns adjacent ranks only, and that these may be many."""
LONGEST_RHYTHM = 6
"""Most microbatches of a rhythm that a move repeats."""
WARMEST = 0.3
"""First temperature of a run, as a share of the mean duration; it falls with the square of the rest."""


class Best(NamedTuple):
    """The parameters of a run; kernels write into it. A gap is the distance from the previous entry."""

    gap: FloatArray
    """(m,): the current gaps, in the unit of time times ``Tables.pace`` of the microbatch that entered."""
    delay: FloatArray
    """The current delays, see ``Rule.delay``."""
    best_gap: FloatArray
    """(m,): those with the smallest objective."""
    best_delay: FloatArray
    best_entry: IntArray
    """(m,): their order of entry."""
    value: FloatArray
    """(2,): the objective of the current and of the best ones."""


class Slice(NamedTuple):
    """The evaluations ``begin`` to ``end`` of a run; the temperature is that of its beginning."""

    begin: int
    end: int
    evaluations: int
    temperature: float
    unit: float
    seed: int


def injection_search(
    problem: Problem, placements: int, seed: int = 0, halt: IntArray | None = None
) -> Iterator[Attempt | None]:
    """Attempts, one per run, and None in between (so that the caller can poll).

    Parameters
    ----------
    placements
        Number of actions that all runs together may place.
    halt
        (1,) uint8: another thread sets it to end the current evaluation.
    """
    evaluations = placements // problem.max_actions
    fuses = fuse_options(problem)
    unit = mean_duration(problem)
    if placements < 1 or unit <= 0.0:
        return
    # Several short runs would only repeat their even injections.
    runs = len(SHARES_OF_OWN) if evaluations >= FEW_EVALUATIONS else 1
    evaluations //= runs
    for run in range(runs):
        share = SHARES_OF_OWN[(seed + run) % len(SHARES_OF_OWN)]
        seed_of_run = seed * len(SHARES_OF_OWN) + run
        name, fuse = fuses[(seed + run) % len(fuses)]
        method = f"injection(own={share:g},fuse={name})"
        annealing = _InjectionRun(smoothed(problem, share), fuse, halt, evaluations, seed_of_run)
        for part in range(SLICES):
            annealing.advance(part)
            yield None
        attempt = annealing.scheduler.attempt(annealing.best, method)
        if attempt is None:
            yield None
            continue
        # The costs were smoothed, so the order is timed again, and adapted a little to the real costs.
        polished = anneal(
            problem,
            attempt.orders,
            moves=min(POLISH, evaluations),
            temperature=COOL * unit,
            seed=seed_of_run,
            halt=halt,
        )
        yield Attempt.retimed(method, problem, *from_orders(polished.orders, problem))


def smoothed(problem: Problem, share: float) -> Problem:
    """The problem with costs of stages between their own (1) and the average of all stages (0)."""

    duration = problem.arrays.duration
    mixed = share * duration + (1 - share) * duration.mean(axis=1, keepdims=True)
    if problem.costs.backward is None:
        mixed[B] = mixed[I] + mixed[W]
    return problem.with_arrays(replace(problem.arrays, duration=mixed))


class _InjectionRun:
    """One annealing of injections, from the best even one."""

    def __init__(
        self, problem: Problem, fuse: BoolArray | None, halt: IntArray | None, evaluations: int, seed: int
    ):
        self.problem, self.scheduler = problem, ListScheduler(problem, fuse, halt)
        self.fuse, self.halt, self.evaluations, self.seed = fuse, halt, evaluations, seed
        self.unit = mean_duration(problem)
        self.entry = mountain(sizes(problem), PEAKS[0])
        gap, delay = self._first()
        self.state = Best(gap, delay, gap.copy(), delay.copy(), self.entry.copy(), np.full(2, np.inf))
        self.trial = self._rule(self.problem, gap.copy(), delay.copy())

    @property
    def best(self) -> Rule:
        """The best injection so far."""
        self.entry = self.state.best_entry
        return self._rule(self.problem, self.state.best_gap, self.state.best_delay)

    def advance(self, part: int) -> None:
        """Evaluate the next slice."""
        begin, end = (self.evaluations * number // SLICES for number in (part, part + 1))
        scheduler = self.scheduler
        _anneal(
            scheduler.tables,
            scheduler.board,
            scheduler.candidates,
            self.trial,
            scheduler.is_span,
            self.state,
            Slice(begin, end, self.evaluations, WARMEST * self.unit, self.unit, self.seed * SLICES + part),
        )

    def _first(self) -> tuple[FloatArray, FloatArray]:
        """Gaps and delays of the best even injection, of as many as the run has evaluations.

        It tries at least ``FEW_EVEN``.
        """
        problem = self.problem
        few = FEW_MICROBATCHES * problem.pp_degree
        even = list(islice(product(EVEN_DELAYS, PACES), max(FEW_EVEN, self.evaluations)))
        if few < problem.microbatches and problem.is_equal:
            small = replace(problem, microbatches=few)
            scheduler = ListScheduler(small, self.fuse, self.halt)
            rules = {numbers: self._rule(small, *self._even(few, *numbers)) for numbers in even}
            value = {numbers: scheduler.value(rule) for numbers, rule in rules.items()}
            even = sorted(even, key=value.__getitem__)[:FINALISTS]
        candidates = (self._even(problem.microbatches, *numbers) for numbers in even)
        best, least = self._better(self._even(problem.microbatches, *even[0]), np.inf, candidates)
        if problem.is_equal:
            return best
        leading = []
        for lead in LEADS:
            delay = best[1].copy()
            delay[:, -1] = -lead * self.unit
            leading.append((best[0], delay))
        return self._better(best, least, leading)[0]

    def _better(
        self,
        best: tuple[FloatArray, FloatArray],
        least: float,
        candidates: Iterable[tuple[FloatArray, FloatArray]],
    ) -> tuple[tuple[FloatArray, FloatArray], float]:
        """The gaps and delays with the smallest objective, and this objective."""
        for gap, delay in candidates:
            value = self.scheduler.value(self._rule(self.problem, gap, delay), least)
            if value < least:
                best, least = (gap, delay), value
        return best, least

    def _rule(self, problem: Problem, gap: FloatArray, delay: FloatArray) -> Rule:
        """The injection with these gaps, in the current order of entry."""
        entry, tables = self.entry[: len(gap)], self.scheduler.tables
        pace = tables.pace[self.problem.arrays.kind_of[entry]]
        return injection(problem, entry, entry_times(gap, pace), delay)

    def _even(
        self, microbatches: int, delays: tuple[float, float], pace: float
    ) -> tuple[FloatArray, FloatArray]:
        """Equal gaps between microbatches and equal delays on all ranks."""
        problem, (weight, forward) = self.problem, delays
        load = float(self.scheduler.tables.loads(least=True).max()) / problem.microbatches
        delay, chunks = no_delay(problem), problem.placement.chunks
        delay[:, 2 * chunks : 3 * chunks] = weight * self.unit
        delay[:, 0] = forward * self.unit
        gap = np.full(microbatches, load * pace)
        gap[:1] = 0.0
        return gap, delay


@compiled
def entry_times(gap: FloatArray, pace: FloatArray) -> FloatArray:  # pragma: no cover - compiled
    """When microbatches enter, (m,): a gap counts in the pace (m,) of the microbatch before it."""
    entry, time = np.empty(len(gap)), 0.0
    for k in range(len(gap)):
        time += gap[k] * (pace[k - 1] if k > 0 else 1.0)
        entry[k] = time
    return entry


@compiled
def _anneal(
    tables: Tables,
    board: Board,
    candidates: Candidates,
    trial: Rule,
    is_span: bool,
    state: Best,
    part: Slice,
) -> None:  # pragma: no cover - compiled
    """Evaluate neighbours of the current parameters; accept better ones and, while warm, worse ones.

    ``trial`` is the rule that is evaluated; its times and delays are written here.
    """
    np.random.seed(part.seed)
    gap, delay = state.gap.copy(), trial.delay
    m = len(gap)
    for evaluation in range(part.begin, part.end):
        if board.halt[0]:
            return
        gap[:], delay[:] = state.gap, state.delay
        one, other, is_same = ZERO, ZERO, False
        if evaluation > 0:
            if len(tables.pace) > 1 and np.random.random() < ENTRIES:
                one = np.random.randint(m)
                near = one + np.random.randint(-NEAR, NEAR + 1)
                other = near if 0 <= near < m else np.random.randint(m)
                swap(tables, one, other)
            elif np.random.random() < DELAYS or m < 3:
                _change_delay(delay, part.unit)
            else:
                _change_gaps(gap, part.unit)
                is_same = state.value[0] < np.inf and np.array_equal(gap, state.gap)
        trial.time[:] = entry_times(gap, tables.pace[tables.kind])
        cooled = 1.0 - evaluation / part.evaluations
        # Accepting a loss d with probability exp(-d / temperature) is drawing the largest loss accepted.
        most = state.value[0] - part.temperature * cooled * cooled * np.log(1.0 - np.random.random())
        value = np.inf
        if not is_same:
            clear(tables, board)
            if dispatch(tables, board, candidates, trial, is_span, most):
                value = value_of(board, is_span)
        if value > most or value == np.inf:
            swap(tables, one, other)
            continue
        state.value[0] = value
        state.gap[:], state.delay[:] = gap, delay
        if value < state.value[1]:
            state.value[1] = value
            state.best_gap[:], state.best_delay[:] = gap, delay
            state.best_entry[:] = tables.entry


@compiled_leaf
def _change_delay(delay: FloatArray, unit: float) -> None:  # pragma: no cover - compiled
    """Change the delay of a kind of action on all ranks, or on adjacent ones."""
    p, kind = delay.shape[0], np.random.randint(delay.shape[1])
    change = unit * 10.0 ** np.random.uniform(-1.0, 0.5) * np.random.normal()
    low, high = 0, p
    if np.random.random() < ADJACENT:
        low = np.random.randint(p)
        most = p if np.random.random() < FAR else 3
        high = min(p, low + 1 + np.random.randint(most))
    for rank in range(low, high):
        delay[rank, kind] += change


@compiled_leaf
def _change_gaps(gap: FloatArray, unit: float) -> None:  # pragma: no cover - compiled
    """Change one gap, change every K-th gap of a stretch, scale a stretch, or repeat K gaps."""
    m, draw = len(gap), np.random.random()
    change = unit * 10.0 ** np.random.uniform(-1.0, 0.5) * np.random.normal()
    low = 1 + np.random.randint(m - 1)
    high = min(m, low + 1 + np.random.randint(m))
    step = 1 + np.random.randint(LONGEST_RHYTHM)
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
