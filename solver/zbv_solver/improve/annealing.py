"""Annealing on the order itself: single actions move a few places along their rank.

Moves are drawn from a critical path nine times of ten, judged by heads and tails of the moved stretch alone
(Balas and Vazacopoulos 1998, "Guided local search with shifting bottleneck for job shop scheduling",
section 3), and applied if the judgement is good or, at low temperature, not much worse. Memory is a prefix
sum over the rank and is checked for the stretch only. Of a span, the windows' starts stay where they are
during a round and are put where the exact span has them between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.construct.attempt import from_orders, to_orders
from zbv_solver.construct.tables import FloatArray, IntArray, make_tables
from zbv_solver.improve.order_state import (
    count_before,
    critical_path,
    heads_from,
    memory,
    number,
    number_weights,
    objective,
    sweep_heads,
    sweep_tails,
    tails_from,
)
from zbv_solver.kernels.jit import compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import evaluate, span_start_times

REACH = 12
"""Most places that an action moves at once."""
CRITICAL_SHARE = 0.9
PROPOSALS = 40
"""Moves looked at for every one applied, before a round gives up."""


@dataclass(frozen=True, eq=False)
class Annealed:
    """What a round found.

    Attributes
    ----------
    orders, value
        The best order and its exact objective.
    last
        Where the round stood at its end.
    moves
        Moves applied.
    looked
        Moves looked at.
    judged
        The best order's objective as kept up by repairs, windows' starts as they were: at least ``value``.
    """

    orders: Orders
    value: float
    last: Orders
    moves: int
    looked: int
    judged: float


def anneal(
    problem: Problem,
    orders: Orders,
    *,
    moves: int,
    temperature: float,
    seed: int,
    halt: IntArray | None = None,
) -> Annealed:
    """One round from an order with microbatches in line.

    Parameters
    ----------
    moves
        Moves to apply; every one costs about one pass over the actions.
    temperature
        In the problem's time unit.
    halt
        (1,) uint8: set from another thread to end the round.
    """
    tables = make_tables(problem)
    code, length = from_orders(orders, problem)
    best = code.copy()
    applied, looked, lowest = _round(
        tables.row,
        tables.duration,
        tables.delta,
        tables.lag,
        tables.host,
        tables.static,
        tables.limit,
        tables.microbatches,
        _window_starts(problem, orders),
        code,
        length,
        best,
        moves,
        temperature,
        seed,
        np.zeros(1, np.uint8) if halt is None else halt,
    )
    better = to_orders(best, length, problem)
    timing = evaluate(problem, better)
    value = timing.span if problem.objective == "span" else timing.makespan
    return Annealed(better, value, to_orders(code, length, problem), int(applied), int(looked), float(lowest))


def _window_starts(problem: Problem, orders: Orders) -> FloatArray:
    """Releases (p,): 0 for a makespan, the first starts of the exact span otherwise."""
    if problem.objective == "makespan":
        return np.zeros(problem.pp_degree)
    starts: FloatArray = span_start_times(problem, orders)[orders.offset[:-1]]
    return starts


@compiled
def _round(
    row: IntArray,
    duration: FloatArray,
    delta: FloatArray,
    lag: FloatArray,
    host: IntArray,
    static: FloatArray,
    limit: FloatArray,
    m: int,
    release: FloatArray,
    code: IntArray,
    length: IntArray,
    best: IntArray,
    moves: int,
    temperature: float,
    seed: int,
    halt: IntArray,
) -> tuple[int, int, float]:  # pragma: no cover - compiled
    """Move actions of ``code``, keep the best order in ``best``: moves applied, looked at, its value."""
    np.random.seed(seed)
    p, places, rows = code.shape[0], code.shape[1], len(lag)
    index, place = np.zeros((p, places), np.int64), np.zeros((rows, m), np.int64)
    head, tail = np.zeros((p, places)), np.zeros((p, places))
    held, done = np.zeros((p, places)), np.zeros((rows, m))
    cursor, count = np.zeros(p, np.int64), np.zeros(rows, np.int64)
    path = np.zeros((p * places, 2), np.int64)
    old_code = np.zeros(REACH + 1, np.int8)
    new_code, new_index = np.zeros(REACH + 1, np.int8), np.zeros(REACH + 1, np.int64)
    stretch = np.zeros(2, np.int64)
    # fmt: off
    number(code, length, row, index, place)
    sweep_heads(code, length, row, duration, lag, release, index, place, head, done, cursor, count)
    cursor[:] = length
    count[:] = m
    sweep_tails(code, length, row, duration, lag, host, release, index, place, tail, cursor, count)
    for rank in range(p):
        memory(code, length, delta, static, held, rank)
    value = objective(length, head, release)
    size = critical_path(
        code, length, row, duration, lag, host, release, index, place, head, done, path, value
    )
    lowest, applied, looked = value, 0, 0
    while applied < moves and looked < moves * PROPOSALS and not halt[0]:
        looked += 1
        if np.random.random() < CRITICAL_SHARE:
            chosen = np.random.randint(size)
            rank, at = path[chosen, 0], path[chosen, 1]
        else:
            rank = np.random.randint(p)
            at = np.random.randint(length[rank])
        reach = 1 + np.random.randint(REACH)
        earlier = np.random.random() < 0.5
        _stretch(
            code, length, row, delta, lag, static, limit, index, head, held, done,
            rank, at, reach, earlier, stretch,
        )
        low, high = stretch[0], stretch[1]
        if low == high:
            continue
        _rotated(code, index, rank, low, high, earlier, new_code, new_index)
        judged = _judge(
            code, length, row, duration, lag, host, release, place, head, tail, done,
            rank, low, high, new_code, new_index,
        )
        bar = value - temperature * np.log(1.0 - np.random.random())
        if judged > bar:
            continue
        for step in range(high - low + 1):
            old_code[step] = code[rank, low + step]
            code[rank, low + step] = new_code[step]
        time = head[rank, low - 1] if low > 0 else release[rank]
        heads_from(length, head, time, rank, low, cursor)
        count_before(place, host, cursor, count)
        executable = sweep_heads(
            code, length, row, duration, lag, release, index, place, head, done, cursor, count
        )
        changed = objective(length, head, release)
        applied += 1
        if not executable or changed > max(bar, judged) * (1 + ROUNDING):
            for step in range(high - low + 1):
                code[rank, low + step] = old_code[step]
            number(code, length, row, index, place)
            cursor[:] = 0
            count[:] = 0
            sweep_heads(code, length, row, duration, lag, release, index, place, head, done, cursor, count)
            continue
        value = changed
        number_weights(code, length, row, index, m, rank)
        memory(code, length, delta, static, held, rank)
        if high + 1 < length[rank]:
            way = tail[rank, high + 1] + duration[rank, code[rank, high + 1]]
        else:
            way = -release[rank]
        tails_from(length, tail, way, rank, high, cursor)
        count_before(place, host, cursor, count)
        sweep_tails(code, length, row, duration, lag, host, release, index, place, tail, cursor, count)
        size = critical_path(
            code, length, row, duration, lag, host, release, index, place, head, done, path, value
        )
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            best[:] = code
    # fmt: on
    return applied, looked, lowest


@compiled
def _rotated(
    code: IntArray,
    index: IntArray,
    rank: int,
    low: int,
    high: int,
    earlier: bool,
    new_code: IntArray,
    new_index: IntArray,
) -> None:  # pragma: no cover - compiled
    """The stretch with its last action first, or its first action last."""
    n = high - low + 1
    for step in range(n):
        source = low + (step + n - 1) % n if earlier else low + (step + 1) % n
        new_code[step] = code[rank, source]
        new_index[step] = index[rank, source]


@compiled
def _stretch(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    delta: FloatArray,
    lag: FloatArray,
    static: FloatArray,
    limit: FloatArray,
    index: IntArray,
    head: FloatArray,
    held: FloatArray,
    done: FloatArray,
    rank: int,
    at: int,
    reach: int,
    earlier: bool,
    stretch: IntArray,
) -> None:  # pragma: no cover - compiled
    """How far the action may move: first and last place of the stretch that turns.

    It passes no action that it needs or that needs it, nor one of its own kind; memory fits everywhere; and
    nothing moves ahead of an action that ends before the moved one's input arrives, so no circle can arise
    (a way from that action to the input would make it arrive later).
    """
    action, k, change = code[rank, at], index[rank, at], delta[rank, code[rank, at]]
    here = at
    if earlier:
        arrives = _arrives(row, lag, done, rank, action, k)
        while here > 0 and at - here < reach:
            other = code[rank, here - 1]
            if _needs(row, rank, action, k, other, index[rank, here - 1]) or head[rank, here - 1] <= arrives:
                break
            before = held[rank, here - 2] if here > 1 else static[rank]
            if change > 0 and max(before, held[rank, here - 1]) + change > limit[rank]:
                break
            here -= 1
        while change > 0 and here < at:  # room for the moved action itself
            before = held[rank, here - 1] if here > 0 else static[rank]
            if before + change <= limit[rank]:
                break
            here += 1
        stretch[0], stretch[1] = here, at
        return
    while here + 1 < length[rank] and here - at < reach:
        other = code[rank, here + 1]
        if _needs(row, rank, other, index[rank, here + 1], action, k):
            break
        if _arrives(row, lag, done, rank, other, index[rank, here + 1]) >= head[rank, at]:
            break
        if change < 0 and max(held[rank, here], held[rank, here + 1]) - change > limit[rank]:
            break
        here += 1
    stretch[0], stretch[1] = at, here


@compiled
def _arrives(
    row: IntArray, lag: FloatArray, done: FloatArray, rank: int, action: int, k: int
) -> float:  # pragma: no cover - compiled
    line = row[rank, action]
    return float(done[line - 1, k] + lag[line]) if line > 0 else -np.inf


@compiled
def _needs(
    row: IntArray, rank: int, action: int, k: int, other: int, other_k: int
) -> bool:  # pragma: no cover - compiled
    """Whether an action must stay behind another of its rank: its own kind, or a step before it."""
    if action == other:
        return True
    line, before = row[rank, action], row[rank, other]
    if line < 0:  # W after its I
        return before >= 0 and action >> 2 == other >> 2 and other & 3 != F and k == other_k
    if before < 0:
        return False
    return line == before or (before < line and k == other_k)


@compiled
def _judge(
    code: IntArray,
    length: IntArray,
    row: IntArray,
    duration: FloatArray,
    lag: FloatArray,
    host: IntArray,
    release: FloatArray,
    place: IntArray,
    head: FloatArray,
    tail: FloatArray,
    done: FloatArray,
    rank: int,
    low: int,
    high: int,
    new_code: IntArray,
    new_index: IntArray,
) -> float:  # pragma: no cover - compiled
    """Longest way through the turned stretch, inputs and consumers staying where they are."""
    n, rows = high - low + 1, len(lag)
    way = np.empty(REACH + 1)
    if high + 1 < length[rank]:
        after = tail[rank, high + 1] + duration[rank, code[rank, high + 1]]
    else:
        after = -release[rank]
    for step in range(n - 1, -1, -1):
        action = new_code[step]
        line = row[rank, action]
        if 0 <= line < rows - 1:
            other, there = host[line + 1], place[line + 1, new_index[step]]
            onward = tail[other, there] + duration[other, code[other, there]] + lag[line + 1]
            after = max(after, onward)
        way[step] = after
        after += duration[rank, action]
    clock = head[rank, low - 1] if low > 0 else release[rank]
    longest = -np.inf
    for step in range(n):
        action = new_code[step]
        clock = max(clock, _arrives(row, lag, done, rank, action, new_index[step]))
        clock += duration[rank, action]
        longest = max(longest, clock + way[step])
    return longest
