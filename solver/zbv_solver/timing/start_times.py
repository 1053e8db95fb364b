"""Start and end times of actions, and the metrics of an order; docs/formats.md defines them.

One pass executes the order, or finds a deadlock. It yields earliest times, and the *runs* of the execution:
consecutive actions of one rank that execute without waiting for another rank's progress. Every further
longest-path problem is then a linear sweep over the runs.

The two actions of a pair are one stretch of work: the F takes no time, the action after it takes that of the
pair, and what F makes is there when that action ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.plans.orders import Orders, durations
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, D, F, I, O, Problem, R
from zbv_solver.timing.copies import run_nodes, with_copies


@dataclass(frozen=True, eq=False)
class Timing:
    """Earliest times and metrics of an order."""

    start: FloatArray
    end: FloatArray
    """(n,) starts and ends in the flat order of the :class:`Orders`, in the problem's time unit."""
    makespan: float
    """Last end, with t = 0 at the first start."""
    span: float
    """Exact steady-state time of one iteration."""
    bubble_rate: float
    """1 - busy time / (p * span)."""
    peak_memory: tuple[float, ...]
    """Per rank (p,), static memory included."""


class Graph(NamedTuple):
    """An order of n actions on p ranks as it executes: what longest paths need.

    With copies to the host, n counts all nodes of :class:`~.copies.Nodes`, and engines are further chains.
    """

    source: IntArray
    """(n,) the action that sends the remote input, or -1."""
    offset: IntArray
    """(chains + 1,) the actions of rank r are ``offset[r]:offset[r + 1]``."""
    duration: FloatArray
    latency: FloatArray
    """(n,) time that an action takes, and that its remote input is in transfer; -1 without such an input."""
    runs: IntArray
    """(k, 2) stretches of consecutive actions: a rank, and the index where they stop. Every input of a run is
    in an earlier run, or earlier in this one."""
    ranks: int
    """Number of ranks p; the chains after them are engines, which may begin at any time."""


def evaluate(problem: Problem, orders: Orders) -> Timing:
    """Earliest-start times and metrics of an order.

    Raises :class:`InvalidPlan` when the order deadlocks, or the input of an action is not produced before it.
    """
    graph, start, end, at = _executed(problem, orders)
    span = _exact_span(graph, start)[0]
    busy = float(graph.duration[: graph.offset[graph.ranks]].sum())
    delta, offset = _changes(problem, orders)
    start, end = start[at], end[at]
    return Timing(
        start=start,
        end=end,
        makespan=_makespan(orders, start, end),
        span=span,
        bubble_rate=max(0.0, 1 - busy / (problem.pp_degree * span)) if span > 0 else 0.0,
        peak_memory=tuple(_peaks(offset, delta, problem.arrays.static).tolist()),
    )


def objective_of(problem: Problem, orders: Orders) -> float:
    """The objective of an order: its exact span, or its makespan.

    Raises :class:`InvalidPlan` when the orders deadlock.
    """
    graph, start, end, at = _executed(problem, orders)
    if problem.objective == "makespan":
        return _makespan(orders, start[at], end[at])
    return _exact_span(graph, start)[0]


def earliest_times(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action, each (n,), without the exact span.

    Raises :class:`InvalidPlan` like :func:`evaluate`.
    """
    _, start, end, at = _executed(problem, orders)
    return start[at], end[at]


def copy_times(problem: Problem, orders: Orders) -> FloatArray:
    """Start and end of every entry of ``orders.copies``, (k, 2).

    Those of an O or R are of the copy that it begins; those of a D, when the memory is free, twice. Raises
    :class:`InvalidPlan` like :func:`evaluate`.
    """
    if orders.copies is None:
        return np.empty((0, 2))
    graph, start, end, node = _executed(problem, orders)
    at, letter, stage, microbatch = orders.copies.T
    found, p = np.empty((len(at), 2)), problem.pp_degree
    # The engines run copies in the order of the lists.
    for which, begin in ((O, graph.offset[p]), (R, graph.offset[2 * p])):
        engine = slice(begin, begin + np.count_nonzero(letter == which))
        found[letter == which] = np.column_stack([start[engine], end[engine]])
    free = np.append(0.0, end[node])[at] * ~np.isin(at, orders.offset)
    out, now = dict[tuple[int, int], float](), 0.0
    for entry in range(len(at)):
        cell = int(stage[entry]), int(microbatch[entry])
        if entry == 0 or at[entry] != at[entry - 1]:
            now = float(free[entry])
        if letter[entry] == O:
            out[cell] = float(found[entry, 1])
        elif letter[entry] == D:
            found[entry] = now = max(now, out[cell])
    return found


def earliest_start_values(problem: Problem, orders: Orders) -> tuple[float, float]:
    """Makespan, and the largest (last end - first start) of any rank at earliest times.

    The second number is an upper bound on the span. This is much cheaper than :func:`evaluate`.

    Raises :class:`InvalidPlan` like :func:`evaluate`.
    """
    start, end = earliest_times(problem, orders)
    first, last = _ends_of_ranks(orders)
    return _makespan(orders, start, end), float((end[last] - start[first]).max(initial=0.0))


def span_start_times(problem: Problem, orders: Orders) -> FloatArray:
    """Start times (n,) with which every rank finishes within the exact span.

    The first starts x solve x[q] >= x[r] + D[r][q] - span, a system without positive cycles. All other
    actions then start as early as possible.
    """
    graph, start, _, at = _executed(problem, orders)
    _, release = _exact_span(graph, start)
    origin, length = longest_paths(graph, release)
    start = (release[origin] + length - graph.duration)[at]
    return start - start.min(initial=np.inf) if len(start) else start


def longest_paths(graph: Graph, release: FloatArray) -> tuple[IntArray, FloatArray]:
    """Critical paths to all actions when rank r may not start before ``release[r]``.

    An action ends at ``release[origin] + length``: its critical path begins with the first start of rank
    ``origin`` (n,) and has this length (n,). The two are kept apart so that sums of whole costs stay whole.
    """
    origin, length = np.empty(len(graph.source), np.int32), np.empty(len(graph.source))
    _sweep(graph, release, origin, length)
    return origin, length


def memory_profile(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Memory of an action's rank while the action runs and after it has ended, each (n,).

    For a given order this does not depend on times: it is a prefix sum per rank.
    """
    delta, offset = _changes(problem, orders)
    after = np.empty(len(delta))
    for rank, (begin, end) in enumerate(pairwise(offset.tolist())):
        after[begin:end] = problem.arrays.static[rank] + np.cumsum(delta[begin:end])
    running = after - delta + np.maximum(delta, 0.0)
    if orders.copies is not None:
        is_action = orders.entries()[0][:, 1] < O
        running, after = running[is_action], after[is_action]
    return running, after


def _changes(problem: Problem, orders: Orders) -> tuple[FloatArray, IntArray]:
    """The change of memory at every action and copy, (n + k,), and where each rank's begin."""
    arrays = problem.arrays
    if orders.copies is None:
        return arrays.deltas(orders.stage, orders.letter, orders.microbatch), orders.offset
    rows, offset = orders.entries()
    stage, letter, microbatch = rows.T
    moved = np.array(() if problem.copies is None else problem.copies.offloadable)
    delta = arrays.deltas(stage, np.minimum(letter, B), microbatch)
    delta[letter > B] = 0.0
    delta[letter == D] = -moved[stage[letter == D]]
    delta[letter == R] = moved[stage[letter == R]]
    return delta, offset


def _ends_of_ranks(orders: Orders) -> tuple[IntArray, IntArray]:
    """First and last action of every rank that has actions."""
    filled = np.diff(orders.offset) > 0
    return orders.offset[:-1][filled], orders.offset[1:][filled] - 1


def _makespan(orders: Orders, start: FloatArray, end: FloatArray) -> float:
    first, last = _ends_of_ranks(orders)
    return float(end[last].max() - start[first].min()) if len(first) else 0.0


def execute(problem: Problem, orders: Orders) -> Graph:
    """An order without copies as it executes.

    Raises :class:`InvalidPlan` like :func:`evaluate`, and for copies.
    """
    if orders.copies is not None:
        raise InvalidPlan("found copies to the host; this works with orders without copies only.")
    return _executed(problem, orders)[0]


def _executed(problem: Problem, orders: Orders) -> tuple[Graph, FloatArray, FloatArray, IntArray | slice]:
    """An order as it executes, earliest start and end of every node, and which nodes are the actions."""
    n_stages, m = problem.n_stages, problem.microbatches
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    for names, amount in ((orders.stage, n_stages), (orders.microbatch, m)):
        if names.min(initial=0) < 0 or names.max(initial=0) >= amount:
            at = int(np.argmax((names < 0) | (names >= amount)))
            raise InvalidPlan(
                f"found {orders.text_at(at)}; the problem has {n_stages} stages and {m} microbatches."
            )
    arrays = problem.arrays
    duration = durations(problem, orders)
    waits = np.full((4, n_stages, arrays.kinds), -1.0)
    # F receives over the boundary before its stage, I and B over the one after it. The others have no remote
    # input: -1.
    waits[F, 1:] = waits[I, :-1] = waits[B, :-1] = arrays.latency
    latency = waits[orders.letter, orders.stage, arrays.kind_of[orders.microbatch]]
    if orders.copies is not None:
        nodes = with_copies(problem, orders, duration, latency)
        start, end, runs, reached = run_nodes(nodes)
        ended = np.searchsorted(nodes.of_action, reached[: problem.pp_degree])
        _require_end(orders, ended)
        graph = Graph(nodes.source, nodes.offset, nodes.duration, nodes.latency, runs, problem.pp_degree)
        if orders.paired is not None:  # the F of a pair begins with the action after it
            first = nodes.of_action[np.flatnonzero(orders.paired)]
            second = nodes.of_action[np.flatnonzero(orders.paired) + 1]
            start[first], end[first] = start[second], end[second]
        return graph, start, end, nodes.of_action
    row = orders.letter * np.int32(n_stages) + orders.stage
    if orders.paired is not None:
        row[orders.paired] -= np.int32(n_stages)
    cell = orders.stage * np.int32(m) + orders.microbatch
    start, end, source, runs, reached = _execute(row, cell, orders.offset, duration, latency, n_stages, m)
    _require_end(orders, reached)
    return Graph(source, orders.offset, duration, latency, runs, problem.pp_degree), start, end, slice(None)


def _require_end(orders: Orders, reached: IntArray) -> None:
    """Raise :class:`InvalidPlan` unless every rank has reached its end; ``reached`` (p,) are indices."""
    if (reached >= orders.offset[1:]).all():
        return
    stuck = [
        f"rank {rank} at {orders.text_at(at)}"
        for rank, at in enumerate(reached.tolist())
        if at < orders.offset[rank + 1]
    ]
    shown = ", ".join(stuck[:6]) + (", …" if len(stuck) > 6 else "")
    raise InvalidPlan(
        f"the order deadlocks: every rank waits for an input that nobody will produce ({shown})."
    )


def _exact_span(graph: Graph, start: FloatArray) -> tuple[float, FloatArray]:
    """The span, and first starts of the ranks (p,) with which every rank finishes within it."""
    begins, ends = graph.offset[:-1], graph.offset[1:]
    # Engines wait for their ranks only: no path begins there.
    release = np.where(np.arange(len(begins)) < graph.ranks, 0.0, -np.inf)
    begins, ends = begins[: graph.ranks], ends[: graph.ranks]
    # If no rank gains from starting later, the earliest starts are the solution.
    release[: graph.ranks][begins < ends] = start[begins[begins < ends]]
    span = policy_iteration(graph, release, ROUNDING)
    return float(span), release


@compiled
def _execute(
    row: IntArray,
    cell: IntArray,
    offset: IntArray,
    duration: FloatArray,
    latency: FloatArray,
    n_stages: int,
    m: int,
) -> tuple[FloatArray, FloatArray, IntArray, IntArray, IntArray]:  # pragma: no cover - compiled
    """Start, end, source and runs of an order, and the index at which every rank stopped.

    A rank runs until an input is missing, and is visited again once that input is there: O(n) in all.
    ``offset``, ``duration`` and ``latency`` are those of a :class:`Graph`; ``row`` (n,) is letter code * S +
    stage, or stage - S for the F of a pair, and ``cell`` (n,) stage * m + microbatch.
    """
    n, p, cells = len(row), len(offset) - 1, n_stages * m
    # Among the actions, the index of every cell's F, then of every cell's I or B. Until it has executed: -1,
    # or -2 - rank for the rank that waits for it. If several do, each one keeps the number before its own.
    done, before = np.full(2 * cells, -1, np.int32), np.empty(p, np.int32)
    start, end, source = np.empty(n), np.empty(n), np.full(n, -1, np.int32)
    runs, n_runs = np.empty((n, 2), np.int32), 0
    reached = offset[:-1].copy()
    # A rank is in this queue, waits for one input, or has ended; so p places suffice.
    queue, head, size = np.arange(p), 0, p
    while size > 0:
        rank = queue[head]
        head, size = (head + 1) % p, size - 1
        at = reached[rank]
        free = end[at - 1] if at > offset[rank] else 0.0
        while at < offset[rank + 1]:
            kind, where = row[at], cell[at]
            is_forward, is_weight = kind < n_stages, 2 * n_stages <= kind < 3 * n_stages
            # I and B need the F of their cell; W needs the I.
            need = -1 if is_forward else where + cells if is_weight else where
            begin, is_there = free, need < 0 or done[need] >= 0
            if is_there and latency[at] >= 0:
                # Cells are stage * m + microbatch: m cells further is the same microbatch on the next stage.
                need = where - m if is_forward else cells + where + m
                is_there = done[need] >= 0
                if is_there:
                    source[at] = done[need]
                    begin = max(begin, end[done[need]] + latency[at])
            if not is_there:
                before[rank], done[need] = done[need], -2 - rank
                break
            free = begin + duration[at]
            start[at], end[at] = begin, free
            if kind >= 0 and not is_weight:
                made = where if is_forward else cells + where
                size = _publish(made, at, done, before, queue, head, size)
                if at > offset[rank] and row[at - 1] < 0:  # the second action of a pair
                    start[at - 1], end[at - 1] = begin, free
                    size = _publish(cell[at - 1], at, done, before, queue, head, size)
            at += 1
        if at > reached[rank]:
            # Every run has at least one action, so n rows suffice.
            runs[n_runs, 0], runs[n_runs, 1] = rank, at
            n_runs += 1
            reached[rank] = at
    return start, end, source, runs[:n_runs], reached


@compiled
def _publish(
    made: int, at: int, done: IntArray, before: IntArray, queue: IntArray, head: int, size: int
) -> int:  # pragma: no cover - compiled
    """An action has made what the ranks in ``done[made]`` wait for: queue them; returns the queue's size."""
    waiting = done[made]
    done[made] = at
    while waiting < -1:
        queue[(head + size) % len(queue)] = -2 - waiting
        size += 1
        waiting = before[-2 - waiting]
    return size


@compiled
def _sweep(
    graph: Graph, release: FloatArray, origin: IntArray, length: FloatArray
) -> None:  # pragma: no cover - compiled
    """:func:`longest_paths`; ``origin`` and ``length`` (n,) are written."""
    source, offset, runs = graph.source, graph.offset, graph.runs
    duration, latency = graph.duration, graph.latency
    reached = offset[:-1].copy()
    for run in range(len(runs)):
        rank, stop = runs[run]
        at = reached[rank]
        begun, path = np.int32(rank), 0.0
        if at > offset[rank]:
            begun, path = origin[at - 1], length[at - 1]
        while at < stop:
            feed = source[at]
            if feed >= 0:
                arrival = length[feed] + latency[at]
                # Compare ends, which include the releases. On a tie the path along the rank stays.
                if release[origin[feed]] + arrival > release[begun] + path:
                    begun, path = origin[feed], arrival
            path += duration[at]
            origin[at], length[at] = begun, path
            at += 1
        reached[rank] = stop


@compiled
def policy_iteration(
    graph: Graph, release: FloatArray, tolerance: float
) -> float:  # pragma: no cover - compiled
    """Largest mean weight of a cycle of D (Howard's policy iteration), D known only through sweeps.

    ``release`` holds a first guess of the ranks' first starts, and in the end first starts under which every
    window fits. Every sweep finds the critical path to the last end of each rank: an arc of D. Arcs that do
    not fit the span so far either form cycles, and their largest mean is the next span, or they lengthen a
    forest, and its values are the next releases. Both only grow. Once every window fits, the releases prove
    the span.
    """
    offset = graph.offset
    n, p = len(graph.source), len(offset) - 1
    origin, length = np.empty(n, np.int32), np.empty(n)
    parent, weight = np.full(p, -1, np.int32), np.zeros(p)
    span, is_first = 0.0, True
    for _ in range(4 * p + 64):  # a handful in practice; only rounding could ask for more than this
        _sweep(graph, release, origin, length)
        widest, latest = 0.0, 0.0
        for rank in range(graph.ranks):
            if offset[rank] < offset[rank + 1]:
                last = offset[rank + 1] - 1
                end = release[origin[last]] + length[last]
                latest = max(latest, abs(end))
                widest = max(widest, end - release[rank])
                # A rank with a window that fits keeps its arc, or stays a root.
                if is_first or end - release[rank] > span + tolerance * abs(end):
                    parent[rank], weight[rank] = origin[last], length[last]
        # Cutting the cycles leaves a forest, so `_settle` terminates.
        span, is_first = max(span, _cut_cycles(parent, weight)), False
        # The span is the mean of a cycle of D (or 0), so no timing has less. Up to rounding, the releases
        # satisfy the inequalities of Lemma 3, so a timing attains it.
        if widest <= span + tolerance * latest:
            break
        _settle(parent, weight, span, release)
    return span


@compiled
def _cut_cycles(parent: IntArray, weight: FloatArray) -> float:  # pragma: no cover - compiled
    """Largest mean weight of a cycle of parents, or 0; one node of every cycle becomes a root."""
    seen, best = np.zeros(len(parent), np.int32), 0.0
    # `seen` is the walk that came to a node first. A walk that meets its own mark has closed a cycle; one
    # that meets another mark ends. So all walks together take O(p).
    for node in range(len(parent)):
        at = node
        while at >= 0 and seen[at] == 0:
            seen[at] = node + 1
            at = parent[at]
        if at < 0 or seen[at] != node + 1:
            continue
        total, count, root = 0.0, 0, at
        while count == 0 or at != root:
            total += weight[at]
            count += 1
            at = parent[at]
        best = max(best, total / count)
        parent[root] = -1
    return best


@compiled
def _settle(
    parent: IntArray, weight: FloatArray, span: float, release: FloatArray
) -> None:  # pragma: no cover - compiled
    """release[q] = release[parent] + weight - span all over the forest, from its roots."""
    p = len(parent)
    settled, path = np.zeros(p, np.bool_), np.empty(p, np.int32)
    for node in range(p):
        # Walk up to a root or a settled node, then settle the path from there down. Roots keep their
        # release.
        depth, at = 0, node
        while parent[at] >= 0 and not settled[at]:
            path[depth] = at
            depth += 1
            at = parent[at]
        for step in range(depth - 1, -1, -1):
            at = path[step]
            release[at] = release[parent[at]] + weight[at] - span
            settled[at] = True


@compiled
def _peaks(
    offset: IntArray, delta: FloatArray, static: FloatArray
) -> FloatArray:  # pragma: no cover - compiled
    """Peak memory of every rank, (p,); ``delta`` (n,) is the change of memory at every action."""
    most = static.copy()
    for rank in range(len(static)):
        grown = 0.0
        for at in range(offset[rank], offset[rank + 1]):
            change = delta[at]
            most[rank] = max(most[rank], static[rank] + grown + max(change, 0.0))
            grown += change
    return most
