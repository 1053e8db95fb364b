"""Orders with copies to the host as they execute: engines are further chains of nodes, after the ranks.

A copy out begins when its engine is free and the entry before its O has ended; D waits for its end. A copy in
begins in the same way at its R, and the backward of its microbatch waits for its end (docs/formats.md,
"Copies to the host"). So D is a node of its rank that takes no time, and so is the wait before a backward.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, D, F, I, O, Problem, R

NONE = -1


class Nodes(NamedTuple):
    """What every node of an order with copies takes and waits for."""

    source: IntArray
    """(nodes,) the node that it waits for, apart from the one before it in its chain, or -1."""
    duration: FloatArray
    latency: FloatArray
    """(nodes,) time that a node takes, and that what it waits for is on its way; -1 if it waits for none."""
    offset: IntArray
    """(3 p + 1,) begins of the chains: the ranks, their engines out, and their engines in."""
    of_action: IntArray
    """(n,) the node of every action."""


def with_copies(problem: Problem, orders: Orders, duration: FloatArray, latency: FloatArray) -> Nodes:
    """The nodes of an order; ``duration`` and ``latency`` (n,) are those of its actions.

    Raises :class:`InvalidPlan` when the problem has no copies, or an entry is not where it may be.
    """
    if problem.copies is None:
        raise InvalidPlan("found a copy to the host; the problem states no costs.offload, so it has none.")
    rows, begins = orders.entries()
    is_action = rows[:, 1] < O
    takes, arrives = np.zeros(len(rows)), np.full(len(rows), -1.0)
    takes[is_action], arrives[is_action] = duration, latency
    is_first = np.zeros(len(rows), np.bool_)
    if orders.paired is not None:
        is_first[is_action] = orders.paired
    copying = np.array([problem.copies.offload, problem.copies.reload])
    source, taken, late, offset, node, wrong = _expand(
        rows, begins, takes, arrives, is_first, copying, problem.microbatches
    )
    if wrong >= 0:
        stage, letter, microbatch = rows[wrong].tolist()
        rule = (
            "an action needs what is before it, on the device"
            if letter < O
            else "O, D and R follow the F in this order, and precede the I or B"
        )
        raise InvalidPlan(f"stage {stage} microbatch {microbatch} has an entry out of place; {rule}.")
    return Nodes(source, taken, late, offset, node[is_action])


@compiled
def _expand(
    rows: IntArray,
    begins: IntArray,
    takes: FloatArray,
    arrives: FloatArray,
    is_first: IntArray,
    copying: FloatArray,
    m: int,
) -> tuple[IntArray, FloatArray, FloatArray, IntArray, IntArray, int]:  # pragma: no cover - compiled
    """The fields of :class:`Nodes`, with the node of every entry, and the first entry out of place, or -1."""
    n, p, n_stages = len(rows), len(begins) - 1, copying.shape[1]
    node, offset = np.full(n, NONE), np.zeros(3 * p + 1, np.int64)
    wrong = _number(rows, begins, m, n_stages, node, offset)
    nodes = offset[3 * p]
    source, duration, latency = np.full(nodes, np.int32(NONE)), np.zeros(nodes), np.full(nodes, -1.0)
    if wrong >= 0:
        return source, duration, latency, offset, node, wrong
    cells = n_stages * m
    made, copy = np.full(2 * cells, NONE), np.full(2 * cells, NONE)
    for rank in range(p):
        engine_out, engine_in, last = offset[p + rank], offset[2 * p + rank], NONE
        for at in range(begins[rank], begins[rank + 1]):
            stage, letter = rows[at, 0], rows[at, 1]
            cell = stage * m + rows[at, 2]
            if letter == O:
                source[engine_out], latency[engine_out] = last, 0.0
                duration[engine_out], copy[cell] = copying[0, stage], engine_out
                engine_out += 1
            elif letter == R:
                source[engine_in], latency[engine_in] = last, 0.0
                duration[engine_in], copy[cells + cell] = copying[1, stage], engine_in
                engine_in += 1
            else:
                last = node[at]
                if letter == D:
                    source[last], latency[last] = copy[cell], 0.0
                    continue
                duration[last], latency[last] = takes[at], arrives[at]
                # What a pair makes is there when its second action ends.
                if letter == F:
                    made[cell] = node[at + 1] if is_first[at] else last
                elif letter in (I, B):
                    made[cells + cell] = last
                    if copy[cells + cell] >= 0:
                        source[last - 1], latency[last - 1] = copy[cells + cell], 0.0
    for at in range(n):
        if arrives[at] >= 0:
            is_forward, cell = rows[at, 1] == F, rows[at, 0] * m + rows[at, 2]
            feed = made[cell - m] if is_forward else made[cells + cell + m]
            # What nobody makes is waited for forever.
            source[node[at]] = feed if feed >= 0 else node[at]
    return source, duration, latency, offset, node, NONE


@compiled
def _number(
    rows: IntArray, begins: IntArray, m: int, n_stages: int, node: IntArray, offset: IntArray
) -> int:  # pragma: no cover - compiled
    """Number the nodes, chain by chain; returns the first entry out of place, or -1."""
    p, count = len(begins) - 1, 0
    engines = np.zeros((2, p), np.int64)
    done = np.full(n_stages * m, NONE)  # the letter of the last entry of every cell
    for rank in range(p):
        offset[rank] = count
        for at in range(begins[rank], begins[rank + 1]):
            letter, cell = rows[at, 1], rows[at, 0] * m + rows[at, 2]
            before = done[cell]
            done[cell] = letter
            if letter == F:
                is_right = before == NONE
            elif letter in (I, B):
                is_right = before in (F, R)
                count += before == R  # the wait for the copy in
            elif letter == O:
                is_right = before == F
                engines[0, rank] += 1
            elif letter == D:
                is_right = before == O
            elif letter == R:
                is_right = before == D
                engines[1, rank] += 1
            else:
                is_right = before == I
            if not is_right:
                return at
            if letter != O and letter != R:
                node[at] = count
                count += 1
    offset[p] = count
    for way in range(2):
        for rank in range(p):
            count += engines[way, rank]
            offset[p + way * p + rank + 1] = count
    return NONE


@compiled
def run_nodes(
    nodes: Nodes,
) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:  # pragma: no cover - compiled
    """Start, end and runs of the nodes, and the index at which every chain stopped.

    As in :func:`~.start_times.execute`: a chain runs until an input is missing, and is visited again once it
    is there.
    """
    source, offset = nodes.source, nodes.offset
    n, chains = len(source), len(offset) - 1
    start, end, has_ended = np.empty(n), np.empty(n), np.zeros(n, np.bool_)
    # The chain that waits for a node last, and the one that has waited for the same node before it.
    waiting, before = np.full(n, NONE), np.full(chains, NONE)
    runs, n_runs = np.empty((n, 2), np.int32), 0
    reached = offset[:-1].copy()
    queue, head, size = np.arange(chains), 0, chains
    while size > 0:
        chain = queue[head]
        head, size = (head + 1) % chains, size - 1
        at = reached[chain]
        free = end[at - 1] if at > offset[chain] else 0.0
        while at < offset[chain + 1]:
            begin, need = free, source[at]
            if need >= 0:
                if not has_ended[need]:
                    before[chain], waiting[need] = waiting[need], chain
                    break
                begin = max(begin, end[need] + nodes.latency[at])
            free = begin + nodes.duration[at]
            start[at], end[at], has_ended[at] = begin, free, True
            waiter = waiting[at]
            while waiter >= 0:
                queue[(head + size) % chains] = waiter
                size += 1
                waiter = before[waiter]
            at += 1
        if at > reached[chain]:
            runs[n_runs, 0], runs[n_runs, 1] = chain, at
            n_runs += 1
            reached[chain] = at
    return start, end, runs[:n_runs], reached
