"""Annealing on the order itself: single actions move a few places along their rank.

Nine out of ten moves start on a critical path. A move is judged only by the ends before and the tails after
the moved stretch (Balas and Vazacopoulos 1998, "Guided local search with shifting bottleneck for job shop
scheduling", section 3). It is applied if the judgement is better, or worse by no more than the temperature
allows. Memory is a prefix sum over the rank and is checked for the stretch only. For a span, the ranks' first
starts are fixed during a round, at the values that attain the exact span of the round's first order.

Usually, all stages keep running the microbatches in one order. In an order where small microbatches overtake
large ones, an action may pass another one of its stage and letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import from_orders
from zbv_solver.construct.tables import Tables, make_tables, swap
from zbv_solver.improve.order_repair import Queue, repair_ends, repair_path, repair_tails, spread
from zbv_solver.improve.order_state import (
    Kept,
    State,
    compute_all,
    critical_path,
    duration_at,
    keep,
    objective,
    sum_memory,
    sweep_ends,
)
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf
from zbv_solver.plans.orders import Orders, in_entry_order
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import objective_of, span_start_times

REACH = 12
"""Most places that one move shifts an action."""
CRITICAL_SHARE = 0.9
ENTRIES, NEAR = 0.02, 4
"""Where microbatches differ: share of moves that swap two of them in the order of entry, and how far apart
these are at most in most of the swaps."""
PROPOSALS = 40
"""A round ends after this many moves looked at for each move that it may apply."""


@dataclass(frozen=True, eq=False)
class Annealed:
    """The result of a round.

    Attributes
    ----------
    orders, value
        The best order and its exact objective.
    last
        The order at the end of the round.
    moves
        Number of moves applied.
    looked
        Number of moves looked at.
    judged
        The best order's objective as the kernel computed it, with the first starts fixed at the beginning of
        the round; at least ``value``.
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
    overtakes: bool = False,
) -> Annealed:
    """One round of moves from an order.

    Parameters
    ----------
    moves
        Number of moves to apply; the time of each grows with the values that it changes
        (:mod:`zbv_solver.improve.order_repair`).
    temperature
        In the problem's time unit.
    halt
        (1,) uint8: another thread sets it to end the round.
    overtakes
        Whether the actions of a stage and letter may pass one another. If not, all stages run the
        microbatches in one order of entry if those of ``orders`` do.
    """
    tables = make_tables(problem, entry=from_orders(orders, problem)[2])
    state = State.of(problem, orders, tables, window_starts(problem, orders))
    best, move, length = Kept.of(state, tables), Move.of(*state.code.shape), state.length
    applied, looked, lowest = _round(
        tables,
        state,
        trial_of(state),
        best,
        Round(moves, temperature, seed, overtakes),
        move,
        np.zeros(1, np.uint8) if halt is None else halt,
    )
    better = best.orders(problem, length)
    last = Kept.of(state, tables).orders(problem, length)
    return Annealed(better, objective_of(problem, better), last, int(applied), int(looked), float(lowest))


def is_overtaking(problem: Problem, orders: Orders) -> bool:
    """Whether some stages run microbatches that differ in another order than the first stage."""
    return not problem.is_equal and in_entry_order(orders, problem.n_stages) != orders


def trial_of(state: State) -> State:
    """A state of the same order with its own ends, to try another order of entry."""
    return state._replace(
        end=np.zeros_like(state.end),
        passed_on=np.zeros_like(state.passed_on),
        cursor=np.zeros_like(state.cursor),
    )


def window_starts(problem: Problem, orders: Orders) -> FloatArray:
    """Releases (p,): 0 for a makespan, the first starts that attain the exact span otherwise."""
    if problem.objective == "makespan":
        return np.zeros(problem.pp_degree)
    starts: FloatArray = span_start_times(problem, orders)[orders.offset[:-1]]
    return starts


class Round(NamedTuple):
    """The parameters of one round; see :func:`anneal`."""

    moves: int
    temperature: float
    seed: int
    overtakes: bool


class Move(NamedTuple):
    """The current move: consecutive actions of a rank, rotated by one; kernels write into it.

    Attributes
    ----------
    bounds
        (2,) index of the first and last action on the rank; equal where nothing can move.
    code, microbatch, tail
        (REACH + 1,) codes and microbatches in the sequence after the move, and the tails before it.
    way
        (REACH + 1,) longest path from each of the moved actions' ends to the objective.
    path
        (actions, 2) the critical path that moves are drawn from, rows (rank, index).
    fresh, queue
        Space for :mod:`zbv_solver.improve.order_repair`.
    """

    bounds: IntArray
    code: IntArray
    microbatch: IntArray
    tail: FloatArray
    way: FloatArray
    path: IntArray
    fresh: IntArray
    queue: Queue

    @classmethod
    def of(cls, ranks: int, most: int) -> Move:
        """Arrays that are large enough for any move of so many ranks with up to ``most`` actions each."""
        reach, actions = REACH + 1, ranks * most
        return cls(
            np.zeros(2, np.int64),
            np.zeros(reach, np.int8),
            np.zeros(reach, np.int64),
            np.zeros(reach),
            np.zeros(reach),
            np.zeros((actions, 2), np.int64),
            np.zeros((actions, 2), np.int64),
            Queue.of(ranks, most),
        )


@compiled_leaf
def _round(
    tables: Tables,
    state: State,
    trial: State,
    best: Kept,
    budget: Round,
    move: Move,
    halt: IntArray,
) -> tuple[int, int, float]:  # pragma: no cover - compiled
    """Move actions of the state; write the best order into ``best``.

    Returns the moves applied, the moves looked at, and the best value. Random numbers are drawn in the same
    order on every machine, so a seed gives the same plan everywhere.
    """
    np.random.seed(budget.seed)
    length, end, release, path = state.length, state.end, state.release, move.path
    compute_all(tables, state)
    value = objective(state)
    spread(move.queue, value)
    size = critical_path(tables, state, path)
    lowest, applied, looked = value, 0, 0
    while applied < budget.moves and looked < budget.moves * PROPOSALS and not halt[0]:
        looked += 1
        if tables.duration.shape[2] > 1 and np.random.random() < ENTRIES:
            if _swap_entries(tables, state, trial, value, budget.temperature):
                value = objective(state)
                size = critical_path(tables, state, path)
                applied += 1
                if value < lowest - ROUNDING * abs(lowest):
                    lowest = value
                    keep(tables, state, best)
            continue
        if np.random.random() < CRITICAL_SHARE:
            chosen = np.random.randint(size)
            rank, at = path[chosen, 0], path[chosen, 1]
        else:
            rank = np.random.randint(len(length))
            at = np.random.randint(length[rank])
        reach = 1 + np.random.randint(REACH)
        earlier = np.random.random() < 0.5
        # From here on, the stretch low..high is rotated by one: ``at`` is its last index if the action moves
        # to an earlier place, and its first index otherwise.
        delimit(tables, state, rank, at, reach if earlier else -reach, budget.overtakes, move.bounds)
        low, high = move.bounds
        if low == high:
            continue
        rotate(state, rank, earlier, move)
        # Accepting a loss d with probability exp(-d / temperature) is drawing the largest loss accepted.
        if _judge(tables, state, rank, move) > value - budget.temperature * np.log(1.0 - np.random.random()):
            continue
        apply_move(tables, state, rank, move)
        bar = end[rank, low - 1] if low > 0 else release[rank]
        latest = repair_ends(tables, state, move.queue, rank, low, high)
        repair_tails(tables, state, move.queue, rank, low, high, move.tail)
        sum_memory(tables, state, rank, low, high)
        size = repair_path(tables, state, path, size, bar, latest, move.fresh)
        value = objective(state)
        applied += 1
        # The tolerance keeps rounding from counting as progress; only real gains copy the order, in
        # O(actions).
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            keep(tables, state, best)
    return applied, looked, lowest


@compiled_leaf
def _swap_entries(
    tables: Tables, state: State, trial: State, value: float, temperature: float
) -> bool:  # pragma: no cover - compiled
    """Swap two microbatches in the order of entry, unless memory or the objective forbids it.

    Every time may change, so all ends are computed afresh, in ``trial``: the same order with other arrays for
    ends. All other values are computed only if the swap is accepted.
    """
    m = len(tables.kind)
    one = np.random.randint(m)
    near = one + np.random.randint(-NEAR, NEAR + 1)
    other = near if 0 <= near < m else np.random.randint(m)
    most = value - temperature * np.log(1.0 - np.random.random())
    if tables.kind[one] == tables.kind[other]:
        return False
    swap(tables, one, other)
    if _fits(tables, state):
        trial.cursor[:] = 0
        sweep_ends(tables, trial)
        if objective(trial) <= most:
            compute_all(tables, state)
            return True
    swap(tables, one, other)
    return False


@compiled_leaf
def _fits(tables: Tables, state: State) -> bool:  # pragma: no cover - compiled
    """Whether every rank keeps its memory limit."""
    for rank in range(len(state.length)):
        held = tables.static[rank]
        for at in range(state.length[rank]):
            held += tables.delta[rank, state.code[rank, at], tables.kind[state.microbatch[rank, at]]]
            if held > tables.limit[rank]:
                return False
    return True


@compiled_leaf
def apply_move(tables: Tables, state: State, rank: int, move: Move) -> None:  # pragma: no cover - compiled
    """Write the rotated stretch, and where its actions are, into the state."""
    low, high = move.bounds
    for step in range(high - low + 1):
        state.code[rank, low + step] = move.code[step]
        state.microbatch[rank, low + step] = move.microbatch[step]
        position = tables.position[rank, move.code[step]]
        if position >= 0:
            state.place[position, move.microbatch[step]] = low + step


@compiled_leaf
def rotate(state: State, rank: int, earlier: bool, move: Move) -> None:  # pragma: no cover - compiled
    """Write into ``move`` the stretch with its last action first, or its first action last."""
    low, high = move.bounds
    n = high - low + 1
    for step in range(n):
        source = low + (step + n - 1) % n if earlier else low + (step + 1) % n
        move.code[step] = state.code[rank, source]
        move.microbatch[step] = state.microbatch[rank, source]
        move.tail[step] = state.tail[rank, source]


@compiled_leaf
def delimit(
    tables: Tables, state: State, rank: int, at: int, reach: int, overtakes: bool, bounds: IntArray
) -> None:  # pragma: no cover - compiled
    """Write the first and last index of the stretch that the action at ``at`` may cross.

    ``reach`` is the number of places to move, positive towards the beginning. The action passes none that it
    needs, none that needs it, and none of the same stage and letter unless it ``overtakes``. Memory fits
    throughout. It passes no action that ends before its own input arrives. So no cycle can arise: if there
    were a path from the passed action to that input, the input would arrive later.
    """
    position, limit, static = tables.position, tables.limit[rank], tables.static[rank]
    code, microbatch, end, held = state.code, state.microbatch, state.end, state.held
    action, k = code[rank, at], microbatch[rank, at]
    change = tables.delta[rank, action, tables.kind[k]]
    here = at
    if reach > 0:
        arrives = _arrives(tables, state, rank, action, k)
        while here > 0 and at - here < reach:
            other = code[rank, here - 1]
            if (
                _needs(position, rank, action, k, other, microbatch[rank, here - 1], overtakes)
                or end[rank, here - 1] <= arrives
            ):
                break
            # A larger amount held affects only the actions that are passed. Memory while an action runs is at
            # most the larger of what is held before and after it. An earlier release needs no check.
            before = held[rank, here - 2] if here > 1 else static
            if change > 0 and max(before, held[rank, here - 1]) + change > limit:
                break
            here -= 1
        while change > 0 and here < at:  # memory for the moved action itself
            before = held[rank, here - 1] if here > 0 else static
            if before + change <= limit:
                break
            here += 1
        bounds[0], bounds[1] = here, at
        return
    while here + 1 < state.length[rank] and here - at < -reach:
        other = code[rank, here + 1]
        if _needs(position, rank, other, microbatch[rank, here + 1], action, k, overtakes):
            break
        if _arrives(tables, state, rank, other, microbatch[rank, here + 1]) >= end[rank, at]:
            break
        # A later release keeps memory held during the actions passed; a later allocation needs no check.
        if change < 0 and max(held[rank, here], held[rank, here + 1]) - change > limit:
            break
        here += 1
    bounds[0], bounds[1] = at, here


@compiled_leaf
def _arrives(
    tables: Tables, state: State, rank: int, action: int, k: int
) -> float:  # pragma: no cover - compiled
    """When the input of an action arrives from the previous position; -inf for a W or the first position."""
    position = tables.position[rank, action]
    if position <= 0:
        return -np.inf
    return float(state.passed_on[position - 1, k] + tables.latency[position, tables.kind[k]])


@compiled_leaf
def _needs(
    positions: IntArray, rank: int, action: int, k: int, other: int, other_k: int, overtakes: bool
) -> bool:  # pragma: no cover - compiled
    """Whether an action must stay after another one of its rank, which it depends on or may not overtake."""
    if action == other:
        return not overtakes
    position, before = positions[rank, action], positions[rank, other]
    if position < 0:  # W after its I
        return before >= 0 and action >> 2 == other >> 2 and other & 3 != F and k == other_k
    if before < 0:
        return False
    return (
        before < position and k == other_k
        if overtakes
        else before == position or (before < position and k == other_k)
    )


@compiled_leaf
def _judge(tables: Tables, state: State, rank: int, move: Move) -> float:  # pragma: no cover - compiled
    """Longest path through the rotated stretch; the path after the move is not longer, so no move is undone.

    The ends before the stretch and the tails after it do not change. A path may also leave the stretch and
    come back to it, but :func:`delimit` keeps it from doing so between the moved action and a passed one. If
    the action moves to an earlier place, the passed actions that such a path comes back to have no longer
    tails than before; if it moves to a later place, the path arrives there no later than before. So the old
    tails and arrivals, which are used here, are large enough.
    """
    tail, duration, latency = state.tail, tables.duration, tables.latency
    (low, high), way = move.bounds, move.way
    n, positions = high - low + 1, len(latency)
    if high + 1 < state.length[rank]:
        after = tail[rank, high + 1] + duration_at(tables, state, rank, high + 1)
    else:
        after = -state.release[rank]
    # Backwards: the longest path from each end to the objective, on this rank or through the next position.
    for step in range(n - 1, -1, -1):
        action, k = move.code[step], move.microbatch[step]
        position, kind = tables.position[rank, action], tables.kind[k]
        if 0 <= position < positions - 1:
            other, there = tables.host[position + 1], state.place[position + 1, k]
            onward = tail[other, there] + duration_at(tables, state, other, there)
            after = max(after, onward + latency[position + 1, kind])
        way[step] = after
        after += duration[rank, action, kind]
    # Forwards: the earliest ends. Their sum with ``way`` is the longest path through each moved action.
    clock = state.end[rank, low - 1] if low > 0 else state.release[rank]
    longest = -np.inf
    for step in range(n):
        action, k = move.code[step], move.microbatch[step]
        clock = max(clock, _arrives(tables, state, rank, action, k))
        clock += duration[rank, action, tables.kind[k]]
        longest = max(longest, clock + way[step])
    return longest
