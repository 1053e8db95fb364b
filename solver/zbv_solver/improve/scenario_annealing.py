"""Annealing of an order in many scenarios: the moves of :mod:`zbv_solver.improve.annealing`, judged in all.

A move starts on a critical path of one scenario, which is drawn after every move. It is judged in every
scenario by the ends before and the tails after the moved stretch, and the judgements count together: by
their mean, or by mean + weight * standard deviation, which is a quantile if they are normally distributed.
(Scenario-based robust scheduling: Kouvelis and Yu 1997, "Robust discrete optimization and its applications".)

For a span, each scenario is one iteration whose ranks begin at the first starts of the exact span. Iterations
in fact follow each other, each with other durations. Their mean differs by about 0.05 %, so orders are ranked
well enough here, but the orders found are compared by full simulations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.attempt import from_orders
from zbv_solver.construct.tables import Tables, make_tables
from zbv_solver.improve.annealing import PROPOSALS, Round, is_overtaking, window_starts
from zbv_solver.improve.moves import REACH, Move, apply_move, delimit, draw, rotate
from zbv_solver.improve.order_repair import spread
from zbv_solver.improve.order_state import Kept, State, compute_all, keep, objective, sum_memory
from zbv_solver.improve.scenario_state import (
    Scenarios,
    Ways,
    by_end,
    compute_ways,
    critical_path_in,
    repair_ways,
)
from zbv_solver.jitter.noise import Draws
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING
from zbv_solver.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class AnnealedInScenarios:
    """The result of a round.

    Attributes
    ----------
    orders, value
        The order with the lowest score in the scenarios, and that score.
    last
        The order at the end of the round.
    first
        The score at the beginning.
    moves, looked
        Number of moves applied, and looked at.
    """

    orders: Orders
    value: float
    last: Orders
    first: float
    moves: int
    looked: int


def anneal_in_scenarios(
    problem: Problem,
    orders: Orders,
    draws: Draws,
    *,
    moves: int,
    temperature: float,
    seed: int,
    weight: float = 0.0,
    halt: IntArray | None = None,
) -> AnnealedInScenarios:
    """One round of moves from an order.

    Parameters
    ----------
    draws
        The factors of the scenarios.
    moves
        Number of moves to apply.
    temperature
        In the problem's time unit.
    weight
        Of the standard deviation over the scenarios, which is added to their mean.
    halt
        (1,) uint8: another thread sets it to end the round.
    """
    tables = make_tables(problem, entry=from_orders(orders, problem)[2])
    state = State.of(problem, orders, tables, window_starts(problem, orders))
    best, length = Kept.of(state, tables), state.length
    compute_all(tables, state)
    scenarios = Scenarios.of(problem, tables, draws)
    lanes = draws.rank.shape[-1]
    space = Space(np.zeros((REACH + 1, lanes)), np.zeros(lanes), np.zeros(lanes), np.zeros(1))
    halt = np.zeros(1, np.uint8) if halt is None else halt
    applied, looked, lowest = _round(
        tables,
        # Arrivals in a scenario stand in `state.passed_on`, so the planned latencies must not be added.
        tables._replace(latency=np.zeros_like(tables.latency)),
        scenarios,
        state,
        Ways.of(state, lanes),
        by_end(state),
        best,
        Round(moves, temperature, seed, overtakes=is_overtaking(problem, orders)),
        weight,
        Move.of(*state.code.shape),
        space,
        halt,
    )
    return AnnealedInScenarios(
        best.orders(problem, length),
        float(lowest),
        Kept.of(state, tables).orders(problem, length),
        float(space.first[0]),
        int(applied),
        int(looked),
    )


class Space(NamedTuple):
    """Space for judging a move in N scenarios; kernels write into it.

    Attributes
    ----------
    way
        (REACH + 1, N) longest path from each of the moved actions' ends to the objective.
    clock, judged
        (N,).
    first
        (1,) the score before the first move.
    """

    way: FloatArray
    clock: FloatArray
    judged: FloatArray
    first: FloatArray


@compiled_leaf
def _round(
    tables: Tables,
    arrived: Tables,
    scenarios: Scenarios,
    state: State,
    ways: Ways,
    actions: IntArray,
    best: Kept,
    budget: Round,
    weight: float,
    move: Move,
    space: Space,
    halt: IntArray,
) -> tuple[int, int, float]:  # pragma: no cover - compiled
    """Move actions of the state, and write the best order into ``best``.

    Returns the moves applied, the moves looked at, and the best score.
    """
    np.random.seed(budget.seed)
    length, path, lanes = state.length, move.path, len(ways.value)
    spread(move.queue, objective(state))
    compute_ways(tables, scenarios, state, ways, move.queue, actions)
    value = _score(ways.value, weight)
    space.first[0] = value
    lane = np.random.randint(lanes)
    size = critical_path_in(tables, scenarios, state, ways, lane, path)
    lowest, applied, looked = value, 0, 0
    while applied < budget.moves and looked < budget.moves * PROPOSALS and not halt[0]:
        looked += 1
        rank, at = draw(path, size, length)
        reach = 1 + np.random.randint(REACH)
        earlier = np.random.random() < 0.5
        _show(tables, scenarios, state, ways, lane, rank, at)
        delimit(arrived, state, rank, at, reach if earlier else -reach, budget.overtakes, move.bounds)
        low, high = move.bounds
        if low == high:
            continue
        rotate(state, rank, earlier, move)
        _judge(tables, scenarios, state, ways, rank, move, space)
        if _score(space.judged, weight) > value - budget.temperature * np.log(1.0 - np.random.random()):
            continue
        apply_move(tables, state, rank, move)
        sum_memory(tables, state, rank, low, high)
        repair_ways(tables, scenarios, state, ways, move.queue, rank, low, high)
        value = _score(ways.value, weight)
        applied += 1
        lane = np.random.randint(lanes)
        size = critical_path_in(tables, scenarios, state, ways, lane, path)
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            keep(tables, state, best)
    return applied, looked, lowest


@compiled_leaf
def _score(value: FloatArray, weight: float) -> float:  # pragma: no cover - compiled
    """The mean of values, plus their standard deviation times a weight."""
    n, total, square = len(value), 0.0, 0.0
    for lane in range(n):
        total += value[lane]
    mean = total / n
    if weight == 0.0:
        return mean
    for lane in range(n):
        square += (value[lane] - mean) ** 2
    return float(mean + weight * np.sqrt(square / n))


@compiled_leaf
def _show(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, lane: int, rank: int, at: int
) -> None:  # pragma: no cover - compiled
    """Write the ends and arrivals of a scenario around an action into the state, for :func:`delimit`."""
    for here in range(max(0, at - REACH), min(state.length[rank], at + REACH + 1)):
        state.end[rank, here] = ways.end[rank, here, lane]
        position = tables.position[rank, state.code[rank, here]]
        if position > 0:
            k = state.microbatch[rank, here]
            arrival = ways.passed_on[position - 1, k, lane] + scenarios.latency[position, k, lane]
            state.passed_on[position - 1, k] = arrival


@compiled_leaf
def _judge(
    tables: Tables, scenarios: Scenarios, state: State, ways: Ways, rank: int, move: Move, space: Space
) -> None:  # pragma: no cover - compiled
    """Write into ``judged`` the longest path through the rotated stretch in every scenario.

    Where no path through the stretch was critical before, the objective stays at least what it was.
    """
    tail, duration, clock, judged = ways.tail, scenarios.duration, space.clock, space.judged
    (low, high), lanes = move.bounds, len(space.clock)
    n, positions, release = high - low + 1, len(tables.latency), state.release[rank]
    # The longest path through the stretch before the move.
    for lane in range(lanes):
        judged[lane] = -np.inf
    for at in range(low, high + 1):
        begun, onward = ways.end[rank, at], tail[rank, at]
        for lane in range(lanes):
            way = begun[lane] + onward[lane]
            judged[lane] = judged[lane] if judged[lane] > way else way
    for lane in range(lanes):
        value = ways.value[lane]
        judged[lane] = value if judged[lane] < value * (1 - OPTIMAL_GAP) else -np.inf
    # Backwards: the longest path from each end to the objective, on this rank or through the next position.
    if high + 1 < state.length[rank]:
        onward = tail[rank, high + 1]
        lasts = duration[rank, state.code[rank, high + 1], state.microbatch[rank, high + 1]]
        for lane in range(lanes):
            clock[lane] = onward[lane] + lasts[lane]
    else:
        for lane in range(lanes):
            clock[lane] = -release
    for step in range(n - 1, -1, -1):
        code, k, mine = move.code[step], move.microbatch[step], space.way[step]
        position, takes = tables.position[rank, code], duration[rank, code, k]
        if 0 <= position < positions - 1:
            other, there = tables.host[position + 1], state.place[position + 1, k]
            onward, lasts = tail[other, there], duration[other, state.code[other, there], k]
            latency = scenarios.latency[position + 1, k]
            for lane in range(lanes):
                way = onward[lane] + lasts[lane] + latency[lane]
                way = way if way > clock[lane] else clock[lane]
                mine[lane] = way
                clock[lane] = way + takes[lane]
        else:
            for lane in range(lanes):
                mine[lane] = clock[lane]
                clock[lane] += takes[lane]
    # Forwards: the earliest ends. Their sums with ``way`` are the longest paths through the moved actions.
    if low > 0:
        begun = ways.end[rank, low - 1]
        for lane in range(lanes):
            clock[lane] = begun[lane]
    else:
        for lane in range(lanes):
            clock[lane] = release
    for step in range(n):
        code, k, mine = move.code[step], move.microbatch[step], space.way[step]
        position, takes = tables.position[rank, code], duration[rank, code, k]
        if position > 0:
            sent, latency = ways.passed_on[position - 1, k], scenarios.latency[position, k]
            for lane in range(lanes):
                arrival = sent[lane] + latency[lane]
                ended = (clock[lane] if clock[lane] > arrival else arrival) + takes[lane]
                clock[lane] = ended
                way = ended + mine[lane]
                judged[lane] = judged[lane] if judged[lane] > way else way
        else:
            for lane in range(lanes):
                ended = clock[lane] + takes[lane]
                clock[lane] = ended
                way = ended + mine[lane]
                judged[lane] = judged[lane] if judged[lane] > way else way
