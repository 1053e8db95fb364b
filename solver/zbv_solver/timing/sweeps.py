"""Kernels of :mod:`zbv_solver.timing.start_times`: executing an order, and longest paths along its runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray, compiled


@compiled
def execute(
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
    stage, and ``cell`` (n,) stage * m + microbatch.
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
            if not is_weight:
                made = where if is_forward else cells + where
                waiting = done[made]
                done[made] = at
                while waiting < -1:
                    queue[(head + size) % p] = -2 - waiting
                    size += 1
                    waiting = before[-2 - waiting]
            at += 1
        if at > reached[rank]:
            # Every run has at least one action, so n rows suffice.
            runs[n_runs, 0], runs[n_runs, 1] = rank, at
            n_runs += 1
            reached[rank] = at
    return start, end, source, runs[:n_runs], reached


class Graph(NamedTuple):
    """An order of n actions on p ranks as it executes: what longest paths need."""

    source: IntArray
    """(n,) the action that sends the remote input, or -1."""
    offset: IntArray
    """(p + 1,) the actions of rank r are ``offset[r]:offset[r + 1]``."""
    duration: FloatArray
    latency: FloatArray
    """(n,) time that an action takes, and that its remote input is in transfer; -1 without such an input."""
    runs: IntArray
    """(k, 2) stretches of consecutive actions: a rank, and the index where they stop. Every input of a run is
    in an earlier run, or earlier in this one."""


@compiled
def sweep(
    graph: Graph, release: FloatArray, origin: IntArray, length: FloatArray
) -> None:  # pragma: no cover - compiled
    """Critical paths when rank r may not start before ``release[r]``.

    An action ends at ``release[origin] + length``: its critical path begins with the first start of rank
    ``origin`` and has this length. The two are kept apart so that sums of whole costs stay whole.
    """
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
def tally(
    graph: Graph,
    paths: tuple[IntArray, FloatArray],
    last: int,
    kind: IntArray,
    boundary: IntArray,
    count: FloatArray,
    crossed: FloatArray,
) -> None:  # pragma: no cover - compiled
    """Count the actions and the transfers of the longest path to ``last``, which :func:`sweep` found.

    ``count`` grows at the kinds (n,) of the path's actions, ``crossed`` at the boundaries (n,) over which
    they received their inputs, if the path came from there. ``paths`` are ``origin`` and ``length``.
    """
    origin, length = paths
    offset, rank = graph.offset, origin[last]
    at = last
    begin = offset[np.searchsorted(offset, at, side="right") - 1]  # of the rank that hosts `at`
    while True:
        count[kind[at]] += 1.0
        if at == offset[rank]:
            break
        along = length[at - 1] if at > begin and origin[at - 1] == rank else -np.inf
        feed = graph.source[at]
        # Like the sweep: a path along the rank stays on a tie.
        if feed >= 0 and origin[feed] == rank and length[feed] + graph.latency[at] > along:
            crossed[boundary[at]] += 1.0
            at = feed
            begin = offset[np.searchsorted(offset, at, side="right") - 1]
        else:
            at -= 1


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
        sweep(graph, release, origin, length)
        widest, latest = 0.0, 0.0
        for rank in range(p):
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
def peaks(
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
