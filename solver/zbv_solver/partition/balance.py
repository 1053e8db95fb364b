"""The cut whose most loaded rank has the least load, exactly, for placements V and single.

Under V a rank hosts a piece from either end of the parts that its outer neighbours leave over, so ranks are
assigned from the outside in. State (i, j) means that the parts before i and from j on are assigned. For a
load limit T, a sweep marks the states that the first ranks can reach with no load above T, and T is found by
bisection. Where the sweep cannot go on without exceeding T, it notes the load that going on would take. The
least of these loads is a lower bound, so the bisection ends at an exact value. The proof is Lemma 34 of
bounds/PROOFS.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import ZERO, IntArray, compiled, compiled_leaf
from zbv_solver.partition.cut_space import EXCESS, LOAD, Boundaries, CutSpace, CutTables, ScoredCut
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.numeric import ROUNDING

FIRST_STEP = 0.01
"""First step by which T grows until a cut is found, as a share of the mean load."""


class _Question(NamedTuple):
    """What the kernels look for: cuts whose worst rank has at most ``most``.

    ``mode`` is LOAD or EXCESS; ``two_sided`` is true for placement V; ``least`` is the fewest parts of a
    stage; ``fixed`` (2, p) has the prescribed end of every rank's first piece and begin of its second, or -1.
    Of several cuts, the kernels take one near ``reference``.
    """

    mode: int
    most: float
    two_sided: bool
    least: int
    fixed: IntArray
    reference: IntArray


def balanced_cut(space: CutSpace, reference: Boundaries, least: float = 0.0) -> ScoredCut | None:
    """The cut that fits the memory limit and whose most loaded rank has the least load; None if none fits.

    The load of a rank is the sum of its forwards and its cheaper backwards for one microbatch, as in
    :meth:`zbv_solver.problem.problem.Problem.busy_time`. Stages are recomputed if their rank would not fit
    otherwise. Only for placements V and single. Lemma 34, with
    Lemma 56 for ranks of several devices.

    Parameters
    ----------
    reference
        Of several best cuts, one near these boundaries is returned.
    least
        A lower bound that is known of the worst load, which saves time.
    """
    return _least_worst(space, reference, LOAD, least)


def smallest_cut(space: CutSpace, reference: Boundaries) -> ScoredCut | None:
    """The cut with the least memory excess, which is its value, negative if the cut fits. Lemma 34."""
    return _least_worst(space, reference, EXCESS)


def _least_worst(space: CutSpace, reference: Boundaries, mode: int, least: float = 0.0) -> ScoredCut | None:
    """Bisect for the smallest ``most`` that some cut keeps."""
    tables, p = space.tables, space.placement.pp_degree
    question = _Question(
        mode, 0.0, space.placement.kind == "v", space.least, _fixed_pieces(space), np.array(reference)
    )
    # [rank, i, j] is 1 if the ranks before `rank` can leave exactly the parts [i, j).
    reached = np.zeros((p, tables.n + 1, tables.n + 1), np.uint8)
    best = None
    if mode == LOAD:
        scale = float(tables.cheapest[-1]) / float(tables.speeds.sum())
        low = max(scale, least)
        # The reference is often near the best cut, so it saves sweeps as a first one.
        cut = space.fitting(reference)
        if cut is not None:
            best = ScoredCut(cut, space.worst_load(cut))
    else:
        # A need is at least 0, so no excess is below -room.
        scale, low = float(tables.sums[..., 3, -1].max()), -float(tables.room.max())
    most, step = low, FIRST_STEP
    while best is None or best.value - low > ROUNDING * abs(best.value):
        found, beyond = _try(space, question._replace(most=most), reached)
        if found is not None:
            best = found
        elif not np.isfinite(beyond):
            break
        else:
            low = max(low, beyond)
        # Until a cut is known, raise the threshold in doubling steps. Then bisect.
        if best is None:
            most, step = low + step * scale, 2 * step
        else:
            middle = (low + best.value) / 2
            # If no float lies between the two, try `low`: then too, `best` falls to it or `low` grows.
            most = middle if middle < best.value else low
    return None if best is None else replace(best, bound=best.value)


def _fixed_pieces(space: CutSpace) -> IntArray:
    """The (2, p) ends and begins that the cut's rules prescribe, see :class:`_Question`."""
    (lower, upper), p, stages = space.ranges, space.placement.pp_degree, space.n_stages
    fixed = np.where(lower == upper, lower, -1)
    is_v = space.placement.kind == "v"
    return np.array([fixed[1 : p + 1], fixed[stages - 1 : stages - 1 - p : -1] if is_v else np.full(p, -1)])


def _try(space: CutSpace, question: _Question, reached: IntArray) -> tuple[ScoredCut | None, float]:
    """A cut whose worst rank has at most ``most``, or a lower bound on the worst rank of any cut."""
    tables, p, is_v = space.tables, space.placement.pp_degree, question.two_sided
    reached[:] = 0
    end, beyond = _sweep(tables, question, reached)
    if end[0] < 0:
        return None, beyond
    bounds, variants = _trace(tables, question, reached, end)
    worst = -np.inf
    for rank in range(p):
        a, b = bounds[rank], bounds[rank + 1]
        c, d = (bounds[2 * p - 1 - rank], bounds[2 * p - rank]) if is_v else (b, b)
        worst = max(worst, _measure(tables, question.mode, rank, a, b, c, d)[0])
    return ScoredCut(Cut.at(space.problem.places[bounds], variants), float(worst)), np.inf


@compiled_leaf
def _measure(
    tables: CutTables, mode: int, rank: int, a: int, b: int, c: int, d: int
) -> tuple[float, int]:  # pragma: no cover - compiled
    """Least load of a rank that fits (inf if none does), or least excess; and which of its stages recompute.

    The rank's stages are [a, b) and [c, d). Bit 0 of the second value stands for the first one, bit 1 for the
    other.
    """
    kind = tables.kind_of[rank]
    sums, workspace = tables.sums[kind], tables.workspace[kind]
    room, variants = tables.room, tables.variants
    best, choice = np.inf, 0
    for upper in range(variants):
        # Recomputing an empty piece changes nothing.
        if upper == 1 and c == d:
            continue
        for lower in range(variants):
            if lower == 1 and a == b:
                continue
            need = max(workspace[lower, a, b], workspace[upper, c, d]) + (
                sums[lower, 3, b] - sums[lower, 3, a] + sums[upper, 3, d] - sums[upper, 3, c]
            )
            if mode == EXCESS:
                value = need - room[rank]
            elif need > room[rank]:
                continue
            else:
                value = sums[lower, 0, b] - sums[lower, 0, a] + sums[upper, 0, d] - sums[upper, 0, c]
                value += min(
                    sums[lower, 1, b] - sums[lower, 1, a], sums[lower, 2, b] - sums[lower, 2, a]
                ) + min(sums[upper, 1, d] - sums[upper, 1, c], sums[upper, 2, d] - sums[upper, 2, c])
            if value < best:
                best, choice = value, lower + 2 * upper
    return best, choice


@compiled
def _sweep(
    tables: CutTables, question: _Question, reached: IntArray
) -> tuple[tuple[int, int, int], float]:  # pragma: no cover - compiled
    """Mark the reachable states; return where the last rank can end (i, k, j), or a lower bound."""
    cheapest, speeds = tables.cheapest, tables.speeds
    mode, most, two_sided, least, fixed, reference = question
    p, n = len(speeds), len(cheapest) - 1
    beyond = np.inf
    reached[0, 0, n] = 1
    for rank in range(p - 1):
        # The fewest parts that the later ranks need, and their speed together.
        reserve = (p - 1 - rank) * least * (2 if two_sided else 1)
        speed = speeds[rank + 1 :].sum()
        for i in range(n + 1):
            lowest, highest = n + 1, -1
            for j in range(i, n + 1):
                if reached[rank, i, j]:
                    lowest, highest = min(lowest, j), j
            if highest < 0:
                continue
            begin, end = i + least, n - reserve
            if fixed[0, rank] >= 0:
                begin, end = max(begin, fixed[0, rank]), fixed[0, rank]
            for after in range(begin, end + 1):
                alone, _ = _measure(tables, mode, rank, i, after, n, n)
                if alone > most:
                    # Case (1) of Lemma 34. A longer first piece has at least this measure.
                    beyond = min(beyond, alone)
                    break
                if not two_sided:
                    reached[rank + 1, after, n] = 1
                    continue
                # If this piece began beyond here, more would be left than the later ranks can take.
                farthest = n
                if mode == LOAD:
                    enough = cheapest[after] + speed * most * (1 + ROUNDING)
                    farthest = np.searchsorted(cheapest, enough, side="right") - 1
                # c is the smallest k of measure at most `most`. It does not fall as j grows, so all j of one
                # (i, after) take O(n) measures. The k from c to `painted` are marked already.
                c = painted = ZERO - 1
                for j in range(max(lowest, after + reserve + least), highest + 1):
                    if not reached[rank, i, j]:
                        continue
                    last = j - least
                    if c < 0:
                        # The first reachable j: find c by bisection. Later ones move c forward only.
                        c, above = after + reserve, last + 1
                        while c < above:
                            middle = (c + above) // 2
                            value, _ = _measure(tables, mode, rank, i, after, middle, j)
                            if value <= most:
                                above = middle
                            else:
                                c = middle + 1
                    else:
                        while c <= last:
                            value, _ = _measure(tables, mode, rank, i, after, c, j)
                            if value <= most:
                                break
                            c += 1
                    if c > after + reserve:
                        # Case (2): one part more on the right is too much.
                        value, _ = _measure(tables, mode, rank, i, after, c - 1, j)
                        beyond = min(beyond, value)
                    if last > farthest:
                        # Case (3): the later ranks cannot take what would be left.
                        left = cheapest[max(c, farthest + 1)] - cheapest[after]
                        beyond = min(beyond, left / speed)
                        last = farthest
                    if fixed[1, rank] >= 0:
                        if c <= fixed[1, rank] <= last:
                            reached[rank + 1, after, fixed[1, rank]] = 1
                        continue
                    for k in range(max(c, painted + 1), last + 1):
                        reached[rank + 1, after, k] = 1
                    painted = max(painted, last)
                    if c > farthest:
                        # No later j leaves fewer parts than those up to `farthest`, or costs this rank less.
                        # Case (4) of Lemma 34.
                        if farthest < n:
                            left = cheapest[farthest + 1] - cheapest[after]
                            beyond = min(beyond, left / speed)
                        break
    rank = p - 1
    found, nearest = (-1, -1, -1), 4 * n
    for i in range(n + 1):
        for j in range(i, n + 1):
            if not reached[rank, i, j]:
                continue
            # Case (5): the last rank must take all parts that are left.
            left = (cheapest[j] - cheapest[i]) / speeds[rank]
            if mode == LOAD and left > most * (1 + ROUNDING):
                beyond = min(beyond, left)
                continue
            begin, end = i + least, j - least
            if not two_sided:
                # With one piece, the rank ends where the parts end; i - 1 makes the range below empty.
                begin = end = j if j - i >= least else i - 1
            elif fixed[0, rank] >= 0:
                begin, end = max(begin, fixed[0, rank]), min(end, fixed[0, rank])
            for k in range(max(begin, i), end + 1):
                value, _ = _measure(tables, mode, rank, i, k, k, j)
                if value > most:
                    beyond = min(beyond, value)
                    continue
                distance = abs(i - reference[rank]) + abs(k - reference[rank + 1])
                if two_sided:
                    distance += abs(j - reference[rank + 2])
                if distance < nearest:
                    nearest, found = distance, (i, k, j)
    return found, beyond


@compiled
def _trace(
    tables: CutTables, question: _Question, reached: IntArray, end: tuple[int, int, int]
) -> tuple[IntArray, IntArray]:  # pragma: no cover - compiled
    """Boundaries and recomputed stages of a path to the end state, near the reference."""
    mode, most, two_sided, least, _, reference = question
    p, n = reached.shape[0], reached.shape[1] - 1
    stages = 2 * p if two_sided else p
    bounds, recompute = np.zeros(stages + 1, np.int64), np.zeros(stages, np.int64)
    i, k, j = end
    bounds[stages] = n
    bounds[p - 1], bounds[p] = i, k
    if two_sided:
        bounds[p + 1] = j
    _, choice = _measure(tables, mode, p - 1, i, k, k, j)
    recompute[p - 1] = choice & 1
    if two_sided:
        recompute[p] = choice >> 1
    for rank in range(p - 2, -1, -1):
        # (i, j) is the state after this rank. Any marked state before it will do if the transition's measure
        # is at most `most`; of these, take the one nearest to the reference.
        best, before, behind = 4 * n, -1, -1
        for i0 in range(i - least + 1):
            for j0 in range(j + least if two_sided else n, n + 1):
                if not reached[rank, i0, j0]:
                    continue
                value, made = _measure(tables, mode, rank, i0, i, j, j0)
                if value > most:
                    continue
                difference = abs(i0 - reference[rank])
                if two_sided:
                    difference += abs(j0 - reference[stages - rank])
                if difference < best:
                    best, before, behind, choice = difference, i0, j0, made
        recompute[rank] = choice & 1
        if two_sided:
            recompute[stages - 1 - rank] = choice >> 1
            bounds[stages - 1 - rank], bounds[stages - rank] = j, behind
        bounds[rank], bounds[rank + 1] = before, i
        i, j = before, behind
    return bounds, recompute
