"""Heads: how early every action can start, from paths, loads and memory together.

The proofs are in PROOFS.md, section 2: Lemmas 10 to 17. A kernel's docstring names its lemma.

Kernels sweep a :class:`~zbv_solver.bounds.sides.Side` microbatch by microbatch; a head depends only on
heads of smaller index and of earlier stages of the same microbatch, so one sweep is the fixed point. Four
arguments raise a head, each on every rank, so that a wait of one rank reaches the others:

*Path.* A microbatch's actions follow each other, and so do the actions of a stage.

*Room.* The k+1 cells begun on the chunks up to the action's own hold what they have not given back; so
enough completions must come first, and the earliest of all possible ones say when.

*Safety.* A rank full of firsts of an outer chunk can never run the innermost chunk again, where all
completions begin. So ``first(c, k)`` comes after ``first(innermost, k - reach)``, and
``second(innermost, k)`` after ``second(c, k - reach)``.

*Load.* Some work must precede an action on its rank. What of it can have been done before a time t, by the
heads and by the memory (:func:`fill`), leaves a rest to be done from t on: the one-machine bound (Carlier
1982) with a knapsack of memory in it. The t's are the window's origin and the heads of microbatch 0 on the
rank: there the ramp has its gaps, and more of them gained nothing in experiments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.numeric import AMOUNT_ROUNDING
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]

FIRST, SECOND, PRE, POST = range(4)
"""Rows of ``work``; the first three also of required counts. Heads have cell ends in row 2."""
HOLD, HOLD_PRE, FREE_SECOND, FREE_POST = range(4)
"""Rows of ``hold``."""
END = 2

EVER = -1e300
"""Head of what the window does not bound."""


@compiled
def sweep(
    work: FloatArray,
    hold: FloatArray,
    gap: FloatArray,
    stages: IntArray,
    room: FloatArray,
    reach: IntArray,
    price: FloatArray,
    own: IntArray,
    origin: int,
    everywhere: bool,
    m: int,
) -> FloatArray:  # pragma: no cover - compiled
    """Heads (3, S, m) of the first m firsts and seconds of every stage, and the earliest ends of its cells.

    Lemmas 10, 11, 12, 13, 14, 16 and 17.

    ``origin`` is the stage whose first action opens the window; with ``everywhere`` no rank has an action
    before that, otherwise only the stage's own rank has none. Read backwards, other ranks' pres (their W's)
    may so lie beyond the window, as many as their memory lets wait.
    """
    p, chunks = stages.shape
    n = p * chunks
    heads = np.full((3, n, m), np.inf)
    home, layer = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for r in range(p):
        for c in range(chunks):
            home[stages[r, c]], layer[stages[r, c]] = r, c
    # Per rank: times t; how many of every kind and chunk have a head before t; what is given back by t.
    times = np.zeros((p, 2 * chunks + 1))
    counts = np.zeros((p, 2 * chunks + 1, 2, chunks), np.int64)
    freed = np.zeros((p, 2 * chunks + 1))
    known = np.zeros(p, np.int64)
    for r in range(p):
        known[r] = 1 if everywhere or r == home[origin] else 0
    taken = np.zeros((p, chunks, 2, chunks), np.int64)
    given = np.zeros((p, chunks, 2))
    given[:, :, 1] = EVER
    need = np.zeros((3, chunks), np.int64)
    scratch = np.zeros((4, 2 * chunks))
    for k in range(m):
        for position in range(2 * n):
            kind = FIRST if position < n else SECOND
            stage = position if kind == FIRST else 2 * n - 1 - position
            r, c = home[stage], layer[stage]
            head = _path(heads, work, gap, home, layer, kind, stage, k)
            if kind == FIRST:
                if stage == origin:
                    head = max(head, 0.0)
                head = max(
                    head, _room(heads, work[r], hold[r], stages[r], room[r], taken[r, c], given[r, c], c, k)
                )
            head = max(head, _safe(heads, work[r], stages[r], reach[r], kind, c, k))
            _require(hold[r], room[r], reach[r], own[r], kind, c, k, need)
            head = max(head, _after(heads, work[r], stages[r], need, kind, c))
            extra = price[r] * _lacking(hold[r], room[r], need, c if kind == FIRST else chunks - 1, k)
            load = extra + _load(work[r], need)
            for i in range(known[r]):
                if times[r, i] + load > head:
                    left = load - _done(
                        work[r],
                        hold[r],
                        room[r] + freed[r, i] * (1 + AMOUNT_ROUNDING),
                        times[r, i],
                        counts[r, i],
                        need,
                        extra,
                        scratch,
                    )
                    if left > TINY * load:
                        head = max(head, times[r, i] + left)
            heads[kind, stage, k] = head
            if kind == SECOND:
                heads[END, stage, k] = _cell_end(heads, work[r], own[r], stage, c, k)
            _note(heads, work[r], hold[r], kind, stage, c, k, times[r], counts[r], freed[r], known[r])
            if k == 0 and head > 0:
                _open(heads, work[r], hold[r], stages[r], head, known[r], times[r], counts[r], freed[r])
                known[r] += 1
    return heads


@compiled
def _path(
    heads: FloatArray,
    work: FloatArray,
    gap: FloatArray,
    home: IntArray,
    layer: IntArray,
    kind: int,
    stage: int,
    k: int,
) -> float:  # pragma: no cover - compiled
    """After the previous action of the stage and kind, and the microbatch's previous action: Lemma 10."""
    head: float = EVER
    if k > 0:
        head = heads[kind, stage, k - 1] + work[home[stage], kind, layer[stage]]
    if kind == FIRST and stage > 0:
        before, lag, of = stage - 1, gap[stage - 1], FIRST
    elif kind == SECOND and stage < len(home) - 1:
        before, lag, of = stage + 1, gap[stage], SECOND
    elif kind == SECOND:
        before, lag, of = stage, 0.0, FIRST
    else:
        return head
    return max(head, float(heads[of, before, k] + work[home[before], of, layer[before]] + lag))


@compiled
def _safe(
    heads: FloatArray, work: FloatArray, stages: IntArray, reach: IntArray, kind: int, c: int, k: int
) -> float:  # pragma: no cover - compiled
    """Safety, see the module's docstring: Lemma 12."""
    last = len(stages) - 1
    head: float = EVER
    if kind == FIRST and c < last and k >= reach[c]:
        head = heads[FIRST, stages[last], k - reach[c]] + work[FIRST, last]
    if kind == SECOND and c == last:
        for j in range(last):
            if k >= reach[j]:
                head = max(head, heads[SECOND, stages[j], k - reach[j]] + work[SECOND, j])
    return head


@compiled
def _room(
    heads: FloatArray,
    work: FloatArray,
    hold: FloatArray,
    stages: IntArray,
    room: float,
    taken: IntArray,
    given: FloatArray,
    c: int,
    k: int,
) -> float:  # pragma: no cover - compiled
    """The earliest time by which completions of the cells before k can have made room for ``first(c, k)``.

    Lemma 11. ``taken`` and ``given`` remember, from k to k, which completions were merged, what they give
    back, and when the last of them can be.
    """
    wanted = 0.0
    for j in range(c + 1):
        wanted += hold[HOLD, j] * (k + 1)
    wanted -= room + TINY * wanted
    while given[0] < wanted:
        when, chosen, after = np.inf, -1, 0
        for j in range(c + 1):
            done = taken[0, j]
            if done < k and hold[FREE_SECOND, j] > 0:
                end = heads[SECOND, stages[j], done] + work[SECOND, j]
                if end < when:
                    when, chosen, after = end, j, 0
            done = taken[1, j]
            if done < k and hold[FREE_POST, j] > 0 and heads[END, stages[j], done] < when:
                when, chosen, after = heads[END, stages[j], done], j, 1
        if chosen < 0:
            break
        taken[after, chosen] += 1
        given[0] += hold[FREE_POST if after else FREE_SECOND, chosen]
        given[1] = max(given[1], when)
    return float(given[1])


@compiled
def _require(
    hold: FloatArray, room: float, reach: IntArray, own: IntArray, kind: int, c: int, k: int, need: IntArray
) -> None:  # pragma: no cover - compiled
    """Count the firsts, seconds and pres of every chunk that must precede the k-th action of chunk c.

    Lemma 13. Seconds by room, were all others done as far as can be: cells 0 … k of the chunks 0 … j whose
    n_j-th second has not come hold all, those of the chunks up to ``top`` at least cell k.
    """
    chunks = len(reach)
    top = c if kind == FIRST else chunks - 1
    upper = 0.0
    for j in range(top + 1):
        upper += hold[HOLD, j]
    lower = 0.0
    for j in range(chunks):
        if j <= top:
            lower += hold[HOLD, j]
        need[SECOND, j] = 0
        if lower > 0:
            fitting = (room - (upper - lower)) / lower
            if fitting < k + 1:
                need[SECOND, j] = min(k, int(np.ceil(k + 1 - fitting - TINY * (k + 1))))
    for j in range(chunks):
        if kind == SECOND:
            need[FIRST, j] = need[PRE, j] = k + 1
            need[SECOND, j] = max(need[SECOND, j], k + 1 if j > c else k if j == c else k + 1 - reach[j])
        elif j < c:
            need[FIRST, j] = need[PRE, j] = k + 1
        elif j == c:
            need[FIRST, j], need[PRE, j] = k, k + own[j]
        else:
            need[FIRST, j] = need[PRE, j] = max(need[SECOND, j], k + 1 - reach[c], 0)


@compiled
def _after(
    heads: FloatArray, work: FloatArray, stages: IntArray, need: IntArray, kind: int, c: int
) -> float:  # pragma: no cover - compiled
    """After the last of the required seconds of every chunk: Lemma 13."""
    head = EVER
    for j in range(len(stages)):
        if need[SECOND, j] > 0 and (kind == FIRST or j != c):
            head = max(head, heads[SECOND, stages[j], need[SECOND, j] - 1] + work[SECOND, j])
    return head


@compiled
def _lacking(
    hold: FloatArray, room: float, need: IntArray, top: int, k: int
) -> float:  # pragma: no cover - compiled
    """Memory that must be given back beyond what the required seconds give: Lemma 14."""
    lacking = -room
    for j in range(top + 1):
        lacking += hold[HOLD, j] * (k + 1) - hold[FREE_SECOND, j] * need[SECOND, j]
    return max(0.0, lacking) if room < np.inf else 0.0


@compiled
def _load(work: FloatArray, need: IntArray) -> float:  # pragma: no cover - compiled
    """Work of the required actions."""
    load = 0.0
    for j in range(work.shape[1]):
        load += need[FIRST, j] * work[FIRST, j]
        load += need[SECOND, j] * work[SECOND, j]
        load += need[PRE, j] * work[PRE, j]
    return load


@compiled
def _done(
    work: FloatArray,
    hold: FloatArray,
    room: float,
    time: float,
    counts: IntArray,
    need: IntArray,
    extra: float,
    scratch: FloatArray,
) -> float:  # pragma: no cover - compiled
    """Most of the required work that can have been done before ``time``: Lemma 15."""
    if time <= 0:
        return 0.0
    done, other = 0.0, 0.0
    for j in range(work.shape[1]):
        seconds = min(need[SECOND, j], counts[SECOND, j])
        done += seconds * work[SECOND, j]
        other += counts[SECOND, j] * work[POST, j] + (counts[SECOND, j] - seconds) * work[SECOND, j]
    return done + min(extra, other) + fill(work, hold, room, counts[FIRST], need[FIRST], need[PRE], scratch)


@compiled
def fill(
    work: FloatArray,
    hold: FloatArray,
    room: float,
    ready: IntArray,
    firsts: IntArray,
    pres: IntArray,
    scratch: FloatArray,
) -> float:  # pragma: no cover - compiled
    """Most work of firsts and pres that fits the room: a fractional knapsack, so at least the true most.

    Lemma 15 (c).

    Per chunk at most ``pres`` pres and min(``ready``, ``firsts``) firsts, every first with its pre. Where
    the first does more work per memory, it goes with its pre; otherwise pres go first. Either way a
    chunk's work is concave in its memory, and taking the densest segment of all is optimal.
    """
    chunks = work.shape[1]
    length, size = scratch[0], scratch[1]
    total, wanted = 0.0, 0.0
    for j in range(chunks):
        n = min(ready[j], firsts[j])
        every = max(n, pres[j])
        first, pre = work[FIRST, j], work[PRE, j]
        small = hold[HOLD_PRE, j]
        large = hold[HOLD, j] - small
        if first * small >= pre * large:
            length[2 * j], size[2 * j] = n * (first + pre), n * (small + large)
            length[2 * j + 1], size[2 * j + 1] = (every - n) * pre, (every - n) * small
        else:
            length[2 * j], size[2 * j] = every * pre, every * small
            length[2 * j + 1], size[2 * j + 1] = n * first, n * large
        total += length[2 * j] + length[2 * j + 1]
        wanted += size[2 * j] + size[2 * j + 1]
    if wanted <= room:
        return total
    total = 0.0
    for _ in range(2 * chunks):
        densest, best = -1.0, -1
        for i in range(2 * chunks):
            density = length[i] / size[i] if size[i] > 0 else np.inf
            if length[i] > 0 and density > densest:
                densest, best = density, i
        if best < 0 or size[best] > room:
            return total + max(0.0, room) * densest if best >= 0 else total
        total += length[best]
        room -= size[best]
        length[best] = 0.0
    return total


@compiled
def _cell_end(
    heads: FloatArray, work: FloatArray, own: IntArray, stage: int, c: int, k: int
) -> float:  # pragma: no cover - compiled
    """Earliest end of a cell's post, one after the other where no cell can be fused: Lemma 17."""
    end: float = heads[SECOND, stage, k] + work[SECOND, c] + work[POST, c]
    return max(end, heads[END, stage, k - 1] + work[POST, c]) if k > 0 and own[c] else end


@compiled
def _note(
    heads: FloatArray,
    work: FloatArray,
    hold: FloatArray,
    kind: int,
    stage: int,
    c: int,
    k: int,
    times: FloatArray,
    counts: IntArray,
    freed: FloatArray,
    known: int,
) -> None:  # pragma: no cover - compiled
    """Count a new head at every time of its rank."""
    head = heads[kind, stage, k]
    for i in range(known):
        if head < times[i]:
            counts[i, kind, c] = k + 1
        if kind == SECOND and head + work[SECOND, c] <= times[i]:
            freed[i] += hold[FREE_SECOND, c]
        if kind == SECOND and heads[END, stage, k] <= times[i]:
            freed[i] += hold[FREE_POST, c]


@compiled
def _open(
    heads: FloatArray,
    work: FloatArray,
    hold: FloatArray,
    stages: IntArray,
    head: float,
    at: int,
    times: FloatArray,
    counts: IntArray,
    freed: FloatArray,
) -> None:  # pragma: no cover - compiled
    """A new time, and what of microbatch 0 comes before it (heads not yet known are inf)."""
    times[at] = head
    for c in range(len(stages)):
        for kind in (FIRST, SECOND):
            if heads[kind, stages[c], 0] < head:
                counts[at, kind, c] = 1
        if heads[SECOND, stages[c], 0] + work[SECOND, c] <= head:
            freed[at] += hold[FREE_SECOND, c]
        if heads[END, stages[c], 0] <= head:
            freed[at] += hold[FREE_POST, c]
