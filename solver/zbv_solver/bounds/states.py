"""All schedules of a few ranks, layer by layer: the kernels of :mod:`.few_ranks`.

A layer holds the states that can be reached after a number of operations, less those that another state with
the same counts precedes. W's are not operations here: a state counts those that wait, and which of them run
before the rank's next F or backward is decided when that starts. So a state may precede one that has done
fewer W's, or more if it can catch up, and few states remain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import (
    ZERO,
    BoolArray,
    FloatArray,
    IntArray,
    compiled,
    compiled_inline,
    compiled_leaf,
)
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY

EMPTY = -1
"""An entry of a table that refers to nothing."""
NEVER = 1 << 60


class Route(NamedTuple):
    """The operations of a microbatch on the chosen ranks, as kernels read them.

    Letters 0 … n-1 are the up and down operations in the order in which a microbatch visits them. A cell is
    in transit to letter i while letter i-1 has begun for it and letter i has not. Times are integer steps.
    """

    rank: IntArray
    length: IntArray
    takes: FloatArray
    frees: FloatArray
    """(n,) the rank, from 0; the duration; memory taken at the start and freed at the end."""
    wait: IntArray
    """(n,) least time between the end of the previous letter and the start of this one; for the first,
    from the window's begin."""
    rest: IntArray
    """(n,) the rest after a letter, or EMPTY."""
    rest_rank: IntArray
    rest_length: IntArray
    rest_frees: FloatArray
    """One per rest. The rests of a rank are listed one after another."""
    twin: IntArray
    """One per rest: a rest of the same rank and duration that is taken first where both can run, or EMPTY."""
    capacity: FloatArray
    """(ranks,)."""


class _Table(NamedTuple):
    """A layer in construction: states with the same counts are a chain."""

    states: IntArray
    """(most, columns)."""
    total: IntArray
    """(most,) the sum of a state's times: a state precedes none with a smaller one."""
    head: IntArray
    """(slots,) the first chain of each hash of counts."""
    other: IntArray
    """(most,) at the first state of a chain: the first state of the next chain with the same hash."""
    following: IntArray
    """(most,) the next state of a chain."""
    alive: BoolArray
    """(most,) whether no other state precedes this one."""


@compiled
def grow(
    route: Route, layer: IntArray, m: int, most: int
) -> tuple[IntArray, int]:  # pragma: no cover - compiled
    """The next layer of a problem with m microbatches, and how many pairs of states were compared: Lemma 38.

    A state is a row: the counts of all letters, the rests that wait, NOW (the last start), every rank's end,
    and the arrivals of all cells in transit, letter by letter. The layer is empty if more than ``most`` pairs
    must be compared.
    """
    n, rests, ranks = len(route.rank), len(route.rest_rank), len(route.capacity)
    slots = 1024
    while slots < 2 * len(layer):
        slots *= 2
    rows = 8 * len(layer) + 1024
    table = _Table(
        np.empty((rows, layer.shape[1]), np.int64),
        np.empty(rows, np.int64),
        np.full(slots, EMPTY),
        np.empty(rows, np.int64),
        np.empty(rows, np.int64),
        np.zeros(rows, np.bool_),
    )
    arrival, held, taken = np.empty(n, np.int64), np.empty(ranks), np.zeros(rests, np.int64)
    size, pairs = 0, 0
    for at in range(len(layer)):
        _look(route, layer[at], m, arrival, held)
        for r in range(ranks):
            more = True
            while more:
                for x in range(n):
                    start = NEVER
                    if route.rank[x] == r and arrival[x] < NEVER:
                        start = _start(route, layer[at], x, arrival, held[r], taken)
                    if start < NEVER:
                        if size == rows or pairs > most:
                            return layer[:0], pairs
                        _follow(route, layer[at], x, start, taken, table.states[size])
                        compared = _insert(route, table, size)
                        pairs += compared
                        size += table.alive[size]
                more = _next_choice(route, layer[at], r, taken)
    return table.states[:size][table.alive[:size]], pairs


@compiled_leaf
def _look(
    route: Route, state: IntArray, m: int, arrival: IntArray, held: FloatArray
) -> None:  # pragma: no cover - compiled
    """When every letter's next cell has arrived (NEVER if there is none), and what each rank holds."""
    n, rests, ranks = len(route.rank), len(route.rest_rank), len(route.capacity)
    held[:] = 0.0
    column = n + rests + 1 + ranks
    for x in range(n):
        held[route.rank[x]] += state[x] * (route.takes[x] - route.frees[x])
        arrival[x] = NEVER
        if x == 0:
            if state[0] < m:
                arrival[0] = state[n + rests]
        elif state[x - 1] > state[x]:
            arrival[x] = max(state[n + rests], state[column])
            column += state[x - 1] - state[x]
    for j in range(rests):
        held[route.rest_rank[j]] += state[n + j] * route.rest_frees[j]


@compiled_leaf
def _next_choice(
    route: Route, state: IntArray, r: int, taken: IntArray
) -> bool:  # pragma: no cover - compiled
    """The next choice of waiting rests of a rank; False, and none taken, after the last one."""
    n = len(route.rank)
    for j in range(len(taken)):
        if route.rest_rank[j] == r:
            if taken[j] < state[n + j]:
                taken[j] += 1
                return True
            taken[j] = 0
    return False


@compiled_inline
def _start(
    route: Route, state: IntArray, x: int, arrival: IntArray, held: float, taken: IntArray
) -> int:  # pragma: no cover - compiled
    """When letter x starts after the chosen rests; NEVER if it does not fit or another choice is no worse."""
    n, rests, r = len(route.rank), len(route.rest_rank), route.rank[x]
    ends = n + rests + 1
    free, room = state[ends + r], route.capacity[r] * (1 + TINY) - held - route.takes[x]
    for j in range(rests):
        free += taken[j] * route.rest_length[j]
        room += taken[j] * route.rest_frees[j]
        twin = route.twin[j]
        if taken[j] > 0 and twin != EMPTY and taken[twin] < state[n + twin]:
            return NEVER
    if room < 0.0:
        return NEVER
    for j in range(rests):
        if route.rest_rank[j] == r:
            length = route.rest_length[j]
            # A rest that fits into idle time runs there; one that only delays this operation runs after it.
            if taken[j] < state[n + j] and free + length <= arrival[x]:
                return NEVER
            if taken[j] > 0 and free - length >= arrival[x] and room >= route.rest_frees[j]:
                return NEVER
    start: int = max(arrival[x], free)
    for y in range(n):
        if y != x and arrival[y] < NEVER and route.takes[y] == 0.0:
            own = free
            if route.rank[y] != r:
                own = _all_rests(route, state, route.rank[y])
            # A down operation that would end before this one starts runs first.
            if max(own, arrival[y]) + max(route.length[y], 1) <= start:
                return NEVER
    return start


@compiled_leaf
def _all_rests(route: Route, state: IntArray, r: int) -> int:  # pragma: no cover - compiled
    """The end of a rank if it runs all waiting rests now."""
    n, rests = len(route.rank), len(route.rest_rank)
    end: int = state[n + rests + 1 + r]
    for j in range(rests):
        if route.rest_rank[j] == r:
            end += state[n + j] * route.rest_length[j]
    return end


@compiled_inline
def _follow(
    route: Route, state: IntArray, x: int, start: int, taken: IntArray, child: IntArray
) -> None:  # pragma: no cover - compiled
    """The state after the chosen rests and the next operation of letter x."""
    n, rests, ranks = len(route.rank), len(route.rest_rank), len(route.capacity)
    ends = n + rests + 1
    child[:] = 0
    for i in range(n):
        child[i] = state[i]
    for j in range(rests):
        child[n + j] = state[n + j] - taken[j]
    child[x] += 1
    child[ends - 1] = start
    end = start + route.length[x]
    for r in range(ranks):
        child[ends + r] = state[ends + r]
        if r == route.rank[x]:
            child[ends + r] = end
        elif _all_rests(route, state, r) <= start:
            # All waiting rests fit into the time until now.
            child[ends + r] = start
            for j in range(rests):
                if route.rest_rank[j] == r:
                    child[n + j] = 0
    if route.rest[x] != EMPTY:
        child[n + route.rest[x]] += 1
    old = new = ends + ranks
    for i in range(1, n):
        # No cell of a letter starts before the rank's end, or before the previous cell has ended.
        soonest = max(start, child[ends + route.rank[i]])
        for k in range(state[i - 1] - state[i]):
            if i != x or k > 0:
                child[new] = max(soonest, state[old])
                soonest = child[new] + route.length[i]
                new += 1
            old += 1
        if i - 1 == x:
            child[new] = max(soonest, end + route.wait[i])
            new += 1


@compiled_inline
def _insert(route: Route, table: _Table, size: int) -> int:  # pragma: no cover - compiled
    """Keep the state at ``size`` unless another one precedes it, and drop those that it precedes.

    Returns the number of states that it was compared with, and 1 for itself.
    """
    n, rests, ranks = len(route.rank), len(route.rest_rank), len(route.capacity)
    child, total = table.states[size], 0
    for i in range(n + rests, n + rests + 1 + ranks + child[0] - child[n - 1]):
        total += child[i]
    slot = _slot(child, n, ZERO, len(table.head))
    first = table.head[slot]
    while first != EMPTY and not _differ_by(table.states[first], child, n, ZERO):
        first = table.other[first]
    at, before, pairs = first, first, 1
    table.alive[size] = False
    while at != EMPTY:
        pairs += 1
        if table.alive[at] and table.total[at] <= total and _lead(route, table.states[at], child, ZERO) >= 0:
            return pairs
        if table.alive[at] and table.total[at] >= total and _lead(route, child, table.states[at], ZERO) >= 0:
            table.alive[at] = False
        if not table.alive[at] and at != first:
            table.following[before] = table.following[at]
        else:
            before = at
        at = table.following[at]
    table.alive[size], table.total[size] = True, total
    table.following[size], table.other[size] = EMPTY, EMPTY
    if first == EMPTY:
        table.other[size] = table.head[slot]
        table.head[slot] = size
    else:
        table.following[size] = table.following[first]
        table.following[first] = size
    return pairs


@compiled_leaf
def _slot(state: IntArray, n: int, less: int, slots: int) -> int:  # pragma: no cover - compiled
    """Where the chain of states with these counts, less ``less`` each, begins."""
    key = 0
    for i in range(n):
        key = (key * 1_000_003 + state[i] - less) & 0x3FFFFFFFFFF
    return (key ^ (key >> 19)) & (slots - 1)


@compiled_leaf
def _differ_by(left: IntArray, right: IntArray, n: int, shift: int) -> bool:  # pragma: no cover - compiled
    i = 0
    while i < n and left[i] + shift == right[i]:
        i += 1
    return i == n


@compiled_inline
def _lead(route: Route, left: IntArray, right: IntArray, least: int) -> int:  # pragma: no cover - compiled
    """The largest time by which ``left`` precedes ``right``, whatever their counts.

    Where left has more rests to run, it must run them before the right one's end. A result below ``least``
    may be too large.
    """
    n, rests, ranks = len(route.rank), len(route.rest_rank), len(route.capacity)
    ends = n + rests + 1
    lead: int = right[ends - 1] - left[ends - 1]
    for i in range(ends + ranks, ends + ranks + right[0] - right[n - 1]):
        lead = min(lead, right[i] - left[i])
        if lead < least:
            return lead
    for r in range(ranks):
        own = right[ends + r] - left[ends + r]
        for j in range(rests):
            if route.rest_rank[j] == r:
                own -= max(0, left[n + j] - right[n + j]) * route.rest_length[j]
        lead = min(lead, own)
    return lead


@compiled
def least_shift(
    route: Route, earlier: IntArray, later: IntArray, shift: int
) -> int:  # pragma: no cover - compiled
    """The largest time by which every state of ``later`` has one of ``earlier`` before it: Lemma 39.

    A state is compared with those whose counts are lower by ``shift``. -NEVER if a state has no such partner.
    """
    n = len(route.rank)
    slots = 1024
    while slots < 2 * len(earlier):
        slots *= 2
    head, following = np.full(slots, EMPTY), np.empty(len(earlier), np.int64)
    for i in range(len(earlier)):
        slot = _slot(earlier[i], n, ZERO, slots)
        following[i], head[slot] = head[slot], i
    least = NEVER
    for k in range(len(later)):
        best = -NEVER
        at = head[_slot(later[k], n, shift, slots)]
        while at != EMPTY:
            if _differ_by(earlier[at], later[k], n, shift):
                best = max(best, _lead(route, earlier[at], later[k], best))
            at = following[at]
        least = min(least, best)
    return least
