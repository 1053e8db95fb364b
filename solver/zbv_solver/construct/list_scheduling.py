"""List scheduling by priority rules: any placement, any feasible memory limit.

The rank that can start an action first does so; a rule chooses among its ready actions. Forwards are
admitted only without risk of a deadlock (:func:`~.board.admits_forward`), and up to a cap on the microbatches
in flight, since filling memory greedily makes plans worse. Where the structured greedy fails for lack of
memory, list scheduling still finds orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.board import (
    BACK,
    CLOCK,
    FRONT,
    HELD,
    Board,
    admits_forward,
    arrival,
    enter,
    idle_until,
    next_kind,
    place,
    replay,
)
from zbv_solver.construct.entry_orders import sizes_of_kinds
from zbv_solver.construct.rules import Rule, portfolio, simple_rule
from zbv_solver.construct.tables import Tables, fuse_options, make_tables
from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_inline, compiled_leaf
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, F, I, Problem, W

NOTHING = -1
POLL_EVERY = 4096
"""Number of actions between two checks of the halt flag."""
START, END, PRIORITY, SIZE = range(4)
"""Columns of ``Candidates.offer``."""


class Candidates(NamedTuple):
    """What every rank could place next, and what it would place; kernels write into it.

    Attributes
    ----------
    action
        (p,) code of the action that the rank would place if nothing else happened, or NOTHING.
    first, start
        (2 * leaves,) the rank that starts first, and its start, by subtree (:func:`~.board.enter`).
    slot
        (2S,) column in ``ready`` of a position.
    ready
        (p, 2 * chunks) arrival of the input of every chunk's next F, then of its next backward; inf while
        unknown.
    flight
        (p, chunks) microbatches in flight.
    again
        (p + 1,) the ranks that must choose again.
    code, offer
        (2 * chunks,) and (2 * chunks, 4): the actions that one rank could run next, and their START, END,
        PRIORITY, and the SIZE of their microbatch.
    """

    action: IntArray
    first: IntArray
    start: FloatArray
    slot: IntArray
    ready: FloatArray
    flight: IntArray
    again: IntArray
    code: IntArray
    offer: FloatArray

    @classmethod
    def of(cls, tables: Tables) -> Candidates:
        """Space for a problem."""
        p, chunks = tables.pp_degree, tables.chunks
        leaves = 1 << (p - 1).bit_length()
        slot = np.zeros(2 * p * chunks, np.int64)
        for chunk in range(chunks):
            slot[tables.position[:, 4 * chunk + F]] = chunk
            slot[tables.position[:, 4 * chunk + I]] = chunks + chunk
        return cls(
            np.full(p, NOTHING, np.int64),
            np.concatenate([np.zeros(leaves, np.int64), np.arange(leaves)]),
            np.full(2 * leaves, np.inf),
            slot,
            np.full((p, 2 * chunks), np.inf),
            np.zeros((p, chunks), np.int64),
            np.zeros(p + 1, np.int64),
            np.zeros(2 * chunks, np.int64),
            np.zeros((2 * chunks, 4)),
        )


class ListScheduler:
    """Constructs orders of one problem by rules, on one board that is reused."""

    def __init__(
        self,
        problem: Problem,
        fuse: BoolArray | None = None,
        halt: IntArray | None = None,
    ):
        self.problem = problem
        self.tables = make_tables(problem, fuse)
        self.board = Board.of(self.tables, halt)
        self.candidates = Candidates.of(self.tables)
        self.least_loads = self.tables.loads(least=True) * (1 - ROUNDING)
        self.size = sizes_of_kinds(problem)
        self.is_span = problem.objective == "span"

    def value(self, rule: Rule, most: float = np.inf, kept: tuple[IntArray, IntArray] | None = None) -> float:
        """The objective of the rule's order at earliest start; inf if the order is incomplete.

        Parameters
        ----------
        most
            An order that is certain to be worse than this is abandoned and counts as incomplete.
        kept
            Codes (p, n) of an order, and how many actions of every rank (p,) to keep from its beginning; the
            rule places the others. The kept actions must be executable without the others.
        """
        tables, board = self.tables, self.board
        if not self.problem.is_equal:
            tables.enter(rule.entry, self.problem.arrays.kind_of)
        codes, until = (board.code, np.zeros_like(board.length)) if kept is None else kept
        replay(tables, board, codes, until)
        complete = _schedule(
            tables, board, self.candidates, rule, self.size, self.least_loads, self.is_span, most
        )
        return board.value(self.problem) if complete else float("inf")

    @property
    def placed(self) -> int:
        """Number of actions that the last rule placed."""
        return int(self.board.length.sum())

    def attempt(self, rule: Rule, method: str) -> Attempt | None:
        """The rule's order, or None if it is incomplete."""
        if self.value(rule) == float("inf"):
            return None
        return Attempt.of(method, self.problem, self.tables, self.board, rule)


def priority_schedules(problem: Problem, shares: tuple[float, ...] = (1.0, 0.75)) -> Iterator[Attempt]:
    """Orders of a small portfolio of rules; ``shares`` scale the caps that memory allows."""
    for fuse_name, fuse in fuse_options(problem):
        scheduler = ListScheduler(problem, fuse)
        for name, rule in portfolio(problem, shares):
            attempt = scheduler.attempt(rule, f"list({name},fuse={fuse_name})")
            if attempt is not None:
                yield attempt


def serial(problem: Problem) -> Attempt:
    """One microbatch after another with fused backwards: the smallest memory limit admits this order."""
    rule = simple_rule(problem, "backward-deep", 0.0, 0.0)
    scheduler = ListScheduler(problem, np.ones(problem.n_stages, dtype=np.bool_))
    attempt = scheduler.attempt(rule, "serial")
    if attempt is None:
        raise RuntimeError("one microbatch after another does not fit; please report this bug in zbv.")
    return attempt


@compiled_leaf
def _schedule(
    tables: Tables,
    board: Board,
    candidates: Candidates,
    rule: Rule,
    size: FloatArray,
    least_loads: FloatArray,
    is_span: bool,
    most: float,
) -> bool:  # pragma: no cover - compiled
    """Place all remaining actions; False if memory blocks them, if they exceed ``most``, or if halted.

    The rank whose choice starts first places it; a tournament tree over the ranks finds this rank in
    O(log p). A rank chooses again when it has placed an action, or when the input that it waits for becomes
    known.
    """
    first, start = candidates.first, candidates.start
    choosing, actions = _begin(tables, board, candidates), 0
    while True:
        for turn in range(choosing):
            _choose(tables, board, candidates, rule, size, candidates.again[turn])
        rank, begin = first[1], start[1]
        if begin == np.inf:
            break
        if idle_until(board, rank, begin, 0.0, is_span) + least_loads[rank] > most:
            return False
        action = candidates.action[rank]
        place(tables, board, rank, action, begin)
        candidates.again[0], choosing = rank, 1
        if action & 3 != W:
            waiting = _pass_on(tables, board, candidates, rule, rank, action)
            if waiting != NOTHING:
                candidates.again[1], choosing = waiting, 2
        actions += 1
        if actions % POLL_EVERY == 0 and board.halt[0]:
            return False
    missing = 0
    for rank in range(len(board.length)):
        missing += board.ends[rank, BACK] - board.ends[rank, FRONT]
    for here in range(len(board.placed)):
        missing += tables.microbatches - board.placed[here]
    return bool(missing == 0)


@compiled_inline
def _begin(tables: Tables, board: Board, candidates: Candidates) -> int:  # pragma: no cover - compiled
    """Write what follows from the board, and let all ranks choose; returns their number."""
    p, chunks = candidates.flight.shape
    candidates.start.fill(np.inf)
    for rank in range(p):
        candidates.again[rank] = rank
        for chunk in range(chunks):
            forward, back = 4 * chunk + F, 4 * chunk + I
            candidates.ready[rank, chunk] = arrival(tables, board, rank, forward)
            candidates.ready[rank, chunks + chunk] = arrival(tables, board, rank, back)
            begun, ended = tables.position[rank, forward], tables.position[rank, back]
            candidates.flight[rank, chunk] = board.placed[begun] - board.placed[ended]
    return len(candidates.action)


@compiled_inline
def _pass_on(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, rank: int, action: int
) -> int:  # pragma: no cover - compiled
    """Update inputs after an F or backward; returns the other rank that must choose again, or NOTHING."""
    host, slot, ready, start = tables.host, candidates.slot, candidates.ready, candidates.start
    here = tables.position[rank, action]
    k = board.placed[here] - 1
    candidates.flight[rank, action >> 2] += 1 if action & 3 == F else -1
    ready[rank, slot[here]] = arrival(tables, board, rank, action)
    # Only the microbatch just placed can be the one that the next position lacks. If that position is
    # further behind, the arrival of its next input is known already.
    if here + 1 == len(host) or board.placed[here + 1] != k:
        return NOTHING
    waiting = host[here + 1]
    input_at = board.end[here, k] + tables.latency[here + 1, tables.kind[k]]
    ready[waiting, slot[here + 1]] = input_at
    if waiting == rank:
        return NOTHING
    # No new choice is needed if that rank has an F or I to start at once.
    its_start = start[len(start) // 2 + waiting]
    busy = its_start == board.level[waiting, CLOCK] and candidates.action[waiting] & 3 <= I
    if busy and rule.defer[waiting] == np.inf and input_at > its_start:
        return NOTHING
    return int(waiting)


@compiled_inline
def _choose(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, size: FloatArray, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose the next action of a rank: NOTHING while no input is known.

    A W if the rank would wait, as far as patience allows, or if memory blocks the actions that could start.
    """
    chunks, clock, phase = candidates.flight.shape[1], board.level[rank, CLOCK], _phase(tables, board, rank)
    best, best_start, best_wish = NOTHING, np.inf, np.inf
    blocked, options, defers = False, 0, rule.defer[rank] < np.inf
    for chunk in range(chunks):
        for half in range(2):
            slot = chunk + half * chunks
            action, begin, wish, is_blocked = _option(tables, board, candidates, rule, rank, phase, slot)
            blocked |= is_blocked
            if action == NOTHING:
                continue
            # The earliest start wins, then the smallest priority, then the first candidate examined.
            if begin < best_start or (begin == best_start and wish < best_wish):
                best, best_start, best_wish = action, begin, wish
            if defers:
                kind, offer = next_kind(tables, board, rank, action), candidates.offer[options]
                candidates.code[options] = action
                offer[START], offer[END] = begin, begin + tables.duration[rank, action, kind]
                offer[PRIORITY], offer[SIZE] = wish, size[kind]
                options += 1
    if options > 1:
        best, best_start = _undeferred(candidates.code[:options], candidates.offer, rule.defer[rank])
    if board.ends[rank, FRONT] < board.ends[rank, BACK]:
        weight = 4 * board.queue[rank, board.ends[rank, FRONT]] + W
        kind = next_kind(tables, board, rank, weight)
        takes = tables.duration[rank, weight, kind]
        # Without any known input, ``best_start`` is inf and the overlap -inf, so a waiting W always runs. If
        # memory blocks an action, a W runs instead of idling or fusing, because it may release memory.
        overlap, allowed = clock + takes - best_start, rule.patience[rank, phase] * takes
        for one in range(options):
            is_larger = candidates.offer[one, SIZE] >= size[kind] * rule.defer[rank]
            if is_larger and clock + takes > candidates.offer[one, START]:
                allowed = min(allowed, 0.0)
        fills = best_start > clock and overlap <= allowed
        if fills or (blocked and (best_start > clock or best & 3 == B)):
            best, best_start = weight, clock
    candidates.action[rank] = best
    enter(candidates.first, candidates.start, rank, best_start)


@compiled_inline
def _phase(tables: Tables, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """See ``rules.PHASES``."""
    innermost = tables.position.shape[1] - 4
    if board.placed[tables.position[rank, F]] >= tables.microbatches:
        return 2
    return 1 if board.placed[tables.position[rank, innermost + I]] > 0 else 0


@compiled_inline
def _option(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, rank: int, phase: int, slot: int
) -> tuple[int, float, float, bool]:  # pragma: no cover - compiled
    """The code, start and priority of the next F or backward of a chunk, and whether memory blocks it.

    The code is NOTHING if its input is unknown, or for an F that does not fit or would exceed the cap. Where
    an I does not fit, it is that of B.
    """
    chunks, input_at = candidates.flight.shape[1], candidates.ready[rank, slot]
    begin = max(board.level[rank, CLOCK], input_at)
    if input_at == np.inf:
        return NOTHING, np.inf, np.inf, False
    if slot < chunks:
        in_flight = candidates.flight[rank, slot]
        if slot == 0 and in_flight >= rule.cap[rank, min(phase, 1)]:
            return NOTHING, np.inf, np.inf, False
        if not _admits(tables, board, rule, rank, slot, in_flight):
            return NOTHING, np.inf, np.inf, True
        group = slot if in_flight < rule.target[rank, slot] else chunks + slot
        return 4 * slot + F, begin, rule.priority[rank, phase, group], False
    code = 4 * (slot - chunks)
    letter, blocked = B, False
    if not tables.fuse[rank, slot - chunks]:
        grows = max(0.0, tables.delta[rank, code + I, next_kind(tables, board, rank, code + I)])
        blocked = board.level[rank, HELD] + grows > tables.limit[rank]
        letter = B if blocked else I
    return code + letter, begin, rule.priority[rank, phase, chunks + slot], blocked


@compiled_inline
def _admits(
    tables: Tables, board: Board, rule: Rule, rank: int, chunk: int, in_flight: int
) -> bool:  # pragma: no cover - compiled
    """Whether memory admits the next F of a chunk; where microbatches differ, the rule's room, too."""
    if tables.duration.shape[2] > 1 and chunk == 0 and in_flight > 0:
        kind = next_kind(tables, board, rank, 4 * chunk + F)
        if board.level[rank, HELD] + tables.delta[rank, F, kind] > rule.room[rank]:
            return False
    return bool(admits_forward(tables, board, rank, chunk))


@compiled_inline
def _undeferred(
    code: IntArray, offer: FloatArray, defer: float
) -> tuple[int, float]:  # pragma: no cover - compiled
    """The action that starts first among those that delay none of a much larger microbatch, and its start.

    There is one, because actions of the largest microbatch never defer.
    """
    best, best_start, best_wish = NOTHING, np.inf, np.inf
    for one in range(len(code)):
        begin, wish, yields = offer[one, START], offer[one, PRIORITY], False
        for other in range(len(code)):
            is_larger = offer[other, SIZE] >= defer * offer[one, SIZE]
            yields |= is_larger and begin <= offer[other, START] < offer[one, END]
        if not yields and (begin < best_start or (begin == best_start and wish < best_wish)):
            best, best_start, best_wish = code[one], begin, wish
    return best, best_start
