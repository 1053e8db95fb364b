"""Slow, obvious versions of the solver's computations; they share no code with it."""

from __future__ import annotations

from collections import defaultdict
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
    """Start and end of every action and copy when iterations follow back to back, rank by rank, one by one.

    ``factors`` of an iteration and an action multiply its duration, and the latency of its input.
    """
    ranks = [[[*map(Action.parse, text.split("+"))] for text in texts] for texts in orders.all_text()]
    queue = [[(k, entry) for k in range(iterations) for entry in entries] for entries in ranks]
    times: list[Times] = [{} for _ in range(iterations)]
    free: dict[tuple[int, str], float] = defaultdict(float)  # a rank, and its engines for O and R
    position = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, waiting in enumerate(queue):
            while position[rank] < len(waiting):
                k, entry = waiting[position[rank]]
                longer, later = factors(k, entry[0])
                ready = [_ready(problem, times[k], action, later) for action in entry]
                if None in ready:
                    break
                used = rank, entry[0].letter if entry[0].letter in "OR" else ""
                start = max(free[rank, ""], free[used], *(each for each in ready if each is not None))
                free[used] = start + _length(problem, entry) * longer
                for action in entry:
                    if action in times[k]:
                        raise Impossible(f"{action} twice")
                    times[k][action] = (start, free[used])
                position[rank] += 1
                progress = True
    if any(position[rank] < len(waiting) for rank, waiting in enumerate(queue)):
        raise Impossible("deadlock")
    return times


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
                for sources, lag in inputs(problem, action)
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
        chain = [Action(down, "F", 0), Action(up, "F", 0), Action(up, early, 0), Action(down, late, 0)]
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
    costs, copies, s = problem.costs, problem.copies, action.stage
    if action.letter in "ODR":
        assert copies is not None
        return {"O": copies.offload[s], "D": 0.0, "R": copies.reload[s]}[action.letter]
    of_half = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    return costs.fused(s) if action.letter == "B" else of_half[action.letter][s]


def _length(problem: Problem, entry: Sequence[Action]) -> float:
    """How long an action takes, or a pair, whose actions hide each other's communication."""
    alone, hidden = [_duration(problem, action) for action in entry], problem.communication
    if len(entry) == 1:
        return alone[0]
    assert hidden is not None
    by_letter = {"F": hidden.forward, "I": hidden.backward_input, "B": hidden.backward}
    both = sum(by_letter[letter][stage] for stage, letter, _ in entry)
    return problem.pair_factor * max(*alone, sum(alone) - both, both)


def _ready(problem: Problem, times: Times, action: Action, later: float) -> float | None:
    """When an action's inputs are there, or None while one is missing."""
    stage, letter, j = action
    again = Action(stage, "R", j)
    ready = times[again][1] if letter in "IB" and again in times else 0.0
    for alternatives, lag in inputs(problem, action):
        done = [times[each][1] for each in alternatives if each in times]
        if not done:
            return None
        ready = max(ready, done[0] + lag * later)
    return ready


def inputs(problem: Problem, action: Action) -> list[tuple[list[Action], float]]:
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
    if letter in "WD":
        needs.append(([Action(stage, "I" if letter == "W" else "O", j)], 0.0))
    return needs


def _transfer(problem: Problem, boundary: int) -> float:
    rank_of = problem.placement.rank_of
    return 0.0 if rank_of[boundary] == rank_of[boundary + 1] else problem.costs.p2p[boundary]
