"""Bounds from all schedules of a few ranks, with the other ranks as delays.

Under tight memory few ranks decide: in a V the innermost one, whose microbatches are away longest between
their last forward and their first backward, with one or two others. A dynamic programme over their schedules
(:mod:`.states`) solves this relaxation. Once its states repeat some microbatches later, the rest of the
steady state is known without computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.directions import (
    DOWN,
    FREED_BY_REST,
    HELD,
    REST_AFTER,
    UP,
    Direction,
    directions,
)
from zbv_solver.bounds.states import EMPTY, Route, grow, least_shift
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.numeric import integer_scale
from zbv_solver.problem.problem import Problem

STEPS = 1 << 30
"""Durations are counted in integer steps; without a common unit, the longest has this many."""
MOST_IN_TRANSIT = 40
"""A rank that can hold more microbatches is not tried: it has too many states."""
MOST_TOGETHER = 9
"""The same for several ranks: they take seconds where the first one can hold more microbatches."""
LONGEST_PERIOD = 8
"""Numbers of microbatches after which states may repeat."""
PAIRS = 30_000_000
"""Pairs of states that all sets of ranks together may compare; they take about two seconds."""
PAIRS_ALONE = 3_000_000
"""Pairs of states that the innermost rank alone may compare; where these are not enough, nothing helps."""
LAYER = 300
"""Pairs that take as long as a layer of few states."""
MOST_RANKS = 4
MOST_FAILED = 2
"""Sets of one size that may take too many pairs; after them, none of this size is tried."""


@dataclass(frozen=True, eq=False)
class FewRanks:
    """The relaxation: a route through the chosen ranks, in integer steps of time; Lemma 38."""

    route: Route
    tail: int
    """Least time between the end of the route's last operation and the end of the window."""
    begins: tuple[int | None, ...]
    """Of every chosen rank, the begin of a window that contains all of its work, or None: for the makespan
    0, for the span the first start of the route's first rank."""
    columns: int
    """Of a state."""
    scale: float
    """Steps per unit of time."""

    @classmethod
    def of(cls, problem: Problem, ranks: tuple[int, ...]) -> FewRanks | None:
        """The relaxation that keeps ``ranks``; None if it has too many states."""
        scale, direction = _in_steps(directions(problem)[0])
        letters, tail = _letters(direction, ranks)
        first = letters[0]
        capacity = direction.capacity[list(ranks)]
        most = MOST_IN_TRANSIT if len(ranks) == 1 else MOST_TOGETHER
        if not capacity[first.rank] < most * first.takes:
            return None
        begins: tuple[int | None, ...] = (0,) * len(ranks)
        if problem.objective == "span":
            begins = tuple(first.wait if rank == first.rank else None for rank in range(len(ranks)))
        in_transit = int(capacity[first.rank] / first.takes * (1 + TINY)) + 1
        route = _route(letters, capacity)
        columns = len(letters) + len(route.rest_rank) + 1 + len(ranks) + in_transit
        return cls(route, tail, begins, columns, scale)

    def start(self) -> IntArray:
        """The layer with the state in which nothing is done."""
        layer = np.zeros((1, self.columns), np.int64)
        now = len(self.route.rank) + len(self.route.rest_rank)
        layer[0, now : now + 1 + len(self.begins)] = self.route.wait[0]
        return layer

    def value(self, layer: IntArray) -> float:
        """The shortest window of a layer in which everything is done but rests."""
        n, rests = len(self.route.rank), len(self.route.rest_rank)
        ends = layer[:, n + rests + 1 :]
        window = ends[:, self.route.rank[-1]] + self.tail
        for rank, begin in enumerate(self.begins):
            if begin is not None:
                waiting = layer[:, n : n + rests] @ (self.route.rest_length * (self.route.rest_rank == rank))
                window = np.maximum(window, ends[:, rank] + waiting - begin)
        return float(window.min()) / self.scale


@dataclass(frozen=True)
class _Letter:
    """An operation of a microbatch: see :class:`Route`. A rest of no length is left out."""

    rank: int
    length: int
    takes: float
    frees: float
    wait: int
    rest: int
    rest_frees: float


def few_ranks_bounds(
    problem: Problem, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Bounds of the objective, each with the ranks that prove it, until ``is_stopped`` is true: Lemma 40.

    The innermost rank comes first. Then the rank joins that helps most, as long as one helps and there are
    pairs left.
    """
    p, left = problem.pp_degree, PAIRS
    best = 0.0
    chosen: tuple[int, ...] = ()
    others = [p - 1]
    while others and len(chosen) < MOST_RANKS and not is_stopped():
        values: dict[int, float] = {}
        for rank in others:
            few = FewRanks.of(problem, tuple(sorted((*chosen, rank))))
            if few is None or list(values.values()).count(0.0) == MOST_FAILED:
                break
            most = left if chosen else min(left, PAIRS_ALONE)
            values[rank], used = few_ranks_bound(few, problem.microbatches, most, is_stopped)
            left -= used
            if values[rank] > 0.0:
                yield tuple(sorted((*chosen, rank))), values[rank]
        if max(values.values(), default=0.0) <= best * (1 + TINY):
            return
        best = max(values.values())
        chosen = (*chosen, max(values, key=lambda rank: values[rank]))
        others = [rank for rank in dict.fromkeys((0, p - 3, p // 2 - 1, *range(p))) if rank >= 0]
        # Those that helped most with fewer ranks come first.
        others = sorted(
            (rank for rank in others if rank not in chosen), key=lambda rank: -values.get(rank, 0.0)
        )


def few_ranks_bound(
    few: FewRanks, m: int, pairs: int, is_stopped: Callable[[], bool] = lambda: False
) -> tuple[float, int]:
    """Bound of the objective of m microbatches, and the pairs of states compared: Lemmas 38 and 39.

    The bound is 0 if ``pairs`` are not enough, or if ``is_stopped`` becomes true.
    """
    letters = len(few.route.rank)
    layer, used, step = few.start(), 0, 0
    seen, last, period, shift = [layer], m, 0, 0
    while step < last * letters:
        layer, compared = grow(few.route, layer, last, pairs - used)
        step += 1
        used += int(compared) + LAYER
        if len(layer) == 0 or used > pairs or is_stopped():
            return 0.0, used
        if period or step % letters:
            continue
        seen = [*seen[-LONGEST_PERIOD:], layer]
        # Half of the pairs are kept for the last microbatches.
        period, shift = _repeats(few.route, seen) if 2 * used < pairs else _best_shift(few.route, seen)
        if period:
            begun = int(layer[:, 0].max())
            last = begun + (m - begun) % period
    return few.value(layer) + (m - last) // max(period, 1) * shift / few.scale, used


def _repeats(route: Route, seen: list[IntArray]) -> tuple[int, int]:
    """The number of microbatches after which the last layer repeats an earlier one, or 0, and the shift.

    Layers that hold the same states, but for the shift, repeat without end.
    """
    for period in range(1, len(seen)):
        earlier, later = seen[-1 - period], seen[-1]
        if len(earlier) == len(later):
            shift = int(least_shift(route, earlier, later, period))
            if shift > 0 and least_shift(route, later, earlier, -period) == -shift:
                return period, shift
    return 0, 0


def _best_shift(route: Route, seen: list[IntArray]) -> tuple[int, int]:
    """The number of microbatches after which the last layer is latest on average, and how much later it is.

    0 if no earlier layer has states for all of the last one's: Lemma 39.
    """
    best, best_shift = 0, 0
    for period in range(1, len(seen)):
        shift = int(least_shift(route, seen[-1 - period], seen[-1], period))
        if shift * max(best, 1) > best_shift * period:
            best, best_shift = period, shift
    return best, best_shift


def _in_steps(direction: Direction) -> tuple[float, Direction]:
    """The steps per unit of time, and the direction in integer steps, rounded as in Lemma 24."""
    values = np.concatenate([direction.work.ravel(), direction.latency])
    scale = integer_scale(values.tolist(), STEPS)
    if scale is None:
        scale = STEPS / float(values.max())
        work, latency = np.floor(direction.work * scale), np.floor(direction.latency * scale)
    else:
        work, latency = np.rint(direction.work * scale), np.rint(direction.latency * scale)
    return scale, direction._replace(work=work, latency=latency)


def _letters(direction: Direction, ranks: tuple[int, ...]) -> tuple[list[_Letter], int]:
    """The operations of a microbatch on the chosen ranks, and the least time after the last one."""
    hosts = {int(stage): place for place, stage in np.ndenumerate(direction.stages)}
    route: list[_Letter] = []
    away, n = 0, len(hosts)
    for kind, stages in ((UP, range(n)), (DOWN, range(n - 1, -1, -1))):
        for stage in stages:
            host, chunk = hosts[stage]
            work, memory = direction.work[host, :, chunk], direction.memory[host, :, chunk]
            if kind == UP and stage > 0:
                away += int(direction.latency[stage - 1])
            elif kind == DOWN and stage < n - 1:
                away += int(direction.latency[stage])
            length = int(work[kind])
            if host not in ranks:
                away += length
                continue
            takes, frees, rest = float(memory[HELD]), 0.0, 0
            if kind == DOWN:
                takes, frees, rest = 0.0, float(memory[HELD]), int(work[REST_AFTER])
            route.append(
                _Letter(ranks.index(host), length, takes, frees, away, rest, float(memory[FREED_BY_REST]))
            )
            away = 0
    host, chunk = hosts[0]
    return route, away + int(direction.work[host, REST_AFTER, chunk])


def _route(letters: list[_Letter], capacity: FloatArray) -> Route:
    rests = [each for each in letters if each.rest]
    twins = [
        next(
            (
                i
                for i, other in enumerate(rests)
                if (other.rank, other.rest) == (each.rank, each.rest)
                and (-other.rest_frees, i) < (-each.rest_frees, own)
            ),
            EMPTY,
        )
        for own, each in enumerate(rests)
    ]
    return Route(
        np.array([each.rank for each in letters]),
        np.array([each.length for each in letters]),
        np.array([each.takes for each in letters]),
        np.array([each.frees for each in letters]),
        np.array([each.wait for each in letters]),
        np.array([rests.index(each) if each.rest else EMPTY for each in letters]),
        np.array([each.rank for each in rests], np.int64),
        np.array([each.rest for each in rests], np.int64),
        np.array([each.rest_frees for each in rests], np.float64),
        np.array(twins, np.int64),
        capacity,
    )
