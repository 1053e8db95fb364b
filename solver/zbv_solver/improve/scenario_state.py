"""An order in many scenarios at once: ends and tails of every action in every scenario, kept up to date.

Like :mod:`zbv_solver.improve.order_state` and :mod:`zbv_solver.improve.order_repair`, but durations and
latencies differ from scenario to scenario (:mod:`zbv_solver.jitter.noise`). The order, and so every index, is
the same in all of them. The scenarios are the last index of every array, so that the innermost loops run over
them and the processor computes several at once. An action is recomputed if it changes in any scenario.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.construct.tables import Tables
from zbv_solver.improve.order_repair import Queue, pop, push
from zbv_solver.improve.order_state import State
from zbv_solver.jitter.noise import Draws
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem


class Scenarios(NamedTuple):
    """Times in N scenarios of a problem with p ranks, 2S positions and m microbatches.

    Attributes
    ----------
    duration
        (p, 4 * chunks, m, N) by rank, code and place in the order of entry.
    latency
        (2S, m, N) of the transfer to a position.
    """

    duration: FloatArray
    latency: FloatArray

    @classmethod
    def of(cls, problem: Problem, tables: Tables, draws: Draws) -> Scenarios:
        """The times with the factors of some draws."""
        n, m, lanes = problem.n_stages, problem.microbatches, draws.rank.shape[-1]
        stages = np.array(problem.placement.stages_of)
        # letter, rank, chunk, microbatch, scenario -> rank, code, microbatch, scenario
        factor = draws.action.reshape(4, n, m, lanes)[:, stages].transpose(1, 2, 0, 3, 4)
        by_code = factor.reshape(len(stages), -1, m, lanes)
        down, up = draws.transfer.reshape(2, n, m, lanes)
        planned = tables.duration[:, :, tables.kind, None]
        # Indexing decides the layout in memory, and kernels are compiled again for every layout.
        return cls(
            np.ascontiguousarray(planned * by_code[:, :, tables.entry] * draws.rank[:, None, None, :]),
            np.ascontiguousarray(
                tables.latency[:, tables.kind, None] * np.concatenate([down, up[::-1]])[:, tables.entry]
            ),
        )


class Ways(NamedTuple):
    """What kernels compute in N scenarios; the order itself is in a :class:`State`.

    Attributes
    ----------
    end, tail
        (p, L, N) earliest end and tail of an action.
    passed_on
        (2S, m, N) end of the k-th action at a position.
    value
        (N,) the objective.
    """

    end: FloatArray
    tail: FloatArray
    passed_on: FloatArray
    value: FloatArray

    @classmethod
    def of(cls, state: State, lanes: int) -> Ways:
        """Arrays for :func:`compute_ways`."""
        shape = (*state.code.shape, lanes)
        return cls(
            np.full(shape, -np.inf),
            np.full(shape, -np.inf),
            np.full((*state.passed_on.shape, lanes), -np.inf),
            np.zeros(lanes),
        )


def by_end(state: State) -> IntArray:
    """The actions, as rank * L + index, by their planned ends; ``state`` is computed."""
    most = state.code.shape[1]
    actions = np.concatenate([rank * most + np.arange(n) for rank, n in enumerate(state.length)])
    return actions[np.argsort(state.end.ravel()[actions], kind="stable")]


@compiled_leaf
def compute_ways(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, queue: Queue, actions: IntArray
) -> None:  # pragma: no cover - compiled
    """Compute all values; ``actions`` comes from :func:`by_end`, and ``state`` has indices and microbatches.

    Actions without a duration may come before their inputs in ``actions``; the repair then corrects them.
    """
    most = state.code.shape[1]
    for step in range(len(actions)):
        rank, at = actions[step] // most, actions[step] % most
        _write_end(tables, scenarios, state, ways, rank, at)
        _pass_on(tables, state, ways, queue, rank, at)
    _settle_ends(tables, scenarios, state, ways, queue)
    for step in range(len(actions) - 1, -1, -1):
        rank, at = actions[step] // most, actions[step] % most
        _write_tail(tables, scenarios, state, ways, rank, at)
        _ask(tables, state, ways, queue, rank, at)
    _settle_tails(tables, scenarios, state, ways, queue)
    _write_values(state, ways)


@compiled_leaf
def repair_ways(
    tables: Tables,
    scenarios: Scenarios,
    state: State,
    ways: Ways,
    queue: Queue,
    rank: int,
    low: int,
    high: int,
) -> None:  # pragma: no cover - compiled
    """Recompute what changes after the stretch low..high of a rank was permuted; ``state`` is up to date."""
    most = state.code.shape[1]
    if high + 1 < state.length[rank]:
        push(queue, ways.end[rank, high + 1, 0], rank * most + high + 1)
    for at in range(low, high + 1):
        _write_end(tables, scenarios, state, ways, rank, at)
        _pass_on(tables, state, ways, queue, rank, at)
    _settle_ends(tables, scenarios, state, ways, queue)
    if low > 0:
        push(queue, ways.tail[rank, low - 1, 0], rank * most + low - 1)
    for at in range(high, low - 1, -1):
        _write_tail(tables, scenarios, state, ways, rank, at)
        _ask(tables, state, ways, queue, rank, at)
    _settle_tails(tables, scenarios, state, ways, queue)
    _write_values(state, ways)


@compiled_leaf
def _settle_ends(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, queue: Queue
) -> None:  # pragma: no cover - compiled
    """Recompute the ends of the actions in the queue, and of all that follow from changes."""
    length, most = state.length, state.code.shape[1]
    while queue.size[0] > 0:
        action = pop(queue)
        rank, at = action // most, action % most
        if _write_end(tables, scenarios, state, ways, rank, at):
            _pass_on(tables, state, ways, queue, rank, at)
            if at + 1 < length[rank]:
                push(queue, ways.end[rank, at + 1, 0], action + 1)


@compiled_leaf
def _settle_tails(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, queue: Queue
) -> None:  # pragma: no cover - compiled
    """Recompute the tails of the actions in the queue, and of all that follow from changes."""
    most = state.code.shape[1]
    while queue.size[0] > 0:
        action = pop(queue)
        rank, at = action // most, action % most
        if _write_tail(tables, scenarios, state, ways, rank, at):
            _ask(tables, state, ways, queue, rank, at)
            if at > 0:
                push(queue, ways.tail[rank, at - 1, 0], action - 1)


@compiled_leaf
def _write_end(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, rank: int, at: int
) -> bool:  # pragma: no cover - compiled
    """Write the ends of an action from the ends of its inputs; returns whether any changed."""
    code, k = state.code[rank, at], state.microbatch[rank, at]
    position, end = tables.position[rank, code], ways.end[rank, at]
    duration, changes = scenarios.duration[rank, code, k], 0
    before = ways.end[rank, max(at - 1, 0)]
    release = state.release[rank]
    if position > 0:
        sent, latency = ways.passed_on[position - 1, k], scenarios.latency[position, k]
        for lane in range(len(end)):
            arrival = sent[lane] + latency[lane]
            clock = before[lane] if at > 0 else release
            value = (clock if clock > arrival else arrival) + duration[lane]
            changes += value != end[lane]
            end[lane] = value
    else:
        for lane in range(len(end)):
            value = (before[lane] if at > 0 else release) + duration[lane]
            changes += value != end[lane]
            end[lane] = value
    return changes > 0


@compiled_leaf
def _pass_on(
    tables: Tables, state: State, ways: Ways, queue: Queue, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """Store ends by position; if any changed, the next position's action must be recomputed."""
    position = tables.position[rank, state.code[rank, at]]
    if position < 0:
        return
    k, changes = state.microbatch[rank, at], 0
    end, passed_on = ways.end[rank, at], ways.passed_on[position, k]
    for lane in range(len(end)):
        changes += end[lane] != passed_on[lane]
        passed_on[lane] = end[lane]
    if changes > 0 and position + 1 < len(tables.host):
        other, there = tables.host[position + 1], state.place[position + 1, k]
        push(queue, ways.end[other, there, 0], other * state.code.shape[1] + there)


@compiled_leaf
def _write_tail(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, rank: int, at: int
) -> bool:  # pragma: no cover - compiled
    """Write the tails of an action from the tails of what follows it; returns whether any changed."""
    tail, changes = ways.tail[rank, at], 0
    is_last = at + 1 == state.length[rank]
    following = at if is_last else at + 1
    onward = ways.tail[rank, following]
    lasts = scenarios.duration[rank, state.code[rank, following], state.microbatch[rank, following]]
    release = state.release[rank]
    after = tables.position[rank, state.code[rank, at]] + 1
    if 0 < after < len(tables.host):
        k = state.microbatch[rank, at]
        other, there = tables.host[after], state.place[after, k]
        further, takes = ways.tail[other, there], scenarios.duration[other, state.code[other, there], k]
        latency = scenarios.latency[after, k]
        for lane in range(len(tail)):
            way = -release if is_last else onward[lane] + lasts[lane]
            longer = further[lane] + takes[lane] + latency[lane]
            value = way if way > longer else longer
            changes += value != tail[lane]
            tail[lane] = value
    else:
        for lane in range(len(tail)):
            value = -release if is_last else onward[lane] + lasts[lane]
            changes += value != tail[lane]
            tail[lane] = value
    return changes > 0


@compiled_leaf
def _ask(
    tables: Tables, state: State, ways: Ways, queue: Queue, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """The tail of an action changed: the previous position's action must be recomputed."""
    position = tables.position[rank, state.code[rank, at]]
    if position > 0:
        other = tables.host[position - 1]
        there = state.place[position - 1, state.microbatch[rank, at]]
        push(queue, ways.tail[other, there, 0], other * state.code.shape[1] + there)


@compiled_leaf
def _write_values(state: State, ways: Ways) -> None:  # pragma: no cover - compiled
    """Write the objective: the largest end over the ranks, each counted from its release."""
    value = ways.value
    for lane in range(len(value)):
        value[lane] = -np.inf
    for rank in range(len(state.length)):
        if state.length[rank] > 0:
            end = ways.end[rank, state.length[rank] - 1]
            for lane in range(len(value)):
                value[lane] = max(value[lane], end[lane] - state.release[rank])


@compiled_leaf
def critical_path_in(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, lane: int, path: IntArray
) -> int:  # pragma: no cover - compiled
    """Write a critical path of a scenario into ``path``, rows (rank, index), last first; return its size."""
    end, length, value = ways.end, state.length, ways.value[lane]
    rounding = OPTIMAL_GAP * abs(value)
    rank, at, size = -1, -1, 0
    for other in range(len(length)):
        last = length[other] - 1
        if last >= 0 and end[other, last, lane] - state.release[other] >= value - rounding:
            rank, at = other, last
    while rank >= 0:
        path[size, 0], path[size, 1] = rank, at
        size += 1
        code, k = state.code[rank, at], state.microbatch[rank, at]
        position = tables.position[rank, code]
        begin = end[rank, at, lane] - scenarios.duration[rank, code, k, lane] - rounding
        if at > 0 and end[rank, at - 1, lane] >= begin:
            at -= 1
        elif (
            position > 0
            and ways.passed_on[position - 1, k, lane] + scenarios.latency[position, k, lane] >= begin
        ):
            rank, at = tables.host[position - 1], state.place[position - 1, k]
        else:
            rank = -1
    return size
