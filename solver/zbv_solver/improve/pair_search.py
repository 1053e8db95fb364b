"""Annealing of orders with pairs: actions move along their rank, and pairs form, part and swap partners.

A move changes a stretch of a few slots of one rank (:mod:`.pair_state`). Ends are then repaired as in
:mod:`.order_repair`, until some rank can no longer end early enough. A cycle of waits ends like that, too,
since every round of it makes ends later. Rounds and temperatures are those of :mod:`.annealing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import mean_duration
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.annealing import THREE, WARMEST, window_starts
from zbv_solver.improve.order_repair import SWEEP, pop, push, spread
from zbv_solver.improve.order_state import Queue
from zbv_solver.improve.pair_state import (
    NONE,
    Costs,
    State,
    compute_all,
    compute_tails,
    critical_path,
    duration_at,
    end_at,
    hold_slots,
    index_slots,
    objective_now,
    tail_at,
)
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.timing.start_times import objective_of

REACH = 8
"""Most slots that a move changes, less one."""
CRITICAL_SHARE = 0.9
"""Share of the moves that begin on a critical path."""
SHIFTS, PARTINGS = 0.4, 0.15
"""Shares of moves that shift a slot, and that part a pair; in the others, two slots swap actions."""
PROPOSALS = 40
"""A round ends after this many moves looked at for each move that it may apply."""


class Move(NamedTuple):
    """A move of one rank, and what it changes; kernels write into it."""

    bounds: IntArray
    """(3,) the rank, the first index of the stretch, and how many slots it has."""
    first: IntArray
    second: IntArray
    """(REACH + 1,) the slots of the stretch after the move, or, once it is made, before it."""
    changed: IntArray
    before: FloatArray
    """(actions * 4,) slots whose ends were changed, as rank * L + index, and the ends before."""
    size: IntArray
    """(1,) how many of them."""
    path: IntArray
    """(actions, 2) a critical path, rows (rank, index)."""

    @classmethod
    def of(cls, state: State) -> Move:
        """Arrays for moves of a state."""
        slots = state.first.size
        return cls(
            np.zeros(3, np.int64),
            np.zeros(REACH + 1, np.int64),
            np.zeros(REACH + 1, np.int64),
            np.zeros(4 * slots, np.int64),
            np.zeros(4 * slots),
            np.zeros(1, np.int64),
            np.zeros((slots, 2), np.int64),
        )


def anneal_pairs(
    problem: Problem,
    orders: Orders,
    value: float,
    *,
    rounds: int,
    moves: int,
    factor: float,
    seed: int,
    halt: IntArray,
) -> Iterator[tuple[float, Orders]]:
    """The objective and the best order after each round; they never get worse. All microbatches are equal.

    Parameters are those of :func:`~.annealing.anneal_in_rounds`.
    """
    best = last = orders
    for number in range(rounds):
        of_three = number % THREE
        start = best if of_three == 0 else last
        state = State.of(problem, start)
        kept = State(*(array.copy() for array in state))
        temperature = WARMEST * mean_duration(problem) * (1 - of_three / THREE) * factor
        costs = Costs.of(problem, window_starts(problem, start))
        queue = Queue.of(*state.first.shape)
        _round(costs, state, queue, Move.of(state), kept, moves, temperature, seed + number, halt)
        last, found = state.orders(problem), kept.orders(problem)
        try:
            result, _ = objective_of(problem, found), objective_of(problem, last)
        except InvalidPlan:  # a deadlock of actions that take no time, which no end has shown
            return
        if result < value * (1 - OPTIMAL_GAP):
            value, best = result, found
        yield value, best


@compiled
def _round(
    costs: Costs,
    state: State,
    queue: Queue,
    move: Move,
    kept: State,
    moves: int,
    temperature: float,
    seed: int,
    halt: IntArray,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Apply moves to the state; write the best order into ``kept``.

    Returns the moves applied and looked at.
    """
    np.random.seed(seed)
    p = len(state.length)
    value = compute_all(costs, state)
    spread(queue, value)
    compute_tails(costs, state)
    size = critical_path(costs, state, move.path)
    lowest, applied, looked = value, 0, 0
    while applied < moves and looked < moves * PROPOSALS and not halt[0]:
        looked += 1
        if np.random.random() < CRITICAL_SHARE:
            chosen = np.random.randint(size)
            rank, at = move.path[chosen, 0], move.path[chosen, 1]
        else:
            rank = np.random.randint(p)
            at = np.random.randint(state.length[rank])
        if not _propose(costs, state, move, rank, at) or not _is_allowed(costs, state, move):
            continue
        # Accepting a loss d with probability exp(-d / temperature) is drawing the largest loss accepted.
        if not _make(costs, state, queue, move, value - temperature * np.log(1.0 - np.random.random())):
            continue
        applied += 1
        value = objective_now(costs, state)
        _repair_tails(costs, state, queue, move)
        size = critical_path(costs, state, move.path)
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            for each in range(p):
                for index in range(state.length[each]):
                    kept.first[each, index] = state.first[each, index]
                    kept.second[each, index] = state.second[each, index]
    return applied, looked


@compiled_leaf
def _propose(
    costs: Costs, state: State, move: Move, rank: int, at: int
) -> bool:  # pragma: no cover - compiled
    """Write a random move that begins at a slot; False if there is none."""
    first, second, m = state.first[rank], state.second[rank], costs.m
    one, two = first[at], second[at]
    kind = np.random.random()
    step = 1 if np.random.random() < 0.5 else -1
    most = 1 + np.random.randint(REACH)
    move.bounds[0] = rank
    if one == NONE:
        return False
    if (one // m) % 4 == W or kind < SHIFTS:
        other = at + step * _reach(state, rank, at, step, most, one, two, m)
        _stretch(state, move, rank, at, other)
        _shift(move, at - move.bounds[1], other - move.bounds[1])
        return bool(other != at)
    if two != NONE and kind < SHIFTS + PARTINGS:
        # One of the two goes to an empty slot.
        goes, stays = (one, two) if np.random.random() < 0.5 else (two, one)
        free = at + step
        while 0 <= free < state.length[rank] and first[free] != NONE:
            free += step
        if free < 0 or free >= state.length[rank] or abs(free - at) > REACH:
            return False
        passed = min(_reach(state, rank, at, step, most - 1, goes, NONE, m), abs(free - at) - 1)
        _stretch(state, move, rank, at, free)
        low = move.bounds[1]
        move.first[at - low], move.second[at - low] = stays, NONE
        move.first[free - low] = goes
        _shift(move, free - low, at + step * (passed + 1) - low)
        return True
    other = at + step
    while 0 <= other < state.length[rank] and (first[other] == NONE or (first[other] // m) % 4 == W):
        other += step
    if other < 0 or other >= state.length[rank] or abs(other - at) > REACH:
        return False
    _stretch(state, move, rank, at, other)
    return _swap(move, at - move.bounds[1], other - move.bounds[1], m)


@compiled_leaf
def _reach(
    state: State, rank: int, at: int, step: int, most: int, one: int, two: int, m: int
) -> int:  # pragma: no cover - compiled
    """How many slots two actions of a slot (or one and NONE) may pass in a direction, up to ``most``."""
    for passed in range(most):
        other = at + step * (passed + 1)
        if other < 0 or other >= state.length[rank]:
            return passed
        for mine in (one, two):
            for its in (state.first[rank, other], state.second[rank, other]):
                # Actions of a stage keep their order by letter, and those of a cell theirs.
                if mine != NONE and its != NONE and _is_ordered(mine, its, m):
                    return passed
    return most


@compiled_leaf
def _is_ordered(one: int, other: int, m: int) -> bool:  # pragma: no cover - compiled
    """Whether two actions of a rank keep their order: those of a stage and letter, and those of a cell."""
    code, its = one // m, other // m
    return code == its or (code // 4 == its // 4 and one % m == other % m)


@compiled_leaf
def _stretch(state: State, move: Move, rank: int, at: int, other: int) -> None:  # pragma: no cover - compiled
    """Write the slots from one index to another one, as they are."""
    low, high = min(at, other), max(at, other)
    move.bounds[1], move.bounds[2] = low, high - low + 1
    for index in range(high - low + 1):
        move.first[index], move.second[index] = (
            state.first[rank, low + index],
            state.second[rank, low + index],
        )


@compiled_leaf
def _shift(move: Move, source: int, target: int) -> None:  # pragma: no cover - compiled
    """Move a slot within the stretch; those in between make room."""
    one, two = move.first[source], move.second[source]
    step = 1 if target > source else -1
    index = source
    while index != target:
        move.first[index], move.second[index] = move.first[index + step], move.second[index + step]
        index += step
    move.first[target], move.second[target] = one, two


@compiled_leaf
def _swap(move: Move, at: int, other: int, m: int) -> bool:  # pragma: no cover - compiled
    """Let two slots swap their F's, or their backwards; one of them may become empty."""
    f_at, b_at = _parts(move, at, m)
    f_other, b_other = _parts(move, other, m)
    # Two of one stage and letter keep their order.
    if np.random.random() < 0.5:
        if b_at // m == b_other // m:
            return False
        b_at, b_other = b_other, b_at
    else:
        if f_at // m == f_other // m:
            return False
        f_at, f_other = f_other, f_at
    _put(move, at, f_at, b_at)
    _put(move, other, f_other, b_other)
    return True


@compiled_leaf
def _parts(move: Move, at: int, m: int) -> tuple[int, int]:  # pragma: no cover - compiled
    """The F and the backward of a slot, or NONE."""
    if (move.first[at] // m) % 4 == F:
        return move.first[at], move.second[at]
    return NONE, move.first[at]


@compiled_leaf
def _put(move: Move, at: int, forward: int, backward: int) -> None:  # pragma: no cover - compiled
    move.first[at], move.second[at] = (backward, NONE) if forward == NONE else (forward, backward)


@compiled_leaf
def _is_allowed(costs: Costs, state: State, move: Move) -> bool:  # pragma: no cover - compiled
    """Whether stages and microbatches keep their order of actions, and the rank its limit."""
    rank, low, n = move.bounds
    m = costs.m
    limit, held = costs.limit[rank], state.held[rank, low - 1] if low > 0 else costs.static[rank]
    for index in range(n):
        one, two = move.first[index], move.second[index]
        if two != NONE and one % m == two % m:
            return False
        for action in (one, two):
            if action == NONE:
                continue
            code = action // m
            held += costs.delta[rank, code]
            if held > limit:
                return False
            for later in range(index + 1, n):
                for after in (move.first[later], move.second[later]):
                    if after == NONE:
                        continue
                    if after // m == code and after < action:
                        return False
                    if after % m == action % m and _comes_before(costs, rank, after // m, code):
                        return False
    return True


@compiled_leaf
def _comes_before(costs: Costs, rank: int, one: int, other: int) -> bool:  # pragma: no cover - compiled
    """Whether an action of a microbatch must run before another one of it on the same rank."""
    if other % 4 == W:
        return one % 4 != W and one // 4 == other // 4
    return one % 4 != W and bool(costs.position[rank, one] < costs.position[rank, other])


@compiled_leaf
def _make(
    costs: Costs, state: State, queue: Queue, move: Move, most: float
) -> bool:  # pragma: no cover - compiled
    """Make a move and repair what it changes, unless the objective then exceeds ``most``: False."""
    rank, low, n = move.bounds
    m, slots = costs.m, state.first.shape[1]
    change = 0.0
    for at in range(low, low + n):
        change -= duration_at(costs, state, rank, at)
    _exchange(costs, state, move)
    for at in range(low, low + n):
        change += duration_at(costs, state, rank, at)
    move.size[0] = 0
    is_good = True
    # How long the rank runs after the stretch has not changed.
    after = state.rest[rank, low + n - 1]
    last = state.end[rank, low + n - 1]
    for at in range(low, low + n):
        _note(state, move, rank, at)
        end = end_at(costs, state, rank, at)
        state.end[rank, at] = end
        _pass_on(costs, state, queue, rank, at)
    if state.end[rank, low + n - 1] - costs.release[rank] + after > most:
        is_good = False
    elif state.end[rank, low + n - 1] != last and low + n < state.length[rank]:
        push(queue, state.end[rank, low + n], rank * slots + low + n)
    while queue.size[0] > 0:
        action = pop(queue)
        if not is_good:
            continue  # to empty the queue
        here, at = action // slots, action % slots
        old, end = state.end[here, at], end_at(costs, state, here, at)
        if end == old:
            continue
        if here == rank and low <= at < low + n:
            left = after - costs.release[here]
        else:
            left = max(state.rest[here, at] - costs.release[here], state.tail[here, at])
        if end + left > most or move.size[0] == len(move.changed):
            is_good = False
            continue
        _note(state, move, here, at)
        state.end[here, at] = end
        _pass_on(costs, state, queue, here, at)
        if at + 1 < state.length[here]:
            push(queue, state.end[here, at + 1], action + 1)
    if not is_good:
        _exchange(costs, state, move)
        for number in range(move.size[0] - 1, -1, -1):
            here, at = move.changed[number] // slots, move.changed[number] % slots
            end = move.before[number]
            state.end[here, at] = end
            for each in (state.first[here, at], state.second[here, at]):
                position = NONE if each == NONE else costs.position[here, each // m]
                if position >= 0:
                    state.passed_on[position, each % m] = end
        return False
    hold_slots(costs, state, rank, low, low + n)
    for at in range(low + n - 1, low, -1):
        state.rest[rank, at - 1] = state.rest[rank, at] + duration_at(costs, state, rank, at)
    if change != 0:
        for at in range(low):
            state.rest[rank, at] += change
    return True


@compiled_leaf
def _repair_tails(
    costs: Costs, state: State, queue: Queue, move: Move
) -> None:  # pragma: no cover - compiled
    """Recompute the tails that a move changes, those of its stretch and of what comes before."""
    rank, low, n = move.bounds
    slots = state.first.shape[1]
    for at in range(low + n - 1, low - 1, -1):
        state.tail[rank, at] = tail_at(costs, state, rank, at)
        _ask(costs, state, queue, rank, at)
    if low > 0:
        push(queue, state.tail[rank, low - 1], rank * slots + low - 1)
    most, popped = len(state.length) * state.length[rank] // SWEEP, 0
    while queue.size[0] > 0:
        action = pop(queue)
        popped += 1
        if popped > most:
            continue  # to empty the queue
        here, at = action // slots, action % slots
        value = tail_at(costs, state, here, at)
        if value == state.tail[here, at]:
            continue
        state.tail[here, at] = value
        _ask(costs, state, queue, here, at)
        if at > 0:
            push(queue, state.tail[here, at - 1], action - 1)
    if popped > most:
        compute_tails(costs, state)


@compiled_leaf
def _ask(costs: Costs, state: State, queue: Queue, rank: int, at: int) -> None:  # pragma: no cover - compiled
    """The tail or the place of a slot has changed: that of its inputs must be recomputed."""
    for action in (state.first[rank, at], state.second[rank, at]):
        position = NONE if action == NONE else costs.position[rank, action // costs.m]
        if position > 0:
            host, there = costs.host[position - 1], state.place[position - 1, action % costs.m]
            push(queue, state.tail[host, there], host * state.first.shape[1] + there)


@compiled_leaf
def _exchange(costs: Costs, state: State, move: Move) -> None:  # pragma: no cover - compiled
    """Exchange the slots of the stretch with those of the move."""
    rank, low, n = move.bounds
    for index in range(n):
        one, two = state.first[rank, low + index], state.second[rank, low + index]
        state.first[rank, low + index], state.second[rank, low + index] = (
            move.first[index],
            move.second[index],
        )
        move.first[index], move.second[index] = one, two
    index_slots(costs, state, rank, low, low + n)


@compiled_leaf
def _note(state: State, move: Move, rank: int, at: int) -> None:  # pragma: no cover - compiled
    """Note the end of a slot before it changes."""
    number = move.size[0]
    move.changed[number], move.before[number] = rank * state.first.shape[1] + at, state.end[rank, at]
    move.size[0] = number + 1


@compiled_leaf
def _pass_on(
    costs: Costs, state: State, queue: Queue, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """Store the end of a slot by position; where it changed, the next position's slot must be recomputed."""
    m, value = costs.m, state.end[rank, at]
    for action in (state.first[rank, at], state.second[rank, at]):
        position = NONE if action == NONE else costs.position[rank, action // m]
        if position < 0 or state.passed_on[position, action % m] == value:
            continue
        state.passed_on[position, action % m] = value
        if position + 1 < len(costs.latency):
            host, there = costs.host[position + 1], state.place[position + 1, action % m]
            push(queue, state.end[host, there], host * state.first.shape[1] + there)
