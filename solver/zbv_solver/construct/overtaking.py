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

from zbv_solver.construct.board import BACK, FRONT, NOTHING
from zbv_solver.construct.tables import Tables, make_tables
from zbv_solver.kernels.jit import ZERO, BoolArray, FloatArray, IntArray, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.timing.start_times import earliest_times


class Large(NamedTuple):
    """The F's and backwards of the large microbatches, in order, for p ranks with up to n of them."""

    is_large: BoolArray
    """(m,) bool."""
    code: IntArray
    microbatch: IntArray
    """(p, n) int64."""
    latest: FloatArray
    """(p, n) float64: the latest start with which the order ends by time 0."""
    length: IntArray
    """(p,) their number."""

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
    """How small microbatches share the ranks with the large ones."""

    deadline: float
    """When the order of the large ones is to end."""
    slack: float
    """Share of the time from its arrival to its latest start that a large one may be delayed by small
    ones."""
    place: FloatArray
    """(m,) float64: small ones enter in ascending order of these numbers."""
    priority: FloatArray
    """(4 * chunks,) float64, by code: of actions that could start at once, the smallest number goes first."""
    cap: int
    """Most small microbatches in flight."""
    patience: float
    """A W may start if it delays the next known action by at most this share of its duration."""
    by_arrival: bool
    """Whether actions of a code run as their inputs arrive; otherwise by ``place``."""


class OvertakingBoard(NamedTuple):
    """The actions placed so far; kernels write into these arrays."""

    arrived: FloatArray
    """(2S, m): when the input of a position is there; inf while unknown."""
    waiting: IntArray
    waits: IntArray
    """(2S, m) int64 and (2S,): small microbatches whose input is known, and their number."""
    following: IntArray
    """(p,): index of the next large action."""
    is_late: BoolArray
    """(p,) bool: the latest start of the next large action no longer counts."""
    reserved: FloatArray
    """(p,): memory held, with what the microbatches that have begun will still need."""
    clock: FloatArray
    first: FloatArray
    """(p,): end of the last action, and the first start."""
    queue: IntArray
    ends: IntArray
    """(p, chunks * m, 2) and (p, 2): codes and microbatches of the waiting W's, and FRONT and BACK of this
    queue."""
    flight: IntArray
    """(1,): small microbatches in flight."""
    chosen: IntArray
    start: FloatArray
    """(p, 2) and (p,): code and microbatch that every rank would run next, and when."""
    code: IntArray
    microbatch: IntArray
    """(p, 3 * chunks * m): the order so far."""
    length: IntArray
    """(p,): number of actions in it."""

    @classmethod
    def of(cls, tables: Tables) -> OvertakingBoard:
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
        self.board = OvertakingBoard.of(self.tables)
        self.halt = np.zeros(1, np.uint8) if halt is None else halt

    def value(self, rule: OvertakingRule, most: float = np.inf) -> float:
        """The objective at earliest start; inf if memory blocks the order or it is worse than ``most``."""
        is_span, actions = self.problem.objective == "span", self.problem.max_actions
        return float(_place_all(self.tables, self.large, rule, self.board, is_span, most, actions, self.halt))

    def orders(self) -> Orders:
        """The order of the last rule, which must be complete."""
        rows, stages = [], np.array(self.problem.placement.stages_of)
        for rank, until in enumerate(self.board.length):
            code = self.board.code[rank, :until]
            rows.append([stages[rank, code >> 2], code & 3, self.board.microbatch[rank, :until]])
        return Orders.of_rows([np.stack(row, axis=1).astype(np.int32) for row in rows])


@compiled_leaf
def _place_all(
    tables: Tables,
    large: Large,
    rule: OvertakingRule,
    board: OvertakingBoard,
    is_span: bool,
    most: float,
    actions: int,
    halt: IntArray,
) -> float:  # pragma: no cover - compiled
    """Place all actions, and return the objective; inf if that is not possible."""
    _clear(tables, large, board)
    p, start = len(board.clock), board.start
    for rank in range(p):
        _choose(tables, large, rule, board, rank)
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
                if board.following[other] < large.length[other] and not board.is_late[other]:
                    board.is_late[other], stuck = True, False
                    _choose(tables, large, rule, board, other)
            if stuck:
                return np.inf
            continue
        action = board.chosen[rank, 0]
        _place(tables, large, board, rank)
        placed += 1
        if board.clock[rank] - (board.first[rank] if is_span else 0.0) > most:
            return np.inf
        _choose(tables, large, rule, board, rank)
        after = tables.position[rank, action] + 1
        if after == len(tables.host):  # a microbatch less in flight
            _choose(tables, large, rule, board, tables.host[0])
        elif after > 0 and tables.host[after] != rank:
            _choose(tables, large, rule, board, tables.host[after])
    if placed < actions:
        return np.inf
    longest, first, last = -np.inf, np.inf, -np.inf
    for rank in range(p):
        longest = max(longest, board.clock[rank] - board.first[rank])
        first, last = min(first, board.first[rank]), max(last, board.clock[rank])
    return longest if is_span else last - first


@compiled_leaf
def _clear(tables: Tables, large: Large, board: OvertakingBoard) -> None:  # pragma: no cover - compiled
    """Remove everything; all microbatches wait to enter."""
    board.arrived.fill(np.inf)
    for array in (board.waits, board.following, board.length, board.flight):
        array.fill(0)
    board.is_late.fill(False)
    board.ends.fill(0)
    board.clock.fill(0.0)
    for rank in range(len(board.clock)):
        board.reserved[rank] = tables.static[rank]
    for k in range(tables.microbatches):
        board.arrived[0, k] = 0.0
        if not large.is_large[k]:
            board.waiting[0, board.waits[0]] = k
            board.waits[0] += 1


@compiled_leaf
def _needed(tables: Tables, rank: int, k: int) -> float:  # pragma: no cover - compiled
    """Memory that a microbatch needs on a rank at most."""
    needed, kind = 0.0, tables.kind[k]
    for chunk in range(tables.position.shape[1] // 4):
        needed += tables.delta[rank, 4 * chunk + F, kind] + max(0.0, tables.delta[rank, 4 * chunk + I, kind])
    return needed


@compiled_leaf
def _fits(
    tables: Tables, board: OvertakingBoard, rank: int, action: int, k: int
) -> bool:  # pragma: no cover - compiled
    """Whether there is memory for an action.

    A microbatch reserves all that it needs on a rank with its first F there. No deadlock arises where every
    microbatch first comes to the ranks in the same sequence: those that have begun on the last rank where any
    waits for memory go on, return, and release theirs.
    """
    return action != F or board.reserved[rank] + _needed(tables, rank, k) <= tables.limit[rank]


@compiled_leaf
def _choose(
    tables: Tables, large: Large, rule: OvertakingRule, board: OvertakingBoard, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose what the rank would run next: the next large action, a small one, or a W."""
    clock, chosen = board.clock[rank], board.chosen[rank]
    chosen[0], begin, until, is_blocked = NOTHING, np.inf, np.inf, False
    at = board.following[rank]
    if at < large.length[rank]:
        action, k = large.code[rank, at], large.microbatch[rank, at]
        arrives = board.arrived[tables.position[rank, action], k]
        is_blocked = not _fits(tables, board, rank, action, k)
        if not board.is_late[rank]:
            until = rule.deadline + large.latest[rank, at]
        if arrives < np.inf and not is_blocked:
            chosen[0], chosen[1], begin = action, k, max(clock, arrives)
            until = begin if board.is_late[rank] else begin + rule.slack * max(0.0, until - begin)
    small_begin, small_wish, small_turn = np.inf, np.inf, np.inf
    for action in range(tables.position.shape[1]):
        position = tables.position[rank, action]
        if action & 3 > I or (position == 0 and board.flight[0] >= rule.cap):
            continue
        for at in range(board.waits[position]):
            k = board.waiting[position, at]
            starts = max(clock, board.arrived[position, k])
            if starts > small_begin or starts + tables.duration[rank, action, tables.kind[k]] > until:
                continue
            if not _fits(tables, board, rank, action, k):
                is_blocked = True
                continue
            wish = rule.priority[action]
            turn = board.arrived[position, k] if rule.by_arrival and position > 0 else rule.place[k]
            # The earliest start wins, then the smallest priority.
            if starts < small_begin or wish < small_wish or (wish == small_wish and turn < small_turn):
                small_begin, small_wish, small_turn = starts, wish, turn
                if starts < begin or (starts == begin and rule.slack > 0.0):
                    chosen[0], chosen[1] = action, k
    begin = min(begin, small_begin)
    front = board.ends[rank, FRONT]
    if front < board.ends[rank, BACK]:
        action, k = board.queue[rank, front, 0], board.queue[rank, front, 1]
        takes = tables.duration[rank, action, tables.kind[k]]
        if begin > clock and (is_blocked or clock + takes - begin <= rule.patience * takes):
            chosen[0], chosen[1], begin = action, k, clock
    board.start[rank] = begin


@compiled_leaf
def _place(
    tables: Tables, large: Large, board: OvertakingBoard, rank: int
) -> None:  # pragma: no cover - compiled
    """Place what the rank has chosen."""
    action, k = board.chosen[rank, 0], board.chosen[rank, 1]
    kind, at, letter = tables.kind[k], board.length[rank], action & 3
    if at == 0:
        board.first[rank] = board.start[rank]
    end = board.start[rank] + tables.duration[rank, action, kind]
    board.clock[rank] = end
    board.code[rank, at], board.microbatch[rank, at] = action, k
    board.length[rank] = at + 1
    if letter == W:
        board.ends[rank, FRONT] += 1
        board.reserved[rank] += tables.delta[rank, action, kind]
        return
    if action == F:
        board.reserved[rank] += _needed(tables, rank, k)
    if letter == I:
        # What an I adds is reserved already.
        board.reserved[rank] += min(0.0, tables.delta[rank, action, kind])
        back = board.ends[rank, BACK]
        board.queue[rank, back, 0], board.queue[rank, back, 1] = action - I + W, k
        board.ends[rank, BACK] = back + 1
    position = tables.position[rank, action]
    after, is_small = position + 1, not large.is_large[k]
    if after < len(tables.host):
        board.arrived[after, k] = end + tables.latency[after, kind]
    if not is_small:
        board.following[rank] += 1
        board.is_late[rank] = False
        return
    _leave(board, position, k)
    if position == 0:
        board.flight[0] += 1
    if after < len(tables.host):
        board.waiting[after, board.waits[after]] = k
        board.waits[after] += 1
    else:
        board.flight[0] -= 1


@compiled_leaf
def _leave(board: OvertakingBoard, position: int, k: int) -> None:  # pragma: no cover - compiled
    """Remove a microbatch from those that wait at a position."""
    last = board.waits[position] - 1
    for at in range(last):
        if board.waiting[position, at] == k:
            board.waiting[position, at] = board.waiting[position, last]
            break
    board.waits[position] = last
