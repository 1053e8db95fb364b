"""An order with pairs as the kernels of a search read and change it: slots, their ends, longest paths.

A *slot* of a rank has a single action, the two actions of a pair, or nothing: a rank has as many slots as
actions. All microbatches are equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import make_tables
from zbv_solver.kernels.jit import ZERO, FloatArray, IntArray, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import pair_duration

NONE = -1
"""In the place of an action: there is none."""


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


@compiled_leaf
def compute_all(costs: Costs, state: State) -> float:  # pragma: no cover - compiled
    """Compute all arrays from an order without deadlock; returns its objective."""
    p, m = len(state.length), costs.m
    for rank in range(p):
        length = state.length[rank]
        index_slots(costs, state, rank, ZERO, length)
        hold_slots(costs, state, rank, ZERO, length)
        state.rest[rank, length - 1] = 0.0
        for at in range(length - 1, 0, -1):
            state.rest[rank, at - 1] = state.rest[rank, at] + duration_at(costs, state, rank, at)
    state.passed_on[:] = np.inf  # while it is not known
    state.cursor[:] = 0
    progress = True
    while progress:
        progress = False
        for turn in range(2 * p):
            rank = min(turn, 2 * p - 1 - turn)  # down the V and up again, as microbatches go
            at = state.cursor[rank]
            while at < state.length[rank]:
                end = end_at(costs, state, rank, at)
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
    return objective_now(costs, state)


@compiled_leaf
def compute_tails(costs: Costs, state: State) -> None:  # pragma: no cover - compiled
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
                    way = state.tail[rank, at + 1] + duration_at(costs, state, rank, at + 1)
                for action in (state.first[rank, at], state.second[rank, at]):
                    after = 0 if action == NONE else costs.position[rank, action // m] + 1
                    if 0 < after < len(costs.latency):
                        host, there = costs.host[after], state.place[after, action % m]
                        if there < state.cursor[host]:
                            way = np.inf
                        else:
                            onward = state.tail[host, there] + duration_at(costs, state, host, there)
                            way = max(way, onward + costs.latency[after])
                if way == np.inf:
                    break
                state.tail[rank, at] = way
                state.cursor[rank] = at
                progress = True


@compiled_leaf
def tail_at(costs: Costs, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The tail of a slot from those of what comes after it."""
    if at + 1 == state.length[rank]:
        way = -costs.release[rank]
    else:
        way = state.tail[rank, at + 1] + duration_at(costs, state, rank, at + 1)
    for action in (state.first[rank, at], state.second[rank, at]):
        after = 0 if action == NONE else costs.position[rank, action // costs.m] + 1
        if 0 < after < len(costs.latency):
            host, there = costs.host[after], state.place[after, action % costs.m]
            onward = state.tail[host, there] + duration_at(costs, state, host, there)
            way = max(way, onward + costs.latency[after])
    return float(way)


@compiled_leaf
def objective_now(costs: Costs, state: State) -> float:  # pragma: no cover - compiled
    """Largest end over the ranks, each counted from its release."""
    largest = -np.inf
    for rank in range(len(state.length)):
        if state.length[rank] > 0:
            largest = max(largest, state.end[rank, state.length[rank] - 1] - costs.release[rank])
    return largest


@compiled_leaf
def index_slots(
    costs: Costs, state: State, rank: int, low: int, until: int
) -> None:  # pragma: no cover - compiled
    """Write where the actions of a rank's slots are."""
    for at in range(low, until):
        for action in (state.first[rank, at], state.second[rank, at]):
            position = NONE if action == NONE else costs.position[rank, action // costs.m]
            if position >= 0:
                state.place[position, action % costs.m] = at


@compiled_leaf
def hold_slots(
    costs: Costs, state: State, rank: int, low: int, until: int
) -> None:  # pragma: no cover - compiled
    """Write what a rank holds after its slots."""
    held = state.held[rank, low - 1] if low > 0 else costs.static[rank]
    for at in range(low, until):
        for action in (state.first[rank, at], state.second[rank, at]):
            if action != NONE:
                held += costs.delta[rank, action // costs.m]
        state.held[rank, at] = held


@compiled_leaf
def duration_at(costs: Costs, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """How long a slot runs."""
    one, two = state.first[rank, at], state.second[rank, at]
    if one == NONE:
        return 0.0
    code = one // costs.m
    return float(costs.duration[rank, code, code if two == NONE else two // costs.m])


@compiled_leaf
def end_at(costs: Costs, state: State, rank: int, at: int) -> float:  # pragma: no cover - compiled
    """The end of a slot from the ends of its inputs."""
    m = costs.m
    clock = state.end[rank, at - 1] if at > 0 else costs.release[rank]
    for action in (state.first[rank, at], state.second[rank, at]):
        position = NONE if action == NONE else costs.position[rank, action // m]
        if position > 0:
            clock = max(clock, state.passed_on[position - 1, action % m] + costs.latency[position])
    return float(clock + duration_at(costs, state, rank, at))


@compiled_leaf
def critical_path(costs: Costs, state: State, path: IntArray) -> int:  # pragma: no cover - compiled
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
