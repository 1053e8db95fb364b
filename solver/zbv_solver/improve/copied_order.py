"""The execution of an order with copies to the host, which decides itself where they are freed and taken.

A copy out begins after its F, and its memory is free as soon as it has ended. A copy in begins as late as the
durations of the actions between it and its backward allow. A rank without room waits for copies that are on
their way out; if there are none, what it lacks counts against the order.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import mean_duration
from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray, compiled_inline, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import D, F, O, Problem, R, W

PENALTY = 2.5
"""What the memory of one activation costs that a rank lacks, in mean durations of an action."""
HERE, LEAVING, AWAY = range(3)
"""Where an activation is. One that is not copied, or that has come back, is here."""


class Costs(NamedTuple):
    """What executing an order needs of a problem; a cell is stage * m + microbatch."""

    m: int
    is_span: bool
    """Whether the objective is the span."""
    duration: FloatArray
    delta: FloatArray
    """(4, cells) times of actions, and changes of memory."""
    latency: FloatArray
    """(2, cells) time that the input of an F and of a backward is on its way."""
    moved: FloatArray
    offload: FloatArray
    reload: FloatArray
    """(stages,) memory that moves, and the times of its copies."""
    static: FloatArray
    limit: FloatArray
    host: FloatArray
    """(p,) of the ranks."""
    penalty: float

    @classmethod
    def of(cls, problem: Problem) -> Costs:
        """Those of a problem with copies."""
        arrays, copies = problem.arrays, problem.copies
        if copies is None:
            raise ValueError("found no copies; only a problem with costs.offload has an order to improve.")
        stages, kind = problem.n_stages, arrays.kind_of
        latency = np.zeros((2, stages, problem.microbatches))
        latency[0, 1:] = latency[1, :-1] = arrays.latency[:, kind]
        moved = np.array(copies.offloadable, dtype=np.float64)
        limit = arrays.limit + SEARCH_MEMORY * np.abs(arrays.limit)
        unlimited = (np.inf,) * problem.pp_degree
        return cls(
            problem.microbatches,
            problem.objective == "span",
            np.ascontiguousarray(arrays.duration[:, :, kind]).reshape(4, -1),
            np.ascontiguousarray(arrays.delta[:, :, kind]).reshape(4, -1),
            latency.reshape(2, -1),
            moved,
            np.array(copies.offload, dtype=np.float64),
            np.array(copies.reload, dtype=np.float64),
            arrays.static.copy(),
            limit,
            np.array(copies.host_limit or unlimited, dtype=np.float64),
            PENALTY * mean_duration(problem) / max(float(moved.mean()), 1e-300),
        )


class Lists(NamedTuple):
    """The actions of all ranks in order, and which activations are copied."""

    letter: IntArray
    cell: IntArray
    """(n,)"""
    offset: IntArray
    """(p + 1,) the actions of rank r are ``offset[r]:offset[r + 1]``."""
    copied: BoolArray
    """(cells,)"""

    @classmethod
    def of(cls, problem: Problem, orders: Orders) -> Lists:
        """Those of an order."""
        copied = np.zeros(problem.n_stages * problem.microbatches, np.bool_)
        if orders.copies is not None:
            _, letter, stage, microbatch = orders.copies.T
            copied[(stage * np.int64(problem.microbatches) + microbatch)[letter == O]] = True
        cell = orders.stage * np.int64(problem.microbatches) + orders.microbatch
        return cls(orders.letter.astype(np.int64), cell, orders.offset.astype(np.int64), copied)

    def copy(self) -> Lists:
        """The same in other arrays."""
        return Lists(*(array.copy() for array in self))

    def orders(self, problem: Problem, like: Orders) -> Orders:
        """The order with its copies where the execution places them."""
        run = Run.of(problem, self)
        execute(Costs.of(problem), self, run)
        rows = []
        for at in np.flatnonzero((self.letter == F) & self.copied[self.cell]).tolist():
            cell = int(self.cell[at])
            rows.append((at + 1, -1, O, cell))
            for letter, (place, number) in zip((D, R), run.place[cell].tolist(), strict=True):
                rows.append((place, number, letter, cell))
        rows.sort(key=itemgetter(0, 1))
        m = problem.microbatches
        copies = [(at, letter, cell // m, cell % m) for at, _, letter, cell in rows]
        return replace(
            like,
            stage=(self.cell // m).astype(like.stage.dtype),
            letter=self.letter.astype(like.letter.dtype),
            microbatch=(self.cell % m).astype(like.microbatch.dtype),
            paired=None,
            copies=np.array(copies, np.int32) if copies else None,
        )


class Run(NamedTuple):
    """An execution of an order; kernels write into it."""

    made: FloatArray
    """(2, cells) when an F and a backward end; -1 until then."""
    where: IntArray
    due: IntArray
    back: FloatArray
    """(cells,) where an activation is, before which action it should come back, and when it is back."""
    place: IntArray
    """(cells, 2, 2) before which action D and R are, and their numbers among the copies of the rank."""
    wanted: IntArray
    """(p, cells of a rank) copied activations in the order of their backwards."""
    leaving: IntArray
    left: FloatArray
    """(p, cells of a rank) copied activations in the order of their F's, and when they have left."""
    counts: IntArray
    """(p, 5) the next action, the next wanted activation and how many there are, the next leaving one and how
    many there are."""
    clock: FloatArray
    """(p, 6) time, memory, when the engines out and in are free, first start, and memory on the host."""
    begin: FloatArray
    """(n,) start of every action before the end of its rank, without waits."""
    totals: FloatArray
    """(2,) memory that ranks lacked, and numbers of copies so far."""

    @classmethod
    def of(cls, problem: Problem, lists: Lists) -> Run:
        """Arrays for executions."""
        p, cells, n = problem.pp_degree, len(lists.copied), len(lists.cell)
        width = problem.microbatches * max(map(len, problem.placement.stages_of))
        return cls(
            np.zeros((2, cells)),
            np.zeros(cells, np.int64),
            np.zeros(cells, np.int64),
            np.zeros(cells),
            np.zeros((cells, 2, 2), np.int64),
            np.zeros((p, width), np.int64),
            np.zeros((p, width), np.int64),
            np.zeros((p, width)),
            np.zeros((p, 5), np.int64),
            np.zeros((p, 6)),
            np.zeros(n),
            np.zeros(2),
        )


NEXT, WANTED, ALL_WANTED, LEAVE, ALL_LEAVING = range(5)
TIME, MEMORY, OUT, IN, FIRST, HOST = range(6)
"""Columns of :attr:`Run.counts` and :attr:`Run.clock`."""


@compiled_leaf
def execute(costs: Costs, lists: Lists, run: Run) -> float:  # pragma: no cover - compiled
    """The objective of an order, with a penalty for memory that ranks lack; inf for a deadlock.

    As for the span, a rank's time from its first start counts.
    """
    p, left = len(costs.limit), len(lists.cell)
    _prepare(costs, lists, run)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in range(p):
            while run.counts[rank, NEXT] < lists.offset[rank + 1] and _step(costs, lists, run, rank):
                left -= 1
                is_moving = True
    if left > 0:
        return np.inf
    longest = 0.0
    for rank in range(p):
        begin = run.clock[rank, FIRST] if costs.is_span else 0.0
        longest = max(longest, run.clock[rank, TIME] - begin)
    return float(longest + costs.penalty * run.totals[0])


@compiled_inline
def _prepare(costs: Costs, lists: Lists, run: Run) -> None:  # pragma: no cover - compiled
    """Set everything to the begin, and say where copies in should begin."""
    run.totals[0] = run.totals[1] = 0.0
    for cell in range(len(lists.copied)):
        run.made[0, cell] = run.made[1, cell] = -1.0
        run.where[cell] = HERE
    for rank in range(len(costs.limit)):
        first, last = lists.offset[rank], lists.offset[rank + 1]
        for column in range(5):
            run.counts[rank, column] = 0
        for column in range(6):
            run.clock[rank, column] = 0.0
        run.counts[rank, NEXT] = first
        run.clock[rank, MEMORY], run.clock[rank, FIRST] = costs.static[rank], -1.0
        time, free = 0.0, 0.0
        for at in range(last - 1, first - 1, -1):
            time -= costs.duration[lists.letter[at], lists.cell[at]]
            run.begin[at] = time
        for at in range(last - 1, first - 1, -1):
            cell = lists.cell[at]
            if lists.letter[at] in (F, W) or not lists.copied[cell]:
                continue
            free = min(free, run.begin[at]) - costs.reload[cell // costs.m]
            place = at
            while place > first and run.begin[place] > free:
                place -= 1
            run.due[cell] = place
        for at in range(first, last):
            cell = lists.cell[at]
            if lists.letter[at] not in (F, W) and lists.copied[cell]:
                run.wanted[rank, run.counts[rank, ALL_WANTED]] = cell
                run.counts[rank, ALL_WANTED] += 1


@compiled_inline
def _step(costs: Costs, lists: Lists, run: Run, rank: int) -> bool:  # pragma: no cover - compiled
    """Execute the next action of a rank with the copies before it; False if its input is not made yet."""
    at = run.counts[rank, NEXT]
    cell, letter = lists.cell[at], lists.letter[at]
    arrives = _arrival(costs, run, cell, letter)
    if arrives < 0:
        return False
    clock, counts = run.clock[rank], run.counts[rank]
    is_back = letter not in (F, W) and lists.copied[cell]
    while _has_freed(costs, run, rank, at, clock[TIME]):
        pass
    room = max(0.0, costs.delta[letter, cell])
    _take(costs, run, rank, at, is_back and run.where[cell] != HERE, room)
    start = max(arrives, run.back[cell]) if is_back else arrives
    # The rank waits for its input anyway: what leaves until then frees memory, for copies in, too.
    while _has_freed(costs, run, rank, at, start):
        _take(costs, run, rank, at, False, room)
    change = costs.delta[letter, cell]
    while clock[MEMORY] + max(0.0, change) > costs.limit[rank] and counts[LEAVE] < counts[ALL_LEAVING]:
        _free(costs, run, rank, at)
    run.totals[0] += max(0.0, clock[MEMORY] + max(0.0, change) - costs.limit[rank])
    start = max(clock[TIME], start)
    if is_back:
        clock[HOST] -= costs.moved[cell // costs.m]
    if clock[FIRST] < 0:
        clock[FIRST] = start
    clock[TIME] = start + costs.duration[letter, cell]
    clock[MEMORY] += change
    counts[NEXT] += 1
    if letter == F:
        run.made[0, cell] = clock[TIME]
        if lists.copied[cell]:
            _leave(costs, run, rank, cell)
    elif letter != W:
        run.made[1, cell] = clock[TIME]
    return True


@compiled_inline
def _arrival(costs: Costs, run: Run, cell: int, letter: int) -> float:  # pragma: no cover - compiled
    """When the input of an action is there; -1 if it is not made yet."""
    m, cells = costs.m, run.made.shape[1]
    if letter == F:
        if cell < m:
            return 0.0
        made = run.made[0, cell - m]
        return -1.0 if made < 0 else made + costs.latency[0, cell]
    if letter == W:
        return 0.0
    made = run.made[0, cell] if cell + m >= cells else run.made[1, cell + m]
    return -1.0 if made < 0 else made + costs.latency[1, cell]


@compiled_inline
def _leave(costs: Costs, run: Run, rank: int, cell: int) -> None:  # pragma: no cover - compiled
    """Begin a copy out after an F."""
    clock, counts, stage = run.clock[rank], run.counts[rank], cell // costs.m
    clock[OUT] = max(clock[OUT], clock[TIME]) + costs.offload[stage]
    run.leaving[rank, counts[ALL_LEAVING]], run.left[rank, counts[ALL_LEAVING]] = cell, clock[OUT]
    counts[ALL_LEAVING] += 1
    run.where[cell] = LEAVING
    clock[HOST] += costs.moved[stage]
    run.totals[0] += max(0.0, clock[HOST] - costs.host[rank])


@compiled_inline
def _has_freed(
    costs: Costs, run: Run, rank: int, at: int, until: float
) -> bool:  # pragma: no cover - compiled
    """Free the memory of the next copy out before an action if it has ended by then; whether it has."""
    leave = run.counts[rank, LEAVE]
    has_ended: bool = leave < run.counts[rank, ALL_LEAVING] and run.left[rank, leave] <= until
    if has_ended:
        _free(costs, run, rank, at)
    return has_ended


@compiled_inline
def _free(costs: Costs, run: Run, rank: int, at: int) -> None:  # pragma: no cover - compiled
    """Wait for the next copy out before an action, and free its memory."""
    clock, counts = run.clock[rank], run.counts[rank]
    cell = run.leaving[rank, counts[LEAVE]]
    clock[TIME] = max(clock[TIME], run.left[rank, counts[LEAVE]])
    clock[MEMORY] -= costs.moved[cell // costs.m]
    counts[LEAVE] += 1
    run.where[cell] = AWAY
    run.place[cell, 0, 0], run.place[cell, 0, 1] = at, int(run.totals[1])
    run.totals[1] += 1


@compiled_inline
def _take(
    costs: Costs, run: Run, rank: int, at: int, is_needed: bool, room: float
) -> None:  # pragma: no cover - compiled
    """Begin the copies in that are due before an action, as far as there is room.

    If the action needs the first of them, the rank waits for room, or lacks it.
    """
    clock, counts = run.clock[rank], run.counts[rank]
    while counts[WANTED] < counts[ALL_WANTED]:
        cell = run.wanted[rank, counts[WANTED]]
        if run.due[cell] > at:
            return
        stage = cell // costs.m
        while (
            is_needed
            and counts[LEAVE] < counts[ALL_LEAVING]
            and (run.where[cell] != AWAY or clock[MEMORY] + costs.moved[stage] > costs.limit[rank])
        ):
            _free(costs, run, rank, at)
        has_room = clock[MEMORY] + costs.moved[stage] + room <= costs.limit[rank]
        if not is_needed and (run.where[cell] != AWAY or not has_room):
            return
        clock[MEMORY] += costs.moved[stage]
        clock[IN] = max(clock[IN], clock[TIME]) + costs.reload[stage]
        run.where[cell], run.back[cell] = HERE, clock[IN]
        run.place[cell, 1, 0], run.place[cell, 1, 1] = at, int(run.totals[1])
        run.totals[1] += 1
        counts[WANTED] += 1
        is_needed = False
