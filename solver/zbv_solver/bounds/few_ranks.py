"""Bounds from all schedules of a few ranks, with the other ranks as delays.

Under tight memory few ranks decide: in a V the innermost one, whose microbatches are away longest between their
last forward and their first backward, alone or with one other rank. A dynamic programme over their schedules
(:mod:`.states`) solves this relaxation. Once its states repeat some microbatches later, the rest of the steady
state is known without computing it.

A rank may be *light*: its W's are left out, and its I's release all memory. This is weaker, with far fewer
states.
"""

from __future__ import annotations

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
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY
from zbv_solver.problem.numeric import integer_scale
from zbv_solver.problem.problem import Problem

STEPS = 1 << 30
"""Durations are counted in integer steps; without a common unit, the longest has this many."""
MOST_IN_TRANSIT = 40
"""A route whose first rank can hold more microbatches is not tried: it has too many states."""
LONGEST_PERIOD = 8
"""Numbers of microbatches after which states may repeat."""


@dataclass(frozen=True, eq=False)
class FewRanks:
    """The relaxation: a route through the chosen ranks, in integer steps of time.

    Attributes
    ----------
    tail
        Least time between the end of the route's last operation and the end of the window.
    begins
        Of every chosen rank, the begin of a window that contains all of its work, or None: for the makespan 0,
        for the span the first start of the route's first rank.
    columns
        Of a state.
    scale
        Steps per unit of time.
    """

    route: Route
    tail: int
    begins: tuple[int | None, ...]
    columns: int
    scale: float

    @classmethod
    def of(cls, problem: Problem, ranks: tuple[int, ...], light: tuple[int, ...] = ()) -> FewRanks | None:
        """The relaxation that keeps ``ranks``, of which some are light; None if it has too many states."""
        scale, direction = _in_steps(directions(problem)[0])
        letters, tail = _letters(direction, ranks, light)
        first = letters[0]
        capacity = direction.capacity[list(ranks)]
        if not capacity[first.rank] < MOST_IN_TRANSIT * first.takes:
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
    """An operation of a microbatch: see :class:`Route`."""

    rank: int
    length: int
    takes: float
    frees: float
    wait: int
    rest: int
    rest_frees: float


def few_ranks_bound(few: FewRanks, m: int, states: int, most: int) -> tuple[float, int]:
    """Bound of the objective of m microbatches, and the states that were computed: Lemmas 42 and 43.

    The bound is 0 if more than ``states`` states are needed.
    """
    letters = len(few.route.rank)
    layer, used, step = few.start(), 0, 0
    seen, last, period, shift = [layer], m, 0, 0
    while step < last * letters:
        layer, pairs = grow(few.route, layer, last, states - used)
        step += 1
        used += int(pairs)
        if len(layer) == 0:
            return 0.0, used
        if period or step % letters:
            continue
        seen = [*seen[-LONGEST_PERIOD:], layer]
        best, shift = _best_shift(few.route, seen)
        # Layers that hold the same states, but for the shift, repeat for ever. Half of the budget is kept for
        # the last microbatches.
        if best and (2 * used > states or least_shift(few.route, layer, seen[-1 - best], -best) == -shift):
            period = best
            begun = int(layer[:, 0].max())
            last = begun + (m - begun) % period
    return few.value(layer) + (m - last) // max(period, 1) * shift / few.scale, used


def _best_shift(route: Route, seen: list[IntArray]) -> tuple[int, int]:
    """The number of microbatches after which the last layer is latest on average, and how much later it is.

    0 if no earlier layer has states for all of the last one's: Lemma 43.
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


def _letters(
    direction: Direction, ranks: tuple[int, ...], light: tuple[int, ...]
) -> tuple[list[_Letter], int]:
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
                # A rest of no length is done at once.
                rest = 0 if host in light else int(work[REST_AFTER])
                takes, frees = 0.0, float(memory[HELD])
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
