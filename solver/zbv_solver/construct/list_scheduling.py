"""List scheduling by priority rules: any placement, any feasible memory limit.

The rank that can start an action first does so; a rule chooses among its ready actions. Forwards are
admitted only without risk of a deadlock (:func:`~.board.admits_forward`), and up to a cap on the microbatches
in flight, since filling memory greedily makes plans worse. Where the structured greedy fails for lack of
memory, list scheduling still finds orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.board import (
    BACK,
    CLOCK,
    FIRST,
    FRONT,
    HELD,
    IDLE,
    Board,
    arrival,
    enter,
    next_kind,
    replay,
    stays_safe,
)
from zbv_solver.construct.entry_orders import PEAKS, mountain, sizes, sizes_of_kinds
from zbv_solver.construct.tables import Tables, fuse_options, make_tables
from zbv_solver.kernels.arrays import ZERO, BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled, compiled_inline
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, ROUNDING
from zbv_solver.problem.problem import B, F, I, Problem, W

NOTHING = -1
PHASES = 3
"""Phases of a rank: before its first backward, until its last F of the first chunk, and after that."""
POLL_EVERY = 4096
"""Number of actions between two checks of the halt flag."""


class Rule(NamedTuple):
    """A priority rule; smaller priorities go first.

    Attributes
    ----------
    priority
        (p, PHASES, 3 * chunks) float64, by chunk: forwards while the chunk has fewer than ``target``
        microbatches in flight, forwards otherwise, and backwards.
    target
        (p, chunks) int64: microbatches in flight (F done, backward not) that a chunk should keep.
    cap
        (p, PHASES - 1) int64: most microbatches in flight on the first chunk, in the first two phases.
    patience
        (p, PHASES) float64: a W may start if it delays the next known arrival by at most this share of its
        duration.
    room
        (p,) float64: most memory that a rank may hold after an F of the first chunk, where microbatches
        differ, unless none is in flight there.
    entry
        (m,) the microbatch that enters as the k-th.
    defer
        (p,) float64, above 1: an action that would delay a known one, of a microbatch that is this many times
        as large, does not start before it. With inf, the earliest start always wins.
    """

    priority: FloatArray
    target: IntArray
    cap: IntArray
    patience: FloatArray
    room: FloatArray
    entry: IntArray
    defer: FloatArray


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
        complete = _schedule(tables, board, rule, self.size, self.least_loads, self.is_span, most)
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


PREFERENCES = {
    "backward-deep": (I, "deep"),
    "backward-shallow": (I, "shallow"),
    "forward-deep": (F, "deep"),
}
"""The letter that goes first, and whether the later chunks (deep) or the earlier ones go first."""


class EntryRule(NamedTuple):
    """A rule for microbatches that differ: ``cap`` and ``room`` are shares of what memory allows."""

    preference: str
    patience: float
    cap: float
    room: float
    peak: float
    defer: float


ENTRY_RULES = (
    EntryRule("forward-deep", 0.5, 2.0, 0.85, 0.65, 1.4),
    EntryRule("forward-deep", 0.5, 2.0, 0.85, 0.8, 1.4),
    EntryRule("backward-deep", 0.5, 2.0, 0.85, 0.5, 1.4),
    EntryRule("forward-deep", 1.0, 1.0, 1.0, 0.65, 2.0),
    EntryRule("backward-deep", 1.0, 2.0, 0.85, 0.65, 2.0),
    EntryRule("forward-deep", 0.5, 2.0, 0.85, 1.0, 1.4),
    EntryRule("backward-deep", 0.5, 1.0, 1.0, 0.8, 2.0),
    EntryRule("forward-deep", 0.5, 1.0, 1.0, 0.5, 1.4),
    EntryRule("forward-deep", 0.5, 2.0, 0.85, 0.5, 2.0),
    EntryRule("backward-deep", 0.5, 2.0, 0.85, 0.65, 2.0),
    EntryRule("forward-deep", 0.5, 2.0, 1.0, 0.8, 1.4),
    EntryRule("forward-deep", 1.0, 2.0, 0.85, 0.4, 2.0),
    EntryRule("backward-deep", 1.0, 2.0, 0.85, 0.5, np.inf),
    EntryRule("forward-deep", 0.5, 2.0, 0.85, 0.4, np.inf),
    EntryRule("backward-deep", 1.0, 1.0, 1.0, 0.65, 1.4),
    EntryRule("forward-deep", 0.5, 1.4, 1.0, 0.65, 6.0),
)
"""Together they were within 0.2 % of the best of 202 rules, on average over 53 problems. Each gains most over
those before it. Without deference, the best 14 rules were 2.1 % behind."""


def priority_schedules(problem: Problem, shares: tuple[float, ...] = (1.0, 0.75)) -> Iterator[Attempt]:
    """Orders of a small portfolio of rules; ``shares`` scale the caps that memory allows."""
    if not problem.is_equal:
        yield from _schedules_by_entry(problem)
        return
    for fuse_name, fuse in fuse_options(problem):
        scheduler = ListScheduler(problem, fuse)
        for name, share, patience in product(PREFERENCES, shares, (0.0, 0.5)):
            rule = simple_rule(problem, name, share, patience)
            method = f"list({name},cap={share:g},patience={patience:g},fuse={fuse_name})"
            attempt = scheduler.attempt(rule, method)
            if attempt is not None:
                yield attempt


def _schedules_by_entry(problem: Problem) -> Iterator[Attempt]:
    """Orders of the rules for microbatches that differ."""
    for fuse_name, fuse in fuse_options(problem):
        scheduler = ListScheduler(problem, fuse)
        for each in ENTRY_RULES:
            numbers = f"cap={each.cap:g},room={each.room:g},peak={each.peak:g},defer={each.defer:g}"
            method = f"list({each.preference},{numbers},fuse={fuse_name})"
            attempt = scheduler.attempt(entry_rule(problem, each), method)
            if attempt is not None:
                yield attempt


def entry_rule(problem: Problem, rule: EntryRule) -> Rule:
    """The parameters of a rule for microbatches that differ."""
    arrays = problem.arrays
    space = np.where(np.isfinite(arrays.limit), arrays.limit - arrays.static, np.inf)
    return simple_rule(problem, rule.preference, rule.cap, rule.patience)._replace(
        room=arrays.static + rule.room * space,
        entry=mountain(sizes(problem), rule.peak),
        defer=np.full(problem.pp_degree, rule.defer),
    )


def first_rule(problem: Problem) -> Rule:
    """The rule that is good most often, for a first order."""
    if problem.is_equal:
        return simple_rule(problem, "backward-deep", 1.0, 0.5)
    return entry_rule(problem, ENTRY_RULES[0])


def simple_rule(problem: Problem, preference: str, share: float, patience: float) -> Rule:
    """The same priorities on all ranks and in all phases; caps are a share of what memory allows."""
    letter, depth = PREFERENCES[preference]
    p, chunks = problem.pp_degree, problem.placement.chunks
    caps = np.repeat(in_flight_caps(problem)[:, None], PHASES - 1, axis=1)
    chunk = np.arange(chunks, dtype=np.float64)
    forward = (-chunk if depth == "deep" else chunk) + (0 if letter == F else 100)
    backward = (chunk if depth == "deep" else -chunk) + (0 if letter == I else 100)
    priority = np.concatenate([forward, forward, backward])
    return Rule(
        priority=np.broadcast_to(priority, (p, PHASES, 3 * chunks)).copy(),
        target=np.zeros((p, chunks), np.int64),
        cap=np.maximum(1, np.ceil(caps * share)).astype(np.int64),
        patience=np.full((p, PHASES), patience),
        room=np.full(p, np.inf),
        entry=mountain(sizes(problem), PEAKS[0]),
        defer=np.full(p, np.inf),
    )


def in_flight_caps(problem: Problem) -> NDArray[np.int64]:
    """Most microbatches in flight per rank (p,): as many as memory allows, but at most 2p."""
    stages = np.array(problem.placement.stages_of)
    arrays = problem.arrays
    average = arrays.delta[F] @ (arrays.count / problem.microbatches)
    held = average[stages].sum(axis=1)
    room = np.where(np.isfinite(arrays.limit), arrays.limit - arrays.static, np.inf)
    allowed = np.divide(room, held, out=np.full_like(room, np.inf), where=held > 0)
    most = min(2 * problem.pp_degree, problem.microbatches)
    # Rounding may put a quotient just above an integer; it then is that integer.
    rounded_up = np.ceil(np.minimum(allowed, most) * (1 - MEMORY_TOLERANCE))
    caps: NDArray[np.int64] = np.clip(rounded_up, 1, most).astype(np.int64)
    return caps


def serial(problem: Problem) -> Attempt:
    """One microbatch after another with fused backwards: the smallest memory limit admits this order."""
    rule = simple_rule(problem, "backward-deep", 0.0, 0.0)
    scheduler = ListScheduler(problem, np.ones(problem.n_stages, dtype=np.bool_))
    attempt = scheduler.attempt(rule, "serial")
    if attempt is None:
        raise RuntimeError("one microbatch after another does not fit; please report this bug in zbv.")
    return attempt


@compiled
def _schedule(
    tables: Tables,
    board: Board,
    rule: Rule,
    size: FloatArray,
    least_loads: FloatArray,
    is_span: bool,
    most: float,
) -> bool:  # pragma: no cover - compiled
    """Place all remaining actions; False if memory blocks them, if they exceed ``most``, or if halted.

    The rule chooses the next action of every rank: NOTHING while no input is known; a W if the rank would
    wait, as far as patience allows, or if memory blocks the actions that could start. A rank chooses again
    when it has placed an action, or when the input that it waits for becomes known. The rank whose choice
    starts first places it; a tournament tree over the ranks finds this rank in O(log p).

    Invariants: ``ready`` and ``flight`` match the board; ``chosen`` and ``start`` are what each rank would
    place next if nothing else happened.
    """
    position, duration, delta, latency = tables.position, tables.duration, tables.delta, tables.latency
    host, limit, fuse = tables.host, tables.limit, tables.fuse
    level, placed, end, queue, ends = board.level, board.placed, board.end, board.queue, board.ends
    code, length = board.code, board.length
    target, cap, patience = rule.target, rule.cap, rule.patience
    p, positions = position.shape[0], len(latency)
    chunks, m = position.shape[1] // 4, tables.microbatches
    slot, ready, flight = _ready(tables, board)
    is_equal, kind_of = duration.shape[2] == 1, tables.kind
    # Of the actions that a rank could run next: code, start, end, priority and size of the microbatch.
    option, offer = np.zeros(2 * chunks, np.int64), np.zeros((2 * chunks, 4))
    wishes, innermost = rule.priority.reshape(-1), 4 * (chunks - 1)
    # A complete binary tree: the leaf of a rank is at ``leaves + rank``, and the padding never starts (inf).
    leaves = 1
    while leaves < p:
        leaves *= 2
    chosen = np.full(p, NOTHING, np.int64)
    first, start = np.zeros(2 * leaves, np.int64), np.full(2 * leaves, np.inf)
    for rank in range(leaves):
        first[leaves + rank] = rank
    actions, changed, other = 0, 0, NOTHING
    while True:
        # Choose again: at first on all ranks, then on the one that placed and the one that waits for it.
        while changed < p:
            one, clock, held, room = changed, level[changed, CLOCK], level[changed, HELD], limit[changed]
            begun, ended = placed[position[one, F]], placed[position[one, I]]
            phase = 2 if begun >= m else (1 if placed[position[one, innermost + I]] > 0 else 0)
            completes = placed[position[one, innermost + F]] > ended
            kinds = (one * PHASES + phase) * 3 * chunks
            best, best_start, best_wish = NOTHING, np.inf, np.inf
            blocked, options, defers = False, 0, rule.defer[one] < np.inf
            for chunk in range(chunks):
                input_at, in_flight = ready[one * 2 * chunks + chunk], flight[one * chunks + chunk]
                if input_at < np.inf and (chunk > 0 or in_flight < cap[one, min(phase, 1)]):
                    # The rule of board.admits_forward.
                    kind = ZERO if is_equal else kind_of[placed[position[one, 4 * chunk + F]]]
                    needs = 0.0
                    for later in range(chunk, chunks):
                        needs += delta[one, 4 * later + F, kind]
                    after = held + delta[one, 4 * chunk + F, kind]
                    if (held + needs <= room or (after <= room and completes)) and (
                        is_equal
                        or (
                            (chunk > 0 or after <= rule.room[one] or in_flight == 0)
                            and stays_safe(tables, board, one, chunk)
                        )
                    ):
                        begin = max(clock, input_at)
                        # ``over`` selects the second group of priorities: forwards on a chunk that has
                        # reached its target.
                        over = 0 if in_flight < target[one, chunk] else chunks
                        wish = wishes[kinds + over + chunk]
                        # The earliest start wins, then the smallest priority, then the first candidate
                        # examined.
                        if begin < best_start or (begin == best_start and wish < best_wish):
                            best, best_start, best_wish = 4 * chunk + F, begin, wish
                        if defers:
                            option[options], offer[options, 0] = 4 * chunk + F, begin
                            offer[options, 1] = begin + duration[one, 4 * chunk + F, kind]
                            offer[options, 2], offer[options, 3] = wish, size[kind]
                            options += 1
                    else:
                        blocked = True
                input_at = ready[one * 2 * chunks + chunks + chunk]
                if input_at < np.inf:
                    begin = max(clock, input_at)
                    letter = B if fuse[one, chunk] else I
                    kind = ZERO if is_equal else kind_of[placed[position[one, 4 * chunk + I]]]
                    if letter == I and held + max(0.0, delta[one, 4 * chunk + I, kind]) > room:
                        letter, blocked = B, True
                    wish = wishes[kinds + 2 * chunks + chunk]
                    if begin < best_start or (begin == best_start and wish < best_wish):
                        best, best_start, best_wish = 4 * chunk + letter, begin, wish
                    if defers:
                        option[options], offer[options, 0] = 4 * chunk + letter, begin
                        offer[options, 1] = begin + duration[one, 4 * chunk + letter, kind]
                        offer[options, 2], offer[options, 3] = wish, size[kind]
                        options += 1
            if options > 1:
                best, best_start = _undeferred(option[:options], offer, rule.defer[one])
            if ends[one, FRONT] < ends[one, BACK]:
                weight = 4 * queue[one, ends[one, FRONT]] + W
                # Without any known input, ``best_start`` is inf and the overlap -inf, so a waiting W always
                # runs. If memory blocks an action, a W runs instead of idling or fusing, because it may
                # release memory.
                takes = duration[one, weight, next_kind(tables, board, one, weight)]
                overlap = clock + takes - best_start
                allowed = patience[one, phase] * takes
                if defers:
                    weighs = size[next_kind(tables, board, one, weight)] * rule.defer[one]
                    for each in range(options):
                        if offer[each, 3] >= weighs and clock + takes > offer[each, 0]:
                            allowed = min(allowed, 0.0)
                fills = best_start > clock and overlap <= allowed
                if fills or (blocked and (best_start > clock or best & 3 == B)):
                    best_start, best = clock, weight
            chosen[one] = best
            enter(first, start, one, best_start)
            # The first pass visits every rank. Later passes visit ``changed``, then ``other``, where p means
            # none.
            if actions == 0:
                changed += 1
            else:
                changed, other = (other, p) if other >= 0 else (p, p)
        rank = first[1]
        begin = start[1]
        if begin == np.inf:
            break
        action, at = chosen[rank], length[rank]
        # What follows is board.place. A call would pass every field of every array, which took longer.
        if at == 0:
            level[rank, FIRST] = begin
        else:
            level[rank, IDLE] += begin - level[rank, CLOCK]
        # The rank takes at least the time before its first start, its idle time and its least load.
        if (0.0 if is_span else level[rank, FIRST]) + level[rank, IDLE] + least_loads[rank] > most:
            return False
        kind = ZERO if is_equal else next_kind(tables, board, rank, action)
        finish = begin + duration[rank, action, kind]
        level[rank, CLOCK] = finish
        level[rank, HELD] += delta[rank, action, kind]
        code[rank, at] = action
        length[rank] = at + 1
        changed, other = rank, p
        here = position[rank, action]
        if here < 0:
            ends[rank, FRONT] += 1  # a rule always takes the oldest W
            board.splits[rank, action >> 2, FRONT] += 1
        else:
            k = placed[here]
            end[here, k] = finish
            if action & 3 == I:
                queue[rank, ends[rank, BACK]] = action >> 2
                ends[rank, BACK] += 1
                board.split[rank, action >> 2, board.splits[rank, action >> 2, BACK]] = k
                board.splits[rank, action >> 2, BACK] += 1
            k += 1
            placed[here] = k
            flight[rank * chunks + (action >> 2)] += 1 if action & 3 == F else -1
            arrives = np.inf
            if k < m and (here == 0 or k < placed[here - 1]):
                arrives = end[here - 1, k] + latency[here, kind_of[k]] if here > 0 else 0.0
            ready[slot[here]] = arrives
            # Only the microbatch just placed can be the one that the next position lacks. If that position is
            # further behind, the arrival of its next input is known already.
            if here + 1 < positions and placed[here + 1] == k - 1:
                input_at = finish + latency[here + 1, kind]
                ready[slot[here + 1]] = input_at
                waiting = host[here + 1]
                # No new choice is needed if that rank has an F or I to start at once.
                busy = start[leaves + waiting] == level[waiting, CLOCK] and chosen[waiting] & 3 <= I
                busy = busy and rule.defer[waiting] == np.inf
                if waiting != rank and not (busy and input_at > start[leaves + waiting]):
                    other = waiting
        actions += 1
        if actions % POLL_EVERY == 0 and board.halt[0]:
            return False
    waiting, missing = 0, 0
    for rank in range(p):
        waiting += ends[rank, BACK] - ends[rank, FRONT]
    for here in range(positions):
        missing += m - placed[here]
    return bool(waiting + missing == 0)


@compiled_inline
def _undeferred(
    option: IntArray, offer: FloatArray, defer: float
) -> tuple[int, float]:  # pragma: no cover - compiled
    """The action that starts first among those that delay none of a much larger microbatch, and its start.

    There is one, because actions of the largest microbatch never defer.
    """
    best, best_start, best_wish = NOTHING, np.inf, np.inf
    for one in range(len(option)):
        begin, wish, yields = offer[one, 0], offer[one, 2], False
        for other in range(len(option)):
            is_larger = offer[other, 3] >= defer * offer[one, 3]
            yields |= is_larger and begin <= offer[other, 0] < offer[one, 1]
        if not yields and (begin < best_start or (begin == best_start and wish < best_wish)):
            best, best_start, best_wish = option[one], begin, wish
    return best, best_start


@compiled
def _ready(
    tables: Tables, board: Board
) -> tuple[IntArray, FloatArray, IntArray]:  # pragma: no cover - compiled
    """The numbers that choices depend on, flat and by rank, so that a choice reads few adjacent numbers.

    Returns
    -------
    slot
        (2S,) index in ``ready`` of the next action at a position.
    ready
        (p * 2 * chunks,) arrival of the input of every chunk's next F, then of its next backward; inf while
        unknown.
    flight
        (p * chunks,) microbatches in flight.
    """
    position, placed = tables.position, board.placed
    p, chunks = position.shape[0], position.shape[1] // 4
    slot = np.zeros(len(placed), np.int64)
    ready = np.full(p * 2 * chunks, np.inf)
    flight = np.zeros(p * chunks, np.int64)
    for rank in range(p):
        for chunk in range(chunks):
            forward, back = position[rank, 4 * chunk + F], position[rank, 4 * chunk + I]
            flight[rank * chunks + chunk] = placed[forward] - placed[back]
            slot[forward] = rank * 2 * chunks + chunk
            slot[back] = slot[forward] + chunks
            ready[slot[forward]] = arrival(tables, board, rank, 4 * chunk + F)
            ready[slot[back]] = arrival(tables, board, rank, 4 * chunk + I)
    return slot, ready, flight
