"""Rules for list scheduling: which action goes first, and when and in which order microbatches enter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct.tables import memory_for_activations, sizes
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import F, I, Problem

PEAKS = (0.5, 0.65, 0.8, 1.0)
"""Places of the largest microbatch in an order of entry, as shares of the way, that are tried first."""
PATIENCE = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
PHASES = 3
"""Phases of a rank: before its first backward, until its last F of the first chunk, and after that."""


class Rule(NamedTuple):
    """The parameters of an order that list scheduling dispatches; c chunks per rank.

    A priority rule starts actions as early as it can. An *injection* says when each microbatch enters, and
    delays actions: where memory is tight, most of a good order follows from the times of entry, and a rank
    may idle for an action that will be ready soon instead of starting another one at once.
    """

    priority: FloatArray
    """(p, PHASES, 3 * c), smaller ones go first, by chunk: forwards while the chunk has fewer than ``target``
    microbatches in flight, forwards otherwise, and backwards."""
    target: IntArray
    """(p, c) int64: microbatches in flight (F done, backward not) that a chunk should keep."""
    cap: IntArray
    """(p, PHASES - 1) int64: most microbatches in flight on the first chunk, in the first two phases."""
    patience: FloatArray
    """(p, PHASES): without injection times, a W may start if it delays the next known arrival by at most this
    share of its duration."""
    room: FloatArray
    """(p,): most memory that a rank may hold after an F of the first chunk, where microbatches differ, unless
    none is in flight there."""
    entry: IntArray
    """(m,): the microbatch that enters as the k-th."""
    defer: FloatArray
    """(p,), above 1: an action that would delay a known one, of a microbatch that is this many times as
    large, does not start before it. With inf, the earliest start always wins."""
    time: FloatArray
    """(m,): the earliest start of the k-th microbatch on the first stage, ascending; (0,) for a priority
    rule. With times, a W competes with the other actions by its delay; without, it fills idle time."""
    delay: FloatArray
    """(p, 3 * c) by letter (F, backward, W), then by chunk: a rank runs the action with the smallest sum of
    its earliest start and its delay. Where microbatches differ, (p, 3 * c + 1): the last column is the delay
    of an F or backward per relative size of its microbatch, negative if large ones go first."""

    @property
    def is_injection(self) -> bool:
        """Whether microbatches enter at given times."""
        return len(self.time) > 0


PREFERENCES = {
    "backward-deep": (I, "deep"),
    "backward-shallow": (I, "shallow"),
    "forward-deep": (F, "deep"),
}
"""The letter that goes first, and whether the later chunks (deep) or the earlier ones go first."""


class EntryRule(NamedTuple):
    """A priority rule for microbatches that differ: ``cap`` and ``room`` are shares of what memory allows."""

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


def portfolio(problem: Problem, shares: tuple[float, ...]) -> Iterator[tuple[str, Rule]]:
    """Rules with their names; if microbatches are equal, ``shares`` scale the caps that memory allows."""
    if problem.is_equal:
        for name, share, patience in product(PREFERENCES, shares, (0.0, 0.5)):
            rule = simple_rule(problem, name, share, patience)
            yield f"{name},cap={share:g},patience={patience:g}", rule
        return
    for choice in ENTRY_RULES:
        numbers = f"cap={choice.cap:g},room={choice.room:g},peak={choice.peak:g},defer={choice.defer:g}"
        yield f"{choice.preference},{numbers}", entry_rule(problem, choice)


def entry_rule(problem: Problem, rule: EntryRule) -> Rule:
    """The parameters of a rule for microbatches that differ."""
    return simple_rule(problem, rule.preference, rule.cap, rule.patience)._replace(
        room=problem.arrays.static + rule.room * memory_for_activations(problem),
        entry=mountain(sizes(problem), rule.peak),
        defer=np.full(problem.pp_degree, rule.defer),
    )


def first_rule(problem: Problem) -> Rule:
    """The rule that is good most often, for a first order."""
    if problem.is_equal:
        return simple_rule(problem, "backward-deep", 1.0, 0.5)
    return entry_rule(problem, ENTRY_RULES[0])


def simple_rule(
    problem: Problem,
    preference: str,
    share: float,
    patience: float,
    allowed: NDArray[np.int64] | None = None,
) -> Rule:
    """The same priorities on all ranks and in all phases; caps are a share of what memory allows.

    ``allowed`` (p,) are the :func:`in_flight_caps`, if they are known.
    """
    letter, depth = PREFERENCES[preference]
    p, chunks = problem.pp_degree, problem.placement.chunks
    allowed = in_flight_caps(problem) if allowed is None else allowed
    caps = np.repeat(allowed[:, None], PHASES - 1, axis=1)
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
        time=np.empty(0),
        delay=no_delay(problem),
    )


def no_delay(problem: Problem) -> FloatArray:
    """Zeros in the shape of :attr:`Rule.delay`."""
    of_size = 0 if problem.is_equal else 1
    return np.zeros((problem.pp_degree, 3 * problem.placement.chunks + of_size))


def injection(problem: Problem, entry: IntArray, time: FloatArray, delay: FloatArray) -> Rule:
    """A rule that injects microbatches in the order ``entry`` at ``time``, both (m,), with delays."""
    p, chunks = problem.pp_degree, problem.placement.chunks
    return Rule(
        priority=np.zeros((p, PHASES, 3 * chunks)),
        target=np.zeros((p, chunks), np.int64),
        cap=np.full((p, PHASES - 1), problem.microbatches),
        patience=np.zeros((p, PHASES)),
        room=np.full(p, np.inf),
        entry=entry,
        defer=np.full(p, np.inf),
        time=time,
        delay=delay,
    )


def in_flight_caps(problem: Problem) -> NDArray[np.int64]:
    """Most microbatches in flight per rank (p,): as many as memory allows, but at most 2p."""
    stages = np.array(problem.placement.stages_of)
    arrays = problem.arrays
    average = arrays.delta[F] @ (arrays.count / problem.microbatches)
    held = average[stages].sum(axis=1)
    room = memory_for_activations(problem)
    allowed = np.divide(room, held, out=np.full_like(room, np.inf), where=held > 0)
    most = min(2 * problem.pp_degree, problem.microbatches)
    # Rounding may put a quotient just above an integer; it then is that integer.
    rounded_up = np.ceil(np.minimum(allowed, most) * (1 - MEMORY_TOLERANCE))
    caps: NDArray[np.int64] = np.clip(rounded_up, 1, most).astype(np.int64)
    return caps


def mountain(size: FloatArray, peak: float) -> IntArray:
    """Small microbatches at both ends, the largest one at a share ``peak`` of the way, (m,).

    Small ones at both ends make the ramps short, and large ones in between need the most memory where the
    pipeline is full anyway. Where the largest one is best depends on the problem.

    Microbatches of equal size keep their order. If all are equal, the order is ascending.
    """
    m = len(size)
    left = round(peak * (m - 1))
    before, after = left, m - 1 - left
    first, last = 0, m - 1
    order = np.empty(m, np.int64)
    ascending = np.argsort(size, kind="stable")
    if m == 0 or size[ascending[0]] == size[ascending[-1]]:
        return np.arange(m)
    for microbatch in ascending:
        # From the outside in, in proportion to the places that each side has left.
        if last <= left or (first < left and (left - first) * after >= (last - left) * before):
            order[first] = microbatch
            first += 1
        else:
            order[last] = microbatch
            last -= 1
    return order


def practice_order(problem: Problem) -> IntArray:
    """The order used in practice, (m,): sorted by work, the small ones at both ends."""
    return mountain(sizes(problem), PEAKS[0])


def changed(entry: IntArray, random: np.random.Generator, begin: int = 0) -> IntArray:
    """A copy with one change from the place ``begin`` on: two swapped, one moved, or a stretch reversed."""
    m, other_entry = len(entry), entry.copy()
    if m - begin < 2:
        return other_entry
    one, other = sorted((begin + random.choice(m - begin, 2, replace=False)).tolist())
    kind = random.random()
    if kind < 0.4:
        other_entry[one], other_entry[other] = entry[other], entry[one]
    elif kind < 0.6:
        other_entry[one : other + 1] = np.roll(entry[one : other + 1], 1)
    elif kind < 0.8:
        other_entry[one : other + 1] = np.roll(entry[one : other + 1], -1)
    else:
        other = min(other, one + 1 + int(random.integers(4)))
        other_entry[one : other + 1] = entry[one : other + 1][::-1]
    return other_entry


def random_rule(problem: Problem, random: np.random.Generator) -> Rule:
    """A random rule: any priorities; caps and targets linear from the first rank to the last."""
    p, chunks = problem.pp_degree, problem.placement.chunks
    kinds = 3 * chunks
    priority = np.empty((p, PHASES, kinds))
    priority[:] = random.permutation(kinds)
    if random.random() < 0.5:
        priority[:, PHASES - 1] = random.permutation(kinds)
    allowed = in_flight_caps(problem)
    most = int(allowed.max())
    cap = np.round(random.uniform(0.4, 1.3) * _line(random, 0.6, 1.1, p) * most)
    caps = np.stack([cap, cap], axis=1)
    if random.random() < 0.2:
        caps[:] = 2 * p + 2  # no cap but memory
    elif random.random() < 0.3:
        caps[:, 0] = np.round(cap * random.uniform(1.0, 1.5))
    target = np.stack([_line(random, 0.0, 1.0, p) * most for _ in range(chunks)], axis=1)
    patience = np.full((p, PHASES), random.choice(PATIENCE))
    if random.random() < 0.5:
        patience[:, PHASES - 1] = random.choice(PATIENCE)
    return simple_rule(problem, "backward-deep", 1.0, 0.0, allowed)._replace(
        priority=priority,
        target=np.round(target).astype(np.int64),
        cap=np.maximum(1, caps).astype(np.int64),
        patience=patience,
        entry=np.arange(problem.microbatches),
    )


def neighbour(rule: Rule, random: np.random.Generator, whole: float) -> Rule:
    """A copy with one to three changes, each on adjacent ranks, or on all with probability ``whole``."""
    priority, target = rule.priority.copy(), rule.target.copy()
    cap, patience = rule.cap.copy(), rule.patience.copy()
    for _ in range(1 + int(random.random() < 0.3) + int(random.random() < 0.1)):
        ranks = some_ranks(random, len(cap), whole)
        kind, phase = random.integers(7), int(random.integers(PHASES))
        if kind == 0:
            priority[ranks, phase] = random.permutation(priority.shape[2])
        elif kind == 1:
            one, other = random.integers(priority.shape[2], size=2)
            priority[ranks, phase, one], priority[ranks, phase, other] = (
                priority[ranks, phase, other].copy(),
                priority[ranks, phase, one].copy(),
            )
        elif kind == 2:
            patience[ranks, phase] = random.choice(PATIENCE)
        elif kind <= 4:
            phases = slice(0, 2) if random.random() < 0.5 else slice(phase % 2, phase % 2 + 1)
            cap[ranks, phases] = np.maximum(1, cap[ranks, phases] + random.choice((-2, -1, 1, 2)))
        else:
            target[ranks, random.integers(target.shape[1])] += random.choice((-2, -1, 1, 2))
    return rule._replace(priority=priority, target=target, cap=cap, patience=patience)


def _line(random: np.random.Generator, low: float, high: float, p: int) -> FloatArray:
    """Values (p,) between two random ends, linear in the rank."""
    first, last = random.uniform(low, high, 2)
    values: FloatArray = np.linspace(first, last, p)
    return values


def some_ranks(random: np.random.Generator, p: int, whole: float) -> slice:
    """Adjacent ranks: often one to three, sometimes more; all with the given probability."""
    if random.random() < whole:
        return slice(0, p)
    longest = p if random.random() < 0.4 else min(3, p)
    begin = int(random.integers(p))
    return slice(begin, begin + int(random.integers(1, longest + 1)))
