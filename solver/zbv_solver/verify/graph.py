"""The verifier's precedence graph of an order, and how it proves or refutes a stated span.

The span is not computed. Start times that satisfy every inequality prove that all ranks fit a window. A cycle
of paths from rank to rank whose mean length exceeds the window proves that they do not. Both witnesses are
found by delaying starts, and checked action by action.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray, can_compile, compiled_where_possible
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W


def for_loops(array: IntArray) -> IntArray:
    """The array, or a list if kernels run as plain Python, which reads lists in half the time."""
    return array if can_compile() else cast(IntArray, array.tolist())


def columns(orders: Orders) -> tuple[IntArray, IntArray, IntArray]:
    """Stages, letters and microbatches as :func:`for_loops` returns them."""
    return for_loops(orders.stage), for_loops(orders.letter), for_loops(orders.microbatch)


class PrecedenceGraph(NamedTuple):
    """The precedence graph of an order, and a sequence in which it can execute."""

    previous: IntArray
    """(n,) the preceding action on the same rank; -1 - rank for the first action of a rank."""
    feed: IntArray
    latency: FloatArray
    """(n,) the action of another stage whose output is the input, or -1, and the latency of the transfer."""
    duration: FloatArray
    """(n,) float64."""
    sequence: IntArray
    """(n,) a topological order of the actions."""
    first: IntArray
    last: IntArray
    """(p,) first and last action of every rank."""


_LETTER_OF = {"forward": F, "backward_input": I, "backward_weight": W, "backward": B}


def amounts(problem: Problem, section: str, name: str) -> FloatArray:
    """What microbatches cost on a stage or boundary, (length, m), straight from the problem's document."""
    given = problem.given_arrays
    if given is not None:  # of a search: these stand for the numbers of the document
        tables = given.duration if section == "costs" else given.delta
        by_kind: FloatArray = given.latency if name == "p2p" else tables[_LETTER_OF[name]]
        return by_kind[:, given.kind_of]
    fixed = getattr(getattr(problem, section), name)
    table = np.repeat(np.array(fixed, dtype=np.float64)[:, None], problem.microbatches, axis=1)
    for feature in problem.features:
        table += np.outer(getattr(getattr(feature, section), name), feature.value)
    return table


def durations_of(problem: Problem, orders: Orders) -> FloatArray:
    """The duration of every action, (n,)."""
    forward, inputs, weights = (
        amounts(problem, "costs", name) for name in ("forward", "backward_input", "backward_weight")
    )
    fused = inputs + weights if problem.costs.backward is None else amounts(problem, "costs", "backward")
    # A sum of terms with different signs may be 0 up to rounding.
    return np.maximum(by_action(orders, {F: forward, I: inputs, W: weights, B: fused}), 0.0)


def by_action(orders: Orders, tables: dict[int, FloatArray]) -> FloatArray:
    """The number of every action, (n,), from a table (S, m) per letter."""
    found = np.zeros(len(orders))
    for letter, table in tables.items():
        chosen = orders.letter == letter
        found[chosen] = table[orders.stage[chosen], orders.microbatch[chosen]]
    return found


def precedence_graph(problem: Problem, orders: Orders, where: IntArray) -> PrecedenceGraph:
    """The graph of a complete order; ``where`` as in :mod:`zbv_solver.verify.verifier`.

    Raises :class:`InvalidPlan` when a cycle makes the order a deadlock.
    """
    placement = problem.placement
    duration = durations_of(problem, orders)
    at_boundary = amounts(problem, "costs", "p2p")
    for boundary in range(problem.n_stages - 1):
        if placement.rank_of[boundary] == placement.rank_of[boundary + 1]:
            at_boundary[boundary] = 0.0
    previous = np.arange(-1, len(orders) - 1, dtype=np.int32)
    filled = np.flatnonzero(np.diff(orders.offset))
    previous[orders.offset[filled]] = -1 - filled
    feed, latency = _feeds(*columns(orders), for_loops(where), at_boundary)
    sequence, done = _kahn(for_loops(previous), for_loops(feed))
    if done < len(orders):
        stuck = np.ones(len(orders), dtype=bool)
        stuck[sequence[:done]] = False
        raise InvalidPlan(
            f"the order deadlocks: {len(orders) - done} actions wait in a cycle, among them "
            f"{orders.text_at(int(np.argmax(stuck)))}."
        )
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    return PrecedenceGraph(previous, feed, latency, duration, sequence, first, last)


def refuting_cycle(graph: PrecedenceGraph, window: float, release: FloatArray) -> float | None:
    """Decide whether start times exist that keep every rank within a window, with a witness in both cases.

    First starts (``release``, in place) are delayed until every rank fits the window. Every delay follows a
    critical path, which links the rank to the one where the path begins. If such links form a cycle, its
    paths are longer on average than the window, and no start times exist.

    Returns
    -------
    The mean length of the paths of such a cycle, each traced action by action; or None when start times were
    found that satisfy every inequality.
    """
    pushed_by: dict[int, tuple[int, float]] = {}
    # Without a cycle, no chain of delays visits a rank twice. The extra rounds are for rounding.
    for _ in range(2 * len(release) + 8):
        start = earliest(graph, release)
        needed = start[graph.last] + graph.duration[graph.last] - window
        late = np.flatnonzero(needed > release + 1e-12 * abs(window))
        if not len(late):
            if not respects_inputs(graph, start) or np.any(needed > start[graph.first] + 1e-12 * abs(window)):
                raise InvalidPlan("the span cannot be checked: an action would start before its inputs.")
            return None
        # For a rank that must start later: the rank where its critical path begins, and the path's length.
        for rank in late.tolist():
            pushed_by[rank] = _trace(graph, start, release, graph.last[rank])
        mean = _longest_cycle(pushed_by)
        if mean > window:
            return mean
        release[late] = needed[late]
    raise InvalidPlan("the span cannot be checked: neither start times nor a cycle of paths decides it.")


def _longest_cycle(pushed_by: dict[int, tuple[int, float]]) -> float:
    """Largest mean length of a cycle of delays, or -inf."""
    best = -math.inf
    for begin in pushed_by:
        total, count, rank = 0.0, 0, begin
        while rank in pushed_by and count <= len(pushed_by):
            rank, length = pushed_by[rank]
            total += length
            count += 1
            if rank == begin:
                best = max(best, total / count)
                break
    return best


@compiled_where_possible
def _feeds(
    stage: IntArray, letter: IntArray, microbatch: IntArray, where: IntArray, at_boundary: FloatArray
) -> tuple[IntArray, FloatArray]:  # pragma: no cover - compiled
    """The action whose output is the input of every action, or -1, and the latency of the transfer."""
    n, (last_stage, m) = len(stage), at_boundary.shape
    feed, latency = np.full(n, -1, np.int32), np.zeros(n)
    for at in range(n):
        s, k, j = stage[at], letter[at], microbatch[at]
        if k == F and s > 0:
            feed[at] = where[4 * ((s - 1) * m + j) + F]
            latency[at] = at_boundary[s - 1, j]
        elif k != F and k != W and s < last_stage:
            above = 4 * ((s + 1) * m + j)
            # A complete cell has either I or B; the index of the other is -1.
            feed[at] = max(where[above + I], where[above + B])
            latency[at] = at_boundary[s, j]
    return feed, latency


@compiled_where_possible
def _kahn(previous: IntArray, feed: IntArray) -> tuple[IntArray, int]:  # pragma: no cover - compiled
    """A topological order of the actions, and how many of them can be executed."""
    n = len(previous)
    # An output has at most one consumer on another stage, so one entry per action suffices.
    takes, waiting = np.full(n, -1, np.int32), np.zeros(n, np.int8)
    queue, size, done = np.empty(n, np.int32), 0, 0
    for at in range(n):
        if feed[at] >= 0:
            takes[feed[at]] = at
            waiting[at] += 1
        if previous[at] >= 0:
            waiting[at] += 1
        if waiting[at] == 0:
            queue[size] = at
            size += 1
    while done < size:
        at = queue[done]
        done += 1
        follower = takes[at]
        if follower >= 0:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
        follower = at + 1
        if follower < n and previous[follower] == at:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
    return queue, done


@compiled_where_possible
def earliest(graph: PrecedenceGraph, release: FloatArray) -> FloatArray:  # pragma: no cover - compiled
    """Earliest starts (n,) when rank r may not start before ``release[r]``."""
    duration, start = graph.duration, np.empty(len(graph.sequence))
    # F before I or B, and I before W, needs no term here: a cell's actions are on one rank, and the verifier
    # has checked their order in its list.
    for at in graph.sequence:
        before, remote = graph.previous[at], graph.feed[at]
        begin = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0:
            begin = max(begin, start[remote] + duration[remote] + graph.latency[at])
        start[at] = begin
    return start


@compiled_where_possible
def respects_inputs(graph: PrecedenceGraph, start: FloatArray) -> bool:  # pragma: no cover - compiled
    """Whether start times satisfy every inequality: no action starts before its inputs are available."""
    duration = graph.duration
    for at in range(len(start)):
        before, remote = graph.previous[at], graph.feed[at]
        if before >= 0 and start[at] < start[before] + duration[before]:
            return False
        if remote >= 0 and start[at] < start[remote] + duration[remote] + graph.latency[at]:
            return False
    return True


@compiled_where_possible
def _trace(
    graph: PrecedenceGraph, start: FloatArray, release: FloatArray, at: int
) -> tuple[int, float]:  # pragma: no cover - compiled
    """Trace the critical path back from an action: the rank where it begins, and its length."""
    duration, latency, length = graph.duration, graph.latency, 0.0
    while True:
        length += duration[at]
        before, remote = graph.previous[at], graph.feed[at]
        # These are the sums of `earliest`, in the same order of additions. So the comparison below finds the
        # input that determined the start.
        free = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0 and start[remote] + duration[remote] + latency[at] > free:
            length += latency[at]
            at = remote
        elif before >= 0:
            at = before
        else:
            return -1 - before, length
