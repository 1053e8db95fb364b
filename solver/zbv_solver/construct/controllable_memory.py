"""V-half and V-min: V schedules that hold a half and a third of 1F1B's activations.

After Qi et al., "Pipeline Parallelism with Controllable Memory" (NeurIPS 2024, arXiv 2405.15362). Their
*building block* says when one microbatch has its F's and I's on every rank, in units of one action, and is
repeated every six units (section 3, appendix A; `zbv_greedy.py` of sail-sg/zero-bubble has the offsets). It
decides how much memory the schedule holds, and the two free units of every six are for the W's. Then every
action runs as early as the memory of the repeated block allows, and W's fill the idle time: section 3.3 calls
this squeezing and reordering. The order is for equal durations of F, I and W, whatever those of the problem.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.arrays import IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.problem import F, I, W

PERIOD = 6
"""Units after which the block repeats: F, I and W of both chunks."""


def v_half(p: int, m: int) -> list[IntArray]:
    """The rows (6m, 3) of every rank; they hold 2 ⌊p/2⌋ + 2 forwards of a chunk, of 1F1B's 2p."""
    rank = np.arange(p)
    pause = 3 * (p % 2 == 0)
    block = (2 * rank, 3 * p - rank - 2, 3 * p + pause + 2 * rank - 1, 6 * p + pause - rank - 2)
    return _squeezed(m, np.stack(block, axis=1), 2 * (p // 2) + 2)


def v_min(p: int, m: int) -> list[IntArray]:
    """The rows (6m, 3) of every rank; they hold 2 ⌈(p - 1)/3⌉ + 2 forwards of a chunk, of 1F1B's 2p."""
    rank = np.arange(p)
    pause = 2 * (p % 3 == 0)
    block = (rank, 2 * p - rank - 1, 2 * p + pause + rank, 4 * p + pause - rank - 1)
    return _squeezed(m, np.stack(block, axis=1), 2 * -(-(p - 1) // 3) + 2)


def _squeezed(m: int, block: IntArray, most: int) -> list[IntArray]:
    """The orders of a block (p, 4), which has times of F and f, then of the I's of f and F."""
    found = []
    for is_strict in (False, True):
        rows = np.zeros((len(block), PERIOD * m, 3), dtype=np.int32)
        found.append((_run(m, block.astype(np.int64), most, is_strict, rows), rows))
    return list(min(found, key=lambda each: each[0])[1])


@compiled
def _run(m: int, block: IntArray, most: int, is_strict: bool, rows: IntArray) -> int:
    """Unit by unit, every rank takes the action that is first in the block and may run, or else a W.

    The four kinds of actions are F, f, the I of f, and the I of F. An action is ahead of its turn if others
    come before it in the block. If strict, actions are ahead only in the warm-up and the end, as published.
    Returns the longest time between a rank's first and last action.
    """
    p = len(block)
    made, ready = np.zeros((p, 4), np.int64), np.zeros((p, 4), np.int64)  # now, and before the unit
    waiting = np.zeros((p, 2 * m, 2), np.int64)  # stages and microbatches of I's, in their order
    weights, length = np.zeros(p, np.int64), np.zeros(p, np.int64)
    begin, end = np.zeros(p, np.int64), np.zeros(p, np.int64)
    unit, left = 0, PERIOD * p * m
    while left > 0:
        ready[:] = made
        keeps_turns = is_strict and ready[0, 3] > 0 and ready[0, 0] < m
        for rank in range(p):
            kind = _next_kind(block, made, ready, weights, rank, m, most, keeps_turns)
            at = length[rank]
            if kind >= 0:
                stage, microbatch = rank if kind == 0 or kind == 3 else 2 * p - 1 - rank, made[rank, kind]
                rows[rank, at] = stage, F if kind < 2 else I, microbatch
                if kind >= 2:
                    waiting[rank, made[rank, 2] + made[rank, 3]] = stage, microbatch
                made[rank, kind] += 1
            elif weights[rank] < ready[rank, 2] + ready[rank, 3]:
                stage, microbatch = waiting[rank, weights[rank]]
                rows[rank, at] = stage, W, microbatch
                weights[rank] += 1
            else:
                continue
            begin[rank], end[rank] = unit if at == 0 else begin[rank], unit
            length[rank] += 1
            left -= 1
        unit += 1
    return int((end - begin).max())


@compiled
def _next_kind(
    block: IntArray,
    made: IntArray,
    ready: IntArray,
    weights: IntArray,
    rank: int,
    m: int,
    most: int,
    keeps_turns: bool,
) -> int:
    """The kind of action that a rank may run and that is first in the block; -1 if there is none."""
    chosen, first, own = -1, 0, made[rank]
    least = PERIOD * m + block[rank].max()
    for kind in range(4):
        if own[kind] < m:
            least = min(least, block[rank, kind] + PERIOD * own[kind])
    for kind in range(4):
        turn = block[rank, kind] + PERIOD * own[kind]
        if own[kind] >= m or (chosen >= 0 and turn > first) or (keeps_turns and turn > least):
            continue
        # F comes down the V and f goes back up; the I of f comes down, and the I of F goes back up.
        before = rank - 1 if kind == 0 or kind == 2 else rank + 1
        if before == len(block):
            has_input = ready[rank, kind - 1] > own[kind]
        else:
            has_input = before < 0 or ready[before, kind] > own[kind]
        if kind == 2:
            has_input = has_input and ready[rank, 1] > own[2]
        if kind == 3:
            has_input = has_input and ready[rank, 2] > own[3]
        held = own[0] + own[1] - weights[rank]
        if has_input and (kind >= 2 or (held < most and _has_room(block[rank], own, kind, turn, most))):
            chosen, first = kind, turn
    return chosen


@compiled
def _has_room(block: IntArray, made: IntArray, kind: int, turn: int, most: int) -> bool:
    """Whether all that comes before a forward in the block has enough memory after it, too.

    Otherwise ranks could wait for each other's memory. W's of finished I's can always run first.
    """
    done = made.copy()
    inside = made[0] + made[1] - made[2] - made[3] + 1
    while inside <= most:
        first, at = -1, turn
        for each in range(4):
            when = block[each] + PERIOD * done[each]
            if when < at:
                first, at = each, when
        if first < 0:
            return True
        inside += 1 if first < 2 else -1
        done[first] += 1
    return False
