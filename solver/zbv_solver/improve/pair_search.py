"""Annealing of orders with pairs: actions move along their rank, and pairs form, part and swap partners.

A *slot* of a rank has a single action, the two actions of a pair, or nothing: a rank has as many slots as
actions. A move changes a stretch of a few slots of one rank. Ends are then repaired as in
:mod:`.order_repair`, until some rank can no longer end early enough. A cycle of waits ends like that, too,
since every round of it makes ends later. Rounds and temperatures are those of :mod:`.annealing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import make_tables, mean_duration
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.annealing import THREE, WARMEST, window_starts
from zbv_solver.improve.order_repair import pop, push, spread
from zbv_solver.improve.order_state import Queue
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.problem.stages import pair_duration
from zbv_solver.timing.start_times import objective_of

REACH = 8
"""Most slots that a move changes, less one."""
CRITICAL_SHARE = 0.9
"""Share of the moves that begin on a critical path."""
SHIFTS, PARTINGS = 0.4, 0.15
"""Shares of moves that shift a slot, and that part a pair; in the others, two slots swap actions."""
PROPOSALS = 40
"""A round ends after this many moves looked at for each move that it may apply."""
STALE = 4
"""Moves until tails and the critical path are computed again though the objective has not changed. With 32, a
round reaches orders that are 1 % longer; with 1, it takes three times as long for no gain."""
NONE = -1


class Costs(NamedTuple):
    """The numbers of a problem with equal microbatches; see :class:`~zbv_solver.construct.tables.Tables`."""

    position: IntArray
    """(p, codes)"""
    duration: FloatArray
    """(p, codes, codes): of the pair of an F and a backward, and on the diagonal of a single action."""
    delta: FloatArray
    """(p, codes)"""
    latency: FloatArray
    host: IntArray
    """(2S,)"""
    static: FloatArray
    limit: FloatArray
    release: FloatArray
    """(p,) memory that a rank always holds, its limit, and its earliest start, from which its time counts."""
    m: int

    @classmethod
    def of(cls, problem: Problem, release: FloatArray) -> Costs:
        """The costs of a problem whose ranks start at ``release`` (p,)."""
        tables, arrays = make_tables(problem), problem.arrays
        stages = np.array(problem.placement.stages_of)
        alone = tables.duration[:, :, 0]
        stage, letter = np.repeat(stages, 4, axis=1), np.tile(np.arange(4), stages.shape[1])
        hidden = (
            np.zeros_like(alone) if arrays.communication is None else arrays.communication[letter, stage, 0]
        )
        both = (hidden[:, :, None], hidden[:, None, :])
        duration = pair_duration(alone[:, :, None], alone[:, None, :], both, problem.pair_factor)
        codes = np.arange(alone.shape[1])
        duration[:, codes, codes] = alone
        return cls(
            tables.position,
            np.ascontiguousarray(duration),
            np.ascontiguousarray(tables.delta[:, :, 0]),
            np.ascontiguousarray(tables.latency[:, 0]),
            tables.host,
            tables.static,
            tables.limit,
            release,
            problem.microbatches,
        )


class State(NamedTuple):
    """An order of p ranks with up to L slots each; kernels write into it."""

    first: IntArray
    second: IntArray
    """(p, L) the actions of a slot: code * m + microbatch, or NONE; the F of a pair is its first."""
    length: IntArray
    """(p,) slots of a rank."""
    end: FloatArray
    held: FloatArray
    rest: FloatArray
    tail: FloatArray
    """(p, L) when a slot ends; what the rank holds then; how long all later slots of the rank run; and the
    longest path from its end to the objective, as it was some moves ago."""
    place: IntArray
    passed_on: FloatArray
    """(2S, m) index of the slot on its rank, and end, of a microbatch's action at a position."""
    cursor: IntArray
    """(p,) how far a sweep has come on a rank."""

    @classmethod
    def of(cls, problem: Problem, orders: Orders) -> State:
        """The state of an order, without times."""
        p, m = problem.pp_degree, problem.microbatches
        chunk_of = np.zeros(problem.n_stages, np.int64)
        for stages in problem.placement.stages_of:
            chunk_of[list(stages)] = np.arange(len(stages))
        action = (chunk_of[orders.stage] * 4 + orders.letter) * m + orders.microbatch
        is_pair = np.zeros(len(orders), np.bool_) if orders.paired is None else orders.paired
        length = np.diff(orders.offset).astype(np.int64)
        first, second = (np.full((p, length.max()), NONE, np.int64) for _ in range(2))
        for rank in range(p):
            part = orders.slice_of(rank)
            pairs = np.flatnonzero(is_pair[part])
            first[rank, : length[rank]] = action[part]
            second[rank, pairs] = action[part][pairs + 1]
            first[rank, pairs + 1] = NONE
        chain = (2 * problem.n_stages, m)
        return cls(
            first=first,
            second=second,
            length=length,
            end=np.zeros(first.shape),
            held=np.zeros(first.shape),
            rest=np.zeros(first.shape),
            tail=np.zeros(first.shape),
            place=np.zeros(chain, np.int64),
            passed_on=np.zeros(chain),
            cursor=np.zeros(p, np.int64),
        )

    def orders(self, problem: Problem) -> Orders:
        """The order."""
        rows, paired, m = [], [], problem.microbatches
        for rank, stages in enumerate(problem.placement.stages_of):
            both = np.stack([self.first[rank], self.second[rank]], axis=1)[: self.length[rank]]
            is_pair = np.stack([both[:, 1] != NONE, np.zeros(len(both), np.bool_)], axis=1)
            action, is_there = both.ravel(), both.ravel() != NONE
            code, microbatch = np.divmod(action[is_there], m)
            rows.append(
                np.stack([np.array(stages)[code // 4], code % 4, microbatch], axis=1).astype(np.int32)
            )
            paired.append(is_pair.ravel()[is_there])
        flags = np.concatenate(paired)
        return replace(Orders.of_rows(rows), paired=flags if flags.any() else None)


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
    value = _compute_all(costs, state)
    spread(queue, value)
    _compute_tails(costs, state)
    size = _critical_path(costs, state, move.path)
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
        before, value = value, _objective(costs, state)
        if value != before or applied % STALE == 0:
            _compute_tails(costs, state)
            size = _critical_path(costs, state, move.path)
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            for each in range(p):
                for index in range(state.length[each]):
                    kept.first[each, index] = state.first[each, index]
                    kept.second[each, index] = state.second[each, index]
    return applied, looked


@compiled_leaf
def _compute_all(costs: Costs, state: State) -> float:  # pragma: no cover - compiled
    """Compute all arrays from an order without deadlock; returns its objective."""
    p, m = len(state.length), costs.m
    for rank in range(p):
        length = state.length[rank]
        _index(costs, state, rank, ZERO, length)
        _hold(costs, state, rank, ZERO, length)
        state.rest[rank, length - 1] = 0.0
        for at in range(length - 1, 0, -1):
            state.rest[rank, at - 1] = state.rest[rank, at] + _duration(costs, state, rank, at)
    state.passed_on[:] = np.inf  # while it is not known
    state.cursor[:] = 0
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # down the V and up again, as microbatches go
            at = state.cursor[rank]
            while at < state.length[rank]:
                end = _end(costs, state, rank, at)
                if end == np.inf:
                    break
                state.end[rank, at] = end
                for action in (state.first[rank, at], state.second[rank, at]):
                    position = NONE if action == NONE else costs.position[rank, action // m]
                    if position >= 0:
                        state.passed_on[position, action % m] = end
                at += 1
                progress = True
            state.cursor[rank] = at
    return _objective(costs, state)


@compiled_leaf
def _compute_tails(costs: Costs, state: State) -> None:  # pragma: no cover - compiled
    """Compute the tails from the order."""
    p, m = len(state.length), costs.m
    for rank in range(p):
        state.cursor[rank] = state.length[rank]
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)
            while state.cursor[rank] > 0:
                at = state.cursor[rank] - 1
                if at + 1 == state.length[rank]:
                    way = -costs.release[rank]
                else:
                    way = state.tail[rank, at + 1] + _duration(costs, state, rank, at + 1)
                for action in (state.first[rank, at], state.second[rank, at]):
                    after = 0 if action == NONE else costs.position[rank, action // m] + 1
                    if 0 < after < len(costs.latency):
                        host, there = costs.host[after], state.place[after, action % m]
                        if there < state.cursor[host]:
                            way = np.inf
                        else:
                            onward = state.tail[host, there] + _duration(costs, state, host, there)
                            way = max(way, onward + costs.latency[after])
                if way == np.inf:
                    break
                state.tail[rank, at] = way
                state.cursor[rank] = at
                progress = True


@compiled_leaf
def _objective(costs: Costs, state: State) -> float:  # pragma: no cover - compiled
    """Largest end over the ranks, each counted from its release."""
    largest = -np.inf
    for rank in range(len(state.length)):
        if state.length[rank] > 0:
            largest = max(largest, state.end[rank, state.length[rank] - 1] - costs.release[rank])
    return largest


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
        change -= _duration(costs, state, rank, at)
    _exchange(costs, state, move)
    for at in range(low, low + n):
        change += _duration(costs, state, rank, at)
    move.size[0] = 0
    is_good = True
    # How long the rank runs after the stretch has not changed.
    after = state.rest[rank, low + n - 1]
    last = state.end[rank, low + n - 1]
    for at in range(low, low + n):
        _note(state, move, rank, at)
        end = _end(costs, state, rank, at)
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
        old, end = state.end[here, at], _end(costs, state, here, at)
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
    _hold(costs, state, rank, low, low + n)
    for at in range(low + n - 1, low, -1):
        state.rest[rank, at - 1] = state.rest[rank, at] + _duration(costs, state, rank, at)
    if change != 0:
        for at in range(low):
            state.rest[rank, at] += change
    return True


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
    _index(costs, state, rank, low, low + n)


@compiled_leaf
def _note(state: State, move: Move, rank: int, at: int) -> None:  # pragma: no cover - compiled
    """Note the end of a slot before it changes."""
    number = move.size[0]
    move.changed[number], move.before[number] = rank * state.first.shape[1] + at, state.end[rank, at]
    move.size[0] = number + 1


@compiled_leaf
def _index(
    costs: Costs, state: State, rank: int, low: int, until: int
) -> None:  # pragma: no cover - compiled
    """Write where the actions of a rank's slots are."""
    for at in range(low, until):
        for action in (state.first[rank, at], state.second[rank, at]):
            position = NONE if action == NONE else costs.position[rank, action // costs.m]
            if position >= 0:
                state.place[position, action % costs.m] = at


@compiled_leaf
def _hold(costs: Costs, state: State, rank: int, low: int, until: int) -> None:  # pragma: no cover - compiled
    """Write what a rank holds after its slots."""
    held = state.held[rank, low - 1] if low > 0 else costs.static[rank]
    for at in range(low, until):
        for action in (state.first[rank, at], state.second[rank, at]):
            if action != NONE:
                held += costs.delta[rank, action // costs.m]
        state.held[rank, at] = held


@compiled_leaf
def _duration(costs: Costs, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    one, two = state.first[rank, at], state.second[rank, at]
    if one == NONE:
        return 0.0
    code = one // costs.m
    return float(costs.duration[rank, code, code if two == NONE else two // costs.m])


@compiled_leaf
def _end(costs: Costs, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The end of a slot from the ends of its inputs."""
    m = costs.m
    clock = state.end[rank, at - 1] if at > 0 else costs.release[rank]
    for action in (state.first[rank, at], state.second[rank, at]):
        position = NONE if action == NONE else costs.position[rank, action // m]
        if position > 0:
            clock = max(clock, state.passed_on[position - 1, action % m] + costs.latency[position])
    return float(clock + _duration(costs, state, rank, at))


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


@compiled_leaf
def _critical_path(costs: Costs, state: State, path: IntArray) -> int:  # pragma: no cover - compiled
    """Write the slots of a longest path, from its end to its beginning; returns how many there are."""
    rank, most = 0, -np.inf
    for each in range(len(state.length)):
        if state.length[each] > 0 and state.end[each, state.length[each] - 1] - costs.release[each] > most:
            rank, most = each, state.end[each, state.length[each] - 1] - costs.release[each]
    at, size = state.length[rank] - 1, 0
    while at >= 0 and size < len(path):  # actions that take no time may form a cycle
        if state.first[rank, at] != NONE:
            path[size, 0], path[size, 1] = rank, at
            size += 1
        latest = state.end[rank, at - 1] if at > 0 else costs.release[rank]
        next_rank, next_at = rank, at - 1
        for action in (state.first[rank, at], state.second[rank, at]):
            position = NONE if action == NONE else costs.position[rank, action // costs.m]
            if position > 0:
                k = action % costs.m
                arrival = state.passed_on[position - 1, k] + costs.latency[position]
                if arrival > latest:
                    latest = arrival
                    next_rank, next_at = costs.host[position - 1], state.place[position - 1, k]
        rank, at = next_rank, next_at
    return size
