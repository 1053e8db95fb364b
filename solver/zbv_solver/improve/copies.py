"""Copies to the host for an order: what leaves the device, and when it leaves and returns.

Every rank is planned alone, at the times of the order. Where its memory exceeds the limit, the copy is chosen
whose activation is needed last (Belady 1966: the page whose next use is furthest away), of those that the
engines can move out and back in time. Copies out begin right after their F, or after its pair, and copies in
as late as possible. If no copy is in time, a rank waits for one. In the end, copies that are not needed are
dropped again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray, compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import B, D, F, I, O, Problem, R, W
from zbv_solver.timing.start_times import earliest_times, objective_of

NEVER = -1


class Rank(NamedTuple):
    """A rank's n entries in order, and its activations: of every F, until the I or B of its microbatch.

    An entry is an action or a pair, in which no copy can be.
    """

    begin: IntArray
    """(n,) the first action of every entry."""
    start: FloatArray
    end: FloatArray
    room: FloatArray
    delta: FloatArray
    """(n,) times, memory that an entry needs, and change of memory."""
    forward: IntArray
    backward: IntArray
    """(a,) the entries with the F and with the I or B of an activation, in the order of the F's."""
    by_backward: IntArray
    """(a,) the activations in the order of their backwards."""
    amount: FloatArray
    offload: FloatArray
    reload: FloatArray
    """(a,) memory that moves, and the times of its copies."""
    limit: float
    host: float
    """Memory that is not static, and that of the host."""


class Choice(NamedTuple):
    """What is copied; kernels write into it."""

    chosen: BoolArray
    freed: IntArray
    taken: IntArray
    """(a,) which activations, and the entries before which their D and R are."""
    latest_freed: IntArray
    earliest_taken: IntArray
    """(a,) where D and R must be because nothing else keeps the limit, though the rank may wait there."""
    held: FloatArray
    """(n,) the most that the rank holds while an entry runs or after it."""

    @classmethod
    def of(cls, rank: Rank) -> Choice:
        """No copies."""
        a, n = len(rank.forward), len(rank.start)
        return cls(
            np.zeros(a, np.bool_),
            np.zeros(a, np.int64),
            np.zeros(a, np.int64),
            np.full(a, n, np.int64),
            np.zeros(a, np.int64),
            np.zeros(n),
        )


def plan_copies(
    problem: Problem, orders: Orders, cancelled: Callable[[], bool] | None = None
) -> tuple[float, Orders] | None:
    """The objective and the order with the copies that keep the memory limit; None if none were found.

    ``orders`` has none, and is executable without a limit of memory. ``cancelled`` says that nobody needs the
    copies any more.
    """
    orders = _with_earlier_weights(problem, orders)
    start, end = earliest_times(problem, orders)
    rows: list[IntArray] = []
    for rank in range(problem.pp_degree):
        if cancelled is not None and cancelled():
            return None
        own = _rank_of(problem, orders, rank, start, end)
        choice = Choice.of(own)
        if choose(own, choice) != NEVER:
            return None
        rows.append(_rows(orders, rank, own, choice))
    copies = np.concatenate(rows)
    made = replace(orders, copies=copies) if len(copies) else orders
    return objective_of(problem, made), made


def _with_earlier_weights(problem: Problem, orders: Orders) -> Orders:
    """The order in which W's run earlier where a rank has no room otherwise, however much it copies.

    What a W frees cannot be copied.
    """
    arrays, copies, m = problem.arrays, problem.copies, problem.microbatches
    moved = np.zeros(problem.n_stages) if copies is None else np.array(copies.offloadable, np.float64)
    cell = orders.stage * np.int64(m) + orders.microbatch
    is_first = np.zeros(len(orders), np.bool_) if orders.paired is None else orders.paired
    room, host = _limits(problem)
    order = np.arange(len(orders))
    for rank in range(problem.pp_degree):
        at = orders.slice_of(rank)
        delta = arrays.deltas(orders.stage[at], orders.letter[at], orders.microbatch[at])
        order[at] = at.start + run_earlier(
            orders.letter[at], cell[at], delta, moved[orders.stage[at]], is_first[at], room[rank], host[rank],
            problem.n_stages * m,
        )  # fmt: skip
    return replace(
        orders,
        stage=orders.stage[order],
        letter=orders.letter[order],
        microbatch=orders.microbatch[order],
        paired=None if orders.paired is None else orders.paired[order],
    )


@compiled
def run_earlier(
    letter: IntArray,
    cell: IntArray,
    delta: FloatArray,
    moved: FloatArray,
    is_first: BoolArray,
    room: float,
    host: float,
    cells: int,
) -> IntArray:  # pragma: no cover - compiled
    """The order of a rank's n actions in which the oldest W's run before actions that lack room.

    All F's are taken as copied, as far as the host has room for them at once.
    """
    n, held, away = len(letter), 0.0, 0.0
    order, size = np.empty(n, np.int64), 0
    weight, is_done = np.full(cells, -1), np.zeros(n, np.bool_)
    waiting, oldest, youngest = np.empty(n, np.int64), 0, 0
    for at in range(n):
        if letter[at] == W:
            weight[cell[at]] = at
    for at in range(n):
        if is_done[at]:
            continue
        # Before a pair, there must be room for both of its actions.
        last = at + 1 if is_first[at] else at
        back = moved[last] if letter[last] == I or letter[last] == B else 0.0
        needed = max(0.0, delta[at], delta[at] + (delta[last] if last > at else 0.0))
        is_second = at > 0 and is_first[at - 1]
        while not is_second and letter[at] != W and oldest < youngest:
            if held + needed - min(away - back, host) <= room:
                break
            which, oldest = waiting[oldest], oldest + 1
            if not is_done[which]:
                order[size], is_done[which] = which, True
                size, held = size + 1, held + delta[which]
        order[size], is_done[at] = at, True
        size, held = size + 1, held + delta[at]
        if letter[at] == F:
            away += moved[at]
        elif letter[at] != W:
            away -= moved[at]
            if letter[at] == I:
                waiting[youngest], youngest = weight[cell[at]], youngest + 1
    return order


def _limits(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """(p,) memory of every rank that is not static, and of its host; inf without a limit."""
    limit, copies = problem.arrays.limit, problem.copies
    tolerance = np.where(np.isfinite(limit), SEARCH_MEMORY * np.abs(limit), 0.0)
    host = None if copies is None else copies.host_limit
    return limit + tolerance - problem.arrays.static, np.array(host or (np.inf,) * problem.pp_degree)


def _rank_of(problem: Problem, orders: Orders, rank: int, start: FloatArray, end: FloatArray) -> Rank:
    part, arrays, copies = orders.slice_of(rank), problem.arrays, problem.copies
    stage, letter, microbatch = orders.stage[part], orders.letter[part], orders.microbatch[part]
    is_first = np.zeros(len(stage), np.bool_) if orders.paired is None else orders.paired[part]
    begins = ~np.append(False, is_first[:-1])
    begin, number = np.flatnonzero(begins), np.cumsum(begins) - 1  # of the entry of every action
    delta = arrays.deltas(stage, letter, microbatch)
    change = np.add.reduceat(delta, begin)
    needs = np.maximum(np.maximum(change, delta[begin]), 0.0)  # in a pair, an F comes first
    cell = stage * np.int64(problem.microbatches) + microbatch
    forward, backward = np.flatnonzero(letter == F), np.flatnonzero((letter == I) | (letter == B))
    of_cell = np.zeros(problem.n_stages * problem.microbatches, np.int64)
    of_cell[cell[backward]] = number[backward]
    needed = of_cell[cell[forward]]
    of = stage[forward]
    limit, host = _limits(problem)
    moved, out, back = (
        np.zeros(problem.n_stages) if copies is None else np.array(getattr(copies, name), dtype=np.float64)
        for name in ("offloadable", "offload", "reload")
    )
    return Rank(
        begin,
        start[part][begin],
        end[part][begin],
        needs,
        change,
        number[forward],
        needed,
        np.argsort(needed),
        moved[of],
        out[of],
        back[of],
        float(limit[rank]),
        float(host[rank]),
    )


def _rows(orders: Orders, rank: int, own: Rank, choice: Choice) -> IntArray:
    """The copies of a rank as :attr:`Orders.copies`: before an action, O's first, then D's, then R's."""
    begin, rows = orders.offset[rank] + own.begin, []
    for which in np.flatnonzero(choice.chosen).tolist():
        at = begin[own.forward[which]]
        stage, microbatch = int(orders.stage[at]), int(orders.microbatch[at])
        places = begin[[own.forward[which] + 1, choice.freed[which], choice.taken[which]]]
        for place, letter in zip(places, (O, D, R), strict=True):
            rows.append((int(place), letter, stage, microbatch, int(own.backward[which])))
    order = {O: 0, D: 1, R: 2}
    rows.sort(key=lambda row: (row[0], order[row[1]], row[4] if row[1] == R else 0))
    return np.array([row[:4] for row in rows], np.int32).reshape(-1, 4)


@compiled
def choose(rank: Rank, choice: Choice) -> int:  # pragma: no cover - compiled
    """Choose copies until the rank keeps its limit; returns where that is impossible, or NEVER."""
    a, n, over = len(rank.forward), len(rank.start), NEVER
    _place(rank, choice)
    for _ in range(4 * a + n):
        over = _first_over(rank, choice)
        if over == NEVER:
            _drop_needless(rank, choice)
            return over
        if not (_add_in_time(rank, choice, over) or _force(rank, choice, over)):
            return over
    return over


@compiled
def _place(rank: Rank, choice: Choice) -> bool:  # pragma: no cover - compiled
    """Place D's and R's of the chosen copies, and compute what the rank holds; False if one is too late.

    A copy that is too late has its R right after its D, or where it is forced to be.
    """
    in_time, free, n = True, -np.inf, len(rank.start)
    for which in range(len(rank.forward)):
        if not choice.chosen[which]:
            continue
        at = rank.forward[which]
        free = max(free, rank.end[at]) + rank.offload[which]
        place = at + 1
        while place < rank.backward[which] and rank.end[place - 1] < free:
            place += 1
        in_time &= rank.end[place - 1] >= free or place > choice.latest_freed[which]
        choice.freed[which] = min(place, max(at + 1, choice.latest_freed[which]))
    free = np.inf
    for number in range(len(rank.forward) - 1, -1, -1):
        which = rank.by_backward[number]
        if not choice.chosen[which]:
            continue
        at = rank.backward[which]
        free = min(free, rank.start[at]) - rank.reload[which]
        place = at
        while place > choice.freed[which] and rank.end[place - 1] > free:
            place -= 1
        in_time &= rank.end[place - 1] <= free
        choice.taken[which] = min(at, max(place, choice.earliest_taken[which]))
    held = np.zeros(n + 1)
    for which in range(len(rank.forward)):
        if choice.chosen[which]:
            held[choice.freed[which]] -= rank.amount[which]
            held[choice.taken[which]] += rank.amount[which]
    total = 0.0
    for at in range(n):
        total += held[at]
        choice.held[at] = total + rank.room[at]
        total += rank.delta[at]
    return in_time


@compiled
def _first_over(rank: Rank, choice: Choice) -> int:  # pragma: no cover - compiled
    """The first action at which the rank holds more than its limit, or NEVER."""
    for at in range(len(choice.held)):
        if choice.held[at] > rank.limit:
            return at
    return NEVER


@compiled
def _fits_host(rank: Rank, choice: Choice) -> bool:  # pragma: no cover - compiled
    """Whether the host has room for all copies at once; it keeps one until its backward has ended."""
    if rank.host == np.inf:
        return True
    change = np.zeros(len(rank.start) + 1)
    for which in range(len(rank.forward)):
        if choice.chosen[which]:
            change[rank.forward[which] + 1] += rank.amount[which]
            change[rank.backward[which] + 1] -= rank.amount[which]
    total = 0.0
    for at in range(len(change)):
        total += change[at]
        if total > rank.host:
            return False
    return True


@compiled
def _add_in_time(rank: Rank, choice: Choice, over: int) -> bool:  # pragma: no cover - compiled
    """Add the copy that is away while an action runs, and needed last; False if all would be late."""
    a = len(rank.forward)
    for number in range(a - 1, -1, -1):
        which = rank.by_backward[number]
        if rank.backward[which] <= over:
            return False
        if choice.chosen[which] or rank.forward[which] >= over or rank.amount[which] <= 0:
            continue
        choice.chosen[which] = True
        in_time = _place(rank, choice)
        if in_time and choice.freed[which] <= over < choice.taken[which] and _fits_host(rank, choice):
            return True
        choice.chosen[which] = False
        _place(rank, choice)
    return False


@compiled
def _force(rank: Rank, choice: Choice, over: int) -> bool:  # pragma: no cover - compiled
    """Keep an activation away while an action runs, though the rank waits for it; False if there is none."""
    for number in range(len(rank.forward) - 1, -1, -1):
        which = rank.by_backward[number]
        if rank.backward[which] <= over:
            return False
        is_away = choice.chosen[which] and choice.freed[which] <= over < choice.taken[which]
        if is_away or rank.forward[which] >= over or rank.amount[which] <= 0:
            continue
        was = choice.chosen[which]
        choice.chosen[which] = True
        if not _fits_host(rank, choice):
            choice.chosen[which] = was
            continue
        choice.latest_freed[which] = min(choice.latest_freed[which], over)
        choice.earliest_taken[which] = max(choice.earliest_taken[which], over + 1)
        _place(rank, choice)
        return True
    return False


@compiled
def _drop_needless(rank: Rank, choice: Choice) -> None:  # pragma: no cover - compiled
    """Drop copies as long as the rank keeps its limit, those that are away for the shortest time first."""
    a = len(rank.forward)
    away = np.empty(a)
    for which in range(a):
        away[which] = rank.start[rank.backward[which]] - rank.end[rank.forward[which]]
    for which in np.argsort(away):
        if not choice.chosen[which]:
            continue
        is_needed = False
        for at in range(choice.freed[which], choice.taken[which]):
            is_needed |= choice.held[at] + rank.amount[which] > rank.limit
        if is_needed:
            continue
        choice.chosen[which] = False
        _place(rank, choice)
        if _first_over(rank, choice) != NEVER:
            choice.chosen[which] = True
            _place(rank, choice)
