"""List scheduling: one kernel that dispatches actions by a rule, for any placement and feasible memory limit.

The rank that can start an action first does so, where a rule may delay actions; a rule also chooses among the
ready actions of a rank. Forwards are admitted only without risk of a deadlock
(:func:`~.board.admits_forward`), and up to a cap on the microbatches in flight, since filling memory greedily
makes plans worse. Where the structured greedy fails for lack of memory, list scheduling still finds orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import (
    BACK,
    CLOCK,
    FRONT,
    HELD,
    NOTHING,
    Attempt,
    Board,
    admits_forward,
    arrival,
    enter,
    idle_until,
    is_complete,
    next_kind,
    oldest_weight,
    place,
    replay,
)
from zbv_solver.construct.rules import Rule, portfolio, simple_rule
from zbv_solver.construct.tables import Tables, fuse_options, make_tables
from zbv_solver.kernels.jit import ZERO, BoolArray, FloatArray, IntArray, compiled_inline, compiled_leaf
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, F, I, Problem, W

POLL_EVERY = 4096
"""Number of actions between two checks of the halt flag."""
START, END, PRIORITY, SIZE = range(4)
"""Columns of ``Candidates.offer``."""


class Candidates(NamedTuple):
    """What every rank could place next, and what it would place; kernels write into it."""

    action: IntArray
    """(p,): code of the action that a rank would place if nothing else happened, or NOTHING."""
    begin: FloatArray
    """(p,): its start."""
    first: IntArray
    """(2 * leaves,): the rank with the smallest key, by subtree (:func:`~.board.enter`)."""
    least: FloatArray
    """(2 * leaves,): this key, which is the start plus the delay."""
    slot: IntArray
    """(2S,): column in ``ready`` of a position."""
    ready: FloatArray
    """(p, 2 * c): arrival of the input of every chunk's next F, then of its next backward; inf if unknown."""
    again: IntArray
    """(p + 1,): the ranks that must choose again."""
    code: IntArray
    """(2 * c,): the actions that one rank could run next."""
    offer: FloatArray
    """(2 * c, 4): their START, END, PRIORITY, and the SIZE of their microbatch."""
    least_load: FloatArray
    """(p,): time that a rank works at least."""

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
            action=np.full(p, NOTHING, np.int64),
            begin=np.zeros(p),
            first=np.concatenate([np.zeros(leaves, np.int64), np.arange(leaves)]),
            least=np.full(2 * leaves, np.inf),
            slot=slot,
            ready=np.full((p, 2 * chunks), np.inf),
            again=np.zeros(p + 1, np.int64),
            code=np.zeros(2 * chunks, np.int64),
            offer=np.zeros((2 * chunks, 4)),
            least_load=tables.loads(least=True) * (1 - ROUNDING),
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
        self.is_span = problem.objective == "span"

    def value(self, rule: Rule, most: float = np.inf, kept: tuple[IntArray, IntArray] | None = None) -> float:
        """The objective of the rule's order at the times of its construction; inf if it is incomplete.

        These are the earliest starts, unless the rule delays actions.

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
        complete = dispatch(tables, board, self.candidates, rule, self.is_span, most)
        return board.value(self.problem) if complete else float("inf")

    @property
    def placed(self) -> int:
        """Number of actions that the last rule placed."""
        return int(self.board.length.sum())

    def attempt(self, rule: Rule, method: str) -> Attempt | None:
        """The rule's order at earliest start, or None if it is incomplete."""
        if self.value(rule) == float("inf"):
            return None
        if rule.is_injection:
            return Attempt.retimed(
                method, self.problem, self.board.code, self.board.length, self.tables.entry
            )
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
def dispatch(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, is_span: bool, most: float
) -> bool:  # pragma: no cover - compiled
    """Place all remaining actions; False if memory blocks them, if they exceed ``most``, or if halted.

    The rank whose choice has the smallest key places it; a tournament tree over the ranks finds this rank in
    O(log p). A rank chooses again when it has placed an action, or when the input that it waits for becomes
    known.
    """
    choosing, actions = _begin(tables, board, candidates, rule), 0
    origin = rule.time[0] if len(rule.time) > 0 else 0.0
    while True:
        # The only call, because the kernel is inlined there: a second one made it half as fast.
        for turn in range(choosing):
            _choose(tables, board, candidates, rule, candidates.again[turn])
        rank = candidates.first[1]
        action, begin = candidates.action[rank], candidates.begin[rank]
        if candidates.least[1] == np.inf:
            break
        if idle_until(board, rank, begin, origin, is_span) + candidates.least_load[rank] > most:
            return False
        place(tables, board, rank, action, begin)
        candidates.again[0], choosing = rank, 1
        if action & 3 != W:
            waiting = _pass_on(tables, board, candidates, rule, rank, action)
            if waiting != NOTHING:
                candidates.again[1], choosing = waiting, 2
        actions += 1
        if actions % POLL_EVERY == 0 and board.halt[0]:
            return False
    return is_complete(tables, board)


@compiled_inline
def _begin(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule
) -> int:  # pragma: no cover - compiled
    """Write what follows from the board; all ranks must choose. Returns their number."""
    candidates.least.fill(np.inf)
    for position in range(len(tables.host)):
        rank = tables.host[position]
        candidates.ready[rank, candidates.slot[position]] = _input_at(tables, board, rule, position)
    for rank in range(len(candidates.action)):
        candidates.again[rank] = rank
    return len(candidates.action)


@compiled_inline
def _input_at(
    tables: Tables, board: Board, rule: Rule, position: int
) -> float:  # pragma: no cover - compiled
    """When the input of a position's next action is there; inf while unknown or none is left."""
    at = arrival(tables, board, position)
    if position == 0 and at < np.inf and len(rule.time) > 0:
        return float(rule.time[board.placed[0]])
    return at


@compiled_inline
def _pass_on(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, rank: int, action: int
) -> int:  # pragma: no cover - compiled
    """Update inputs after an F or backward; returns the other rank that must choose again, or NOTHING."""
    host, slot, ready = tables.host, candidates.slot, candidates.ready
    here = tables.position[rank, action]
    k = board.placed[here] - 1
    ready[rank, slot[here]] = _input_at(tables, board, rule, here)
    # Only the microbatch just placed can be the one that the next position lacks. If that position is
    # further behind, the arrival of its next input is known already.
    if here + 1 == len(host) or board.placed[here + 1] != k:
        return NOTHING
    waiting = host[here + 1]
    ready[waiting, slot[here + 1]] = board.end[here, k] + tables.latency[here + 1, tables.kind[k]]
    if waiting == rank or not _must_choose(tables, board, candidates, rule, waiting, slot[here + 1]):
        return NOTHING
    return int(waiting)


@compiled_inline
def _must_choose(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, rank: int, slot: int
) -> bool:  # pragma: no cover - compiled
    """Whether a rank must compare all actions again after the input of one became known.

    An injection compares only the action that needs the input, here. Other rules look at all actions, because
    a W that fills idle time depends on them, unless the rank has an F or backward to start at once.
    """
    begin = candidates.begin[rank]
    if len(rule.time) > 0:
        least = candidates.least[len(candidates.first) // 2 + rank]
        key, _, begin, action, _ = _option(tables, board, candidates, rule, rank, ZERO, slot, least)
        if key < least:
            candidates.begin[rank], candidates.action[rank] = begin, action
            enter(candidates.first, candidates.least, rank, key)
        return False
    busy = begin == board.level[rank, CLOCK] and candidates.action[rank] & 3 <= I
    return bool(not busy or rule.defer[rank] < np.inf or candidates.ready[rank, slot] <= begin)


@compiled_inline
def _choose(
    tables: Tables, board: Board, candidates: Candidates, rule: Rule, rank: int
) -> None:  # pragma: no cover - compiled
    """Choose the next action of a rank: NOTHING while no input is known."""
    chunks, clock, phase = board.splits.shape[1], board.level[rank, CLOCK], _phase(tables, board, rank)
    best, best_key, best_wish, best_begin = NOTHING, np.inf, np.inf, np.inf
    is_injection, defers = len(rule.time) > 0, rule.defer[rank] < np.inf
    blocked, options = False, 0
    for chunk in range(chunks):
        for half in range(2):
            slot = chunk + half * chunks
            key, wish, begin, action, is_blocked = _option(
                tables, board, candidates, rule, rank, phase, slot, best_key
            )
            blocked |= is_blocked
            if action == NOTHING:
                continue
            # The smallest key wins, then the smallest priority, then the first candidate examined.
            if key < best_key or (key == best_key and wish < best_wish):
                best, best_key, best_wish, best_begin = action, key, wish, begin
            if defers:
                kind, offer = next_kind(tables, board, rank, action), candidates.offer[options]
                candidates.code[options] = action
                offer[START], offer[END] = begin, begin + tables.duration[rank, action, kind]
                offer[PRIORITY], offer[SIZE] = wish, tables.size[kind]
                options += 1
        if is_injection and board.splits[rank, chunk, FRONT] < board.splits[rank, chunk, BACK]:
            key = clock + rule.delay[rank, 2 * chunks + chunk]
            if key < best_key:
                best, best_key, best_wish, best_begin = 4 * chunk + W, key, -np.inf, clock
    if options > 1:
        best, best_begin = _undeferred(candidates.code[:options], candidates.offer, rule.defer[rank])
        best_key = best_begin
    weight = NOTHING
    if not is_injection and (best_begin > clock or (blocked and best & 3 == B)):
        weight = oldest_weight(tables, board, rank)
    if weight != NOTHING and _fills(
        tables, board, candidates, rule, rank, weight, best_begin, blocked, options
    ):
        best, best_key, best_begin = weight, clock, clock
    candidates.action[rank], candidates.begin[rank] = best, best_begin
    enter(candidates.first, candidates.least, rank, best_key)


@compiled_inline
def _fills(
    tables: Tables,
    board: Board,
    candidates: Candidates,
    rule: Rule,
    rank: int,
    weight: int,
    begin: float,
    blocked: bool,
    options: int,
) -> bool:  # pragma: no cover - compiled
    """Whether a W runs now, before an action that begins later or is fused for lack of memory.

    It does as far as patience allows, or if memory blocks actions that could start.
    """
    clock, kind = board.level[rank, CLOCK], next_kind(tables, board, rank, weight)
    takes = tables.duration[rank, weight, kind]
    # Without any known input, ``begin`` is inf and the overlap -inf, so a waiting W always runs. If memory
    # blocks an action, a W runs instead of idling or fusing, because it may release memory.
    overlap = clock + takes - begin
    allowed = rule.patience[rank, _phase(tables, board, rank)] * takes
    for option in range(options):
        is_larger = candidates.offer[option, SIZE] >= tables.size[kind] * rule.defer[rank]
        if is_larger and clock + takes > candidates.offer[option, START]:
            allowed = min(allowed, 0.0)
    return bool(blocked or overlap <= allowed)


@compiled_inline
def _phase(tables: Tables, board: Board, rank: int) -> int:  # pragma: no cover - compiled
    """See ``rules.PHASES``."""
    innermost = tables.position.shape[1] - 4
    if board.placed[tables.position[rank, F]] >= tables.microbatches:
        return 2
    return 1 if board.placed[tables.position[rank, innermost + I]] > 0 else 0


@compiled_inline
def _option(
    tables: Tables,
    board: Board,
    candidates: Candidates,
    rule: Rule,
    rank: int,
    phase: int,
    slot: int,
    most: float,
) -> tuple[float, float, float, int, bool]:  # pragma: no cover - compiled
    """The next F or backward of a chunk: key, priority, start, code, and whether memory blocks it.

    The code is NOTHING if its input is unknown, for an F that does not fit or would exceed the cap, and in an
    injection if its key is not below ``most``. Where an I does not fit, it is that of B.
    """
    chunks, begin = board.splits.shape[1], max(board.level[rank, CLOCK], candidates.ready[rank, slot])
    if begin == np.inf:
        return np.inf, np.inf, begin, NOTHING, False
    chunk = slot if slot < chunks else slot - chunks
    code = 4 * chunk + (F if slot < chunks else I)
    kind, key = next_kind(tables, board, rank, code), begin + rule.delay[rank, slot]
    if tables.duration.shape[2] > 1:
        key += rule.delay[rank, 3 * chunks] * tables.pace[kind]
    if len(rule.time) > 0 and not key < most:
        return np.inf, np.inf, begin, NOTHING, False
    held = board.level[rank, HELD]
    if slot >= chunks:
        wish, fuse = rule.priority[rank, phase, chunks + slot], tables.fuse[rank, chunk]
        blocked = not fuse and held + max(0.0, tables.delta[rank, code, kind]) > tables.limit[rank]
        return key, wish, begin, code - I + B if fuse or blocked else code, blocked
    flight = board.placed[tables.position[rank, code]] - board.placed[tables.position[rank, code - F + I]]
    if chunk == 0 and flight >= rule.cap[rank, min(phase, 1)]:
        return np.inf, np.inf, begin, NOTHING, False
    fits_room = chunk > 0 or flight == 0 or held + tables.delta[rank, F, kind] <= rule.room[rank]
    if not (fits_room and admits_forward(tables, board, rank, chunk)):
        return np.inf, np.inf, begin, NOTHING, True
    group = chunk if flight < rule.target[rank, chunk] else chunks + chunk
    return key, rule.priority[rank, phase, group], begin, code, False


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
