"""Slow, obvious versions of the solver's computations; they share no code with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import inf

from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem

Times = dict[Action, tuple[float, float]]


class Impossible(Exception):
    """The order cannot be executed."""


def simulate(
    problem: Problem,
    orders: Orders,
    iterations: int = 1,
    factors: Callable[[int, Action], tuple[float, float]] = lambda _k, _action: (1.0, 1.0),
) -> list[Times]:
    """Start and end of every action when iterations follow back to back, rank by rank, action by action.

    ``factors`` of an iteration and an action multiply its duration, and the latency of its input.
    """
    ranks = [orders.actions(rank) for rank in range(orders.pp_degree)]
    queue = [[(k, action) for k in range(iterations) for action in actions] for actions in ranks]
    times: list[Times] = [{} for _ in range(iterations)]
    clock = [0.0] * len(ranks)
    position = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, waiting in enumerate(queue):
            while position[rank] < len(waiting):
                k, action = waiting[position[rank]]
                longer, later = factors(k, action)
                ready = _ready(problem, times[k], action, later)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + _duration(problem, action) * longer
                if action in times[k]:
                    raise Impossible(f"{action} twice")
                times[k][action] = (start, clock[rank])
                position[rank] += 1
                progress = True
    if any(position[rank] < len(waiting) for rank, waiting in enumerate(queue)):
        raise Impossible("deadlock")
    return times


def makespan(problem: Problem, orders: Orders) -> float:
    """Last end minus first start."""
    times = simulate(problem, orders)[0].values()
    return max(end for _, end in times) - min(start for start, _ in times)


def reach(problem: Problem, orders: Orders) -> list[list[float]]:
    """D[r][q]: the longest path from rank r's first start to rank q's last end, -inf if there is no path."""
    ranks = [orders.actions(rank) for rank in range(orders.pp_degree)]
    before = {then: first for actions in ranks for first, then in pairwise(actions)}
    executable = list(simulate(problem, orders)[0])
    rows = []
    for actions in ranks:
        end: dict[Action, float] = {}
        for action in executable:
            paths = [0.0] if actions and action == actions[0] else []
            paths += [end[before[action]]] if action in before else []
            paths += [
                end[source] + lag
                for sources, lag in _inputs(problem, action)
                for source in sources
                if source in end
            ]
            end[action] = max(paths, default=-inf) + _duration(problem, action)
        rows.append([end[mine[-1]] if mine else -inf for mine in ranks])
    return rows


def largest_cycle_mean(weight: Sequence[Sequence[float]]) -> float:
    """Karp's theorem (1978), word by word; -inf is no arc."""
    p = len(weight)
    walk = [[0.0] * p]
    for _ in range(p):
        walk.append([max(walk[-1][tail] + weight[tail][head] for tail in range(p)) for head in range(p)])
    return max(
        min((walk[p][node] - walk[k][node]) / (p - k) for k in range(p) if walk[k][node] > -inf)
        for node in range(p)
        if walk[p][node] > -inf
    )


def peak_memory(problem: Problem, orders: Orders) -> list[float]:
    """Most memory held on every rank."""
    memory = problem.memory
    peaks = []
    for rank in range(orders.pp_degree):
        held = peak = memory.static[rank]
        for action in orders.actions(rank):
            delta = {
                "F": memory.forward[action.stage],
                "I": memory.backward_input[action.stage],
                "W": memory.backward_weight[action.stage],
                "B": memory.backward_input[action.stage] + memory.backward_weight[action.stage],
            }[action.letter]
            peak = max(peak, held + max(0.0, delta))
            held += delta
        peaks.append(peak)
    return peaks


def all_orders_of_one_microbatch(problem: Problem) -> Iterator[Orders]:
    """Every order of a V problem with m = 1, fused and split."""
    choices = [list(_rank_orders(*stages)) for stages in problem.placement.stages_of]
    for ranks in product(*choices):
        yield Orders.from_actions(ranks)


def _rank_orders(down: int, up: int) -> Iterator[list[Action]]:
    """The orders of one rank: F, F, backward, backward, with each W anywhere after its I."""
    for early, late in product("IB", repeat=2):
        chain = [
            Action(down, "F", 0),
            Action(up, "F", 0),
            Action(up, early, 0),
            Action(down, late, 0),
        ]
        orders = [chain]
        if late == "I":
            orders = [[*order, Action(down, "W", 0)] for order in orders]
        if early == "I":
            orders = [
                [*order[:at], Action(up, "W", 0), *order[at:]]
                for order in orders
                for at in range(3, len(order) + 1)
            ]
        yield from orders


def _duration(problem: Problem, action: Action) -> float:
    costs, s = problem.costs, action.stage
    return {
        "F": costs.forward[s],
        "I": costs.backward_input[s],
        "W": costs.backward_weight[s],
        "B": costs.fused(s),
    }[action.letter]


def _ready(problem: Problem, times: Times, action: Action, later: float) -> float | None:
    """When an action's inputs are there, or None while one is missing."""
    ready = 0.0
    for alternatives, lag in _inputs(problem, action):
        done = [times[action][1] for action in alternatives if action in times]
        if not done:
            return None
        ready = max(ready, done[0] + lag * later)
    return ready


def _inputs(problem: Problem, action: Action) -> list[tuple[list[Action], float]]:
    """What an action needs: of each group one, and the transfer from there."""
    stage, letter, j = action
    needs: list[tuple[list[Action], float]] = []
    if letter == "F" and stage > 0:
        needs.append(([Action(stage - 1, "F", j)], _transfer(problem, stage - 1)))
    if letter in "IB":
        needs.append(([Action(stage, "F", j)], 0.0))
        if stage + 1 < problem.n_stages:
            above = [Action(stage + 1, "I", j), Action(stage + 1, "B", j)]
            needs.append((above, _transfer(problem, stage)))
    if letter == "W":
        needs.append(([Action(stage, "I", j)], 0.0))
    return needs


def _transfer(problem: Problem, boundary: int) -> float:
    rank_of = problem.placement.rank_of
    return 0.0 if rank_of[boundary] == rank_of[boundary + 1] else problem.costs.p2p[boundary]


def is_monotone(values: list[float]) -> bool:
    """Whether values never rise."""
    return all(later <= earlier for earlier, later in pairwise(values))
