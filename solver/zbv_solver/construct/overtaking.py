"""List scheduling in which small microbatches overtake large ones.

Elsewhere in this folder, all stages run the microbatches in one order of entry. That is costly where the path
of one microbatch through the pipeline takes longer than the work of any rank: all others then run before or
after it, although they could run while it computes on another rank or while its tensors are on their way.
Here the large microbatches have fixed orders on every rank, and a latest start for each of their actions. The
rank that can start an action first does so, as in :mod:`.dispatch`: an action of a large microbatch as
soon as its input is there, and one of a small microbatch if the next large one can still start in time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import BACK, FRONT
from zbv_solver.construct.tables import Tables, make_tables
from zbv_solver.kernels.arrays import ZERO, BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.timing.start_times import earliest_times

NOTHING = -1


class Large(NamedTuple):
    """The F's and backwards of the large microbatches, in order, for p ranks with up to n of them.

    Attributes
    ----------
    is_large
        (m,) bool.
    code, microbatch
        (p, n) int64.
    latest
        (p, n) float64: the latest start with which the order ends by time 0.
    length
        (p,) their number.
    """

    is_large: BoolArray
    code: IntArray
    microbatch: IntArray
    latest: FloatArray
    length: IntArray

    @classmethod
    def of(cls, problem: Problem, chosen: IntArray, alone: Problem, orders: Orders) -> Large:
        """From orders of the problem ``alone``, which has only the microbatches ``chosen`` (n,)."""
        p, n = problem.pp_degree, 2 * problem.placement.chunks * len(chosen)
        code, microbatch = np.zeros((p, n), np.int64), np.zeros((p, n), np.int64)
        for rank in range(p):
            part = orders.slice_of(rank)
            stays = orders.letter[part] != W
            stage, letter = orders.stage[part][stays], orders.letter[part][stays]
            code[rank] = np.array(problem.placement.chunk_of)[stage] * 4 + np.where(letter == F, F, I)
            microbatch[rank] = chosen[orders.microbatch[part][stays]]
        is_large = np.zeros(problem.microbatches, np.bool_)
        is_large[chosen] = True
        latest = _latest_starts(make_tables(problem), code, microbatch, alone, orders)
        return cls(is_large, code, microbatch, latest, np.full(p, n))


def _latest_starts(
    tables: Tables, code: IntArray, microbatch: IntArray, alone: Problem, orders: Orders
) -> FloatArray:
    """Latest starts (p, n) with which an order without its W's ends by time 0."""
    start, _ = earliest_times(alone, orders)
    begun = start[orders.letter != W]
    n, latest = code.shape[1], np.zeros(code.shape)
    of_position: dict[tuple[int, int], float] = {}
    # Descending starts: what follows an action comes before it.
    for flat in np.lexsort((np.arange(len(begun)), begun))[::-1].tolist():
        rank, at = divmod(flat, n)
        k = int(microbatch[rank, at])
        position, kind = int(tables.position[rank, code[rank, at]]), tables.kind[k]
        end = latest[rank, at + 1] if at + 1 < n else 0.0
        if (position + 1, k) in of_position:
            end = min(end, of_position[position + 1, k] - tables.latency[position + 1, kind])
        latest[rank, at] = end - tables.duration[rank, code[rank, at], kind]
        of_position[position, k] = float(latest[rank, at])
    return latest


class OvertakingRule(NamedTuple):
    """How small microbatches share the ranks with the large ones.

    Attributes
    ----------
    deadline
        When the order of the large ones is to end.
    slack
        Share of the time from its arrival to its latest start that a large one may be delayed by small ones.
    place
        (m,) float64: small ones enter in ascending order of these numbers.
    priority
        (4 * chunks,) float64, by code: of actions that could start at once, the smallest number goes first.
    cap
        Most small microbatches in flight.
    patience
        A W may start if it delays the next known action by at most this share of its duration.
    by_arrival
        Whether actions of a code run as their inputs arrive; otherwise by ``place``.
    """

    deadline: float
    slack: float
    place: FloatArray
    priority: FloatArray
    cap: int
    patience: float
    by_arrival: bool


class Dispatch(NamedTuple):
    """The actions placed so far; kernels write into these arrays.

    Attributes
    ----------
    arrived
        (2S, m): when the input of a position is there; inf while unknown.
    waiting, waits
        (2S, m) int64 and (2S,): small microbatches whose input is known, and their number.
    following
        (p,): index of the next large action.
    is_late
        (p,) bool: the latest start of the next large action no longer counts.
    reserved
        (p,): memory held, with what the microbatches that have begun will still need.
    clock, first
        (p,): end of the last action, and the first start.
    queue, ends
        (p, chunks * m, 2) and (p, 2): codes and microbatches of the waiting W's, and FRONT and BACK of this
        queue.
    flight
        (1,): small microbatches in flight.
    chosen, start
        (p, 2) and (p,): code and microbatch that every rank would run next, and when.
    code, microbatch
        (p, 3 * chunks * m): the order so far.
    length
        (p,): number of actions in it.
    """

    arrived: FloatArray
    waiting: IntArray
    waits: IntArray
    following: IntArray
    is_late: BoolArray
    reserved: FloatArray
    clock: FloatArray
    first: FloatArray
    queue: IntArray
    ends: IntArray
    flight: IntArray
    chosen: IntArray
    start: FloatArray
    code: IntArray
    microbatch: IntArray
    length: IntArray

    @classmethod
    def of(cls, tables: Tables) -> Dispatch:
        """Nothing placed."""
        p, chunks, m, positions = tables.pp_degree, tables.chunks, tables.microbatches, len(tables.latency)
        return cls(
            arrived=np.zeros((positions, m)),
            waiting=np.zeros((positions, m), np.int64),
            waits=np.zeros(positions, np.int64),
            following=np.zeros(p, np.int64),
            is_late=np.zeros(p, np.bool_),
            reserved=np.zeros(p),
            clock=np.zeros(p),
            first=np.zeros(p),
            queue=np.zeros((p, chunks * m, 2), np.int64),
            ends=np.zeros((p, 2), np.int64),
            flight=np.zeros(1, np.int64),
            chosen=np.zeros((p, 2), np.int64),
            start=np.zeros(p),
            code=np.zeros((p, 3 * chunks * m), np.int64),
            microbatch=np.zeros((p, 3 * chunks * m), np.int64),
            length=np.zeros(p, np.int64),
        )


class OvertakingScheduler:
    """Constructs orders of one problem around the large microbatches' orders."""

    def __init__(self, problem: Problem, large: Large, halt: IntArray | None = None):
        self.problem, self.large = problem, large
        self.tables = make_tables(problem)
        self.dispatch = Dispatch.of(self.tables)
        self.halt = np.zeros(1, np.uint8) if halt is None else halt

    def value(self, rule: OvertakingRule, most: float = np.inf) -> float:
        """The objective at earliest start; inf if memory blocks the order or it is worse than ``most``."""
        is_span, actions = self.problem.objective == "span", self.problem.max_actions
        return float(
            _dispatch(self.tables, self.large, rule, self.dispatch, is_span, most, actions, self.halt)
        )

    def orders(self) -> Orders:
        """The order of the last rule, which must be complete."""
        rows, stages = [], np.array(self.problem.placement.stages_of)
        for rank, until in enumerate(self.dispatch.length):
            code = self.dispatch.code[rank, :until]
            rows.append([stages[rank, code >> 2], code & 3, self.dispatch.microbatch[rank, :until]])
        return Orders.of_rows([np.stack(row, axis=1).astype(np.int32) for row in rows])


@compiled_leaf
def _dispatch(
    tables: Tables,
    large: Large,
    rule: OvertakingRule,
    dispatch: Dispatch,
    is_span: bool,
    most: float,
    actions: int,
    halt: IntArray,
) -> float:  # pragma: no cover - compiled
    """Place all actions, and return the objective; inf if that is not possible."""
    _clear(tables, large, dispatch)
    p, start = len(dispatch.clock), dispatch.start
    for rank in range(p):
        _choose(tables, large, rule, dispatch, rank)
    placed = 0
    while placed < actions and not halt[0]:
        rank = ZERO
        for other in range(1, p):
            if start[other] < start[rank]:
                rank = other
        if start[rank] == np.inf:
            # All wait for large microbatches that wait for small ones.
            stuck = True
            for other in range(p):
                if dispatch.following[other] < large.length[other] and not dispatch.is_late[other]:
                    dispatch.is_late[other], stuck = True, False
                    _choose(tables, large, rule, dispatch, other)
            if stuck:
                return np.inf
            continue
        action = dispatch.chosen[rank, 0]
        _place(tables, large, dispatch, rank)
        placed += 1
        if dispatch.clock[rank] - (dispatch.first[rank] if is_span else 0.0) > most:
            return np.inf
        _choose(tables, large, rule, dispatch, rank)
        after = tables.position[rank, action] + 1
        if after == len(tables.host):  # a microbatch less in flight
            _choose(tables, large, rule, dispatch, tables.host[0])
        elif after > 0 and tables.host[after] != rank:
            _choose(tables, large, rule, dispatch, tables.host[after])
    if placed < actions:
        return np.inf
    longest, first, last = -np.inf, np.inf, -np.inf
    for rank in range(p):
        longest = max(longest, dispatch.clock[rank] - dispatch.first[rank])
        first, last = min(first, dispatch.first[rank]), max(last, dispatch.clock[rank])
    return longest if is_span else last - first


@compiled_leaf
def _clear(tables: Tables, large: Large, dispatch: Dispatch) -> None:  # pragma: no cover - compiled
    """Remove everything; all microbatches wait to enter."""
    dispatch.arrived.fill(np.inf)
    for array in (dispatch.waits, dispatch.following, dispatch.length, dispatch.flight):
        array.fill(0)
    dispatch.is_late.fill(False)
    dispatch.ends.fill(0)
    dispatch.clock.fill(0.0)
    for rank in range(len(dispatch.clock)):
        dispatch.reserved[rank] = tables.static[rank]
    for k in range(tables.microbatches):
        dispatch.arrived[0, k] = 0.0
        if not large.is_large[k]:
            dispatch.waiting[0, dispatch.waits[0]] = k
            dispatch.waits[0] += 1


@compiled_leaf
def _needed(tables: Tables, rank: int, k: int) -> float:  # pragma: no cover - compiled
    """Memory that a microbatch needs on a rank at most."""
    needed, kind = 0.0, tables.kind[k]
    for chunk in range(tables.position.shape[1] // 4):
        needed += tables.delta[rank, 4 * chunk + F, kind] + max(0.0, tables.delta[rank, 4 * chunk + I, kind])
    return needed


@compiled_leaf
def _fits(
    tables: Tables, dispatch: Dispatch, rank: int, action: int, k: int
) -> bool:  # pragma: no cover - compiled
    """Whether there is memory for an action.

    A microbatch reserves all that it needs on a rank with its first F there. No deadlock arises where every
    microbatch first comes to the ranks in the same sequence: those that have begun on the last rank where any
    waits for memory go on, return, and release theirs.
    """
    return action != F or dispatch.reserved[rank] + _needed(tables, rank, k) <= tables.limit[rank]


@compiled_leaf
def _choose(
    tables: Tables, large: Large, rule: OvertakingRule, dispatch: Dispatch, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose what the rank would run next: the next large action, a small one, or a W."""
    clock, chosen = dispatch.clock[rank], dispatch.chosen[rank]
    chosen[0], begin, until, is_blocked = NOTHING, np.inf, np.inf, False
    at = dispatch.following[rank]
    if at < large.length[rank]:
        action, k = large.code[rank, at], large.microbatch[rank, at]
        arrives = dispatch.arrived[tables.position[rank, action], k]
        is_blocked = not _fits(tables, dispatch, rank, action, k)
        if not dispatch.is_late[rank]:
            until = rule.deadline + large.latest[rank, at]
        if arrives < np.inf and not is_blocked:
            chosen[0], chosen[1], begin = action, k, max(clock, arrives)
            until = begin if dispatch.is_late[rank] else begin + rule.slack * max(0.0, until - begin)
    small_begin, small_wish, small_turn = np.inf, np.inf, np.inf
    for action in range(tables.position.shape[1]):
        position = tables.position[rank, action]
        if action & 3 > I or (position == 0 and dispatch.flight[0] >= rule.cap):
            continue
        for at in range(dispatch.waits[position]):
            k = dispatch.waiting[position, at]
            starts = max(clock, dispatch.arrived[position, k])
            if starts > small_begin or starts + tables.duration[rank, action, tables.kind[k]] > until:
                continue
            if not _fits(tables, dispatch, rank, action, k):
                is_blocked = True
                continue
            wish = rule.priority[action]
            turn = dispatch.arrived[position, k] if rule.by_arrival and position > 0 else rule.place[k]
            # The earliest start wins, then the smallest priority.
            if starts < small_begin or wish < small_wish or (wish == small_wish and turn < small_turn):
                small_begin, small_wish, small_turn = starts, wish, turn
                if starts < begin or (starts == begin and rule.slack > 0.0):
                    chosen[0], chosen[1] = action, k
    begin = min(begin, small_begin)
    front = dispatch.ends[rank, FRONT]
    if front < dispatch.ends[rank, BACK]:
        action, k = dispatch.queue[rank, front, 0], dispatch.queue[rank, front, 1]
        takes = tables.duration[rank, action, tables.kind[k]]
        if begin > clock and (is_blocked or clock + takes - begin <= rule.patience * takes):
            chosen[0], chosen[1], begin = action, k, clock
    dispatch.start[rank] = begin


@compiled_leaf
def _place(
    tables: Tables, large: Large, dispatch: Dispatch, rank: int
) -> None:  # pragma: no cover - compiled
    """Place what the rank has chosen."""
    action, k = dispatch.chosen[rank, 0], dispatch.chosen[rank, 1]
    kind, at, letter = tables.kind[k], dispatch.length[rank], action & 3
    if at == 0:
        dispatch.first[rank] = dispatch.start[rank]
    end = dispatch.start[rank] + tables.duration[rank, action, kind]
    dispatch.clock[rank] = end
    dispatch.code[rank, at], dispatch.microbatch[rank, at] = action, k
    dispatch.length[rank] = at + 1
    if letter == W:
        dispatch.ends[rank, FRONT] += 1
        dispatch.reserved[rank] += tables.delta[rank, action, kind]
        return
    if action == F:
        dispatch.reserved[rank] += _needed(tables, rank, k)
    if letter == I:
        # What an I adds is reserved already.
        dispatch.reserved[rank] += min(0.0, tables.delta[rank, action, kind])
        back = dispatch.ends[rank, BACK]
        dispatch.queue[rank, back, 0], dispatch.queue[rank, back, 1] = action - I + W, k
        dispatch.ends[rank, BACK] = back + 1
    position = tables.position[rank, action]
    after, is_small = position + 1, not large.is_large[k]
    if after < len(tables.host):
        dispatch.arrived[after, k] = end + tables.latency[after, kind]
    if not is_small:
        dispatch.following[rank] += 1
        dispatch.is_late[rank] = False
        return
    _leave(dispatch, position, k)
    if position == 0:
        dispatch.flight[0] += 1
    if after < len(tables.host):
        dispatch.waiting[after, dispatch.waits[after]] = k
        dispatch.waits[after] += 1
    else:
        dispatch.flight[0] -= 1


@compiled_leaf
def _leave(dispatch: Dispatch, position: int, k: int) -> None:  # pragma: no cover - compiled
    """Remove a microbatch from those that wait at a position."""
    last = dispatch.waits[position] - 1
    for at in range(last):
        if dispatch.waiting[position, at] == k:
            dispatch.waiting[position, at] = dispatch.waiting[position, last]
            break
    dispatch.waits[position] = last
