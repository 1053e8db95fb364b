"""Annealing of orders with copies to the host: actions move along their rank, and copies come and go.

A move is judged by executing the whole order (:mod:`.copied_order`), which places the copies. What ranks lack
counts against an order, so annealing may begin with one that does not fit. Simulated annealing: Kirkpatrick,
Gelatt and Vecchi 1983.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zbv_solver.construct.tables import mean_duration
from zbv_solver.improve.copied_order import ALL_WANTED, Costs, Lists, Run, execute
from zbv_solver.kernels.jit import FloatArray, compiled_leaf
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of

WARMEST = 0.06
"""The first temperature, in mean durations of an action."""
TOGGLES = 0.15
"""Share of moves that copy an activation, or no longer; the others move an action."""
PRICE = 0.0005
"""What a copy costs, in mean durations of an action: of almost equal orders, the one with fewer is kept."""
REACH = 9
"""Most places that an action moves. Short moves are more frequent, and more are accepted."""


def anneal_copies(
    problem: Problem, orders: Orders, *, rounds: int, moves: int, seed: int
) -> Iterator[tuple[float, Orders]]:
    """The objective and the order of the best one after each round; in the end with the fewest copies.

    Nothing is yielded as long as no order fits. All orders are executable.

    Parameters
    ----------
    moves
        Moves looked at in each round.
    """
    costs, lists = Costs.of(problem), Lists.of(problem, orders)
    run, best, lowest = Run.of(problem, lists), lists.copy(), np.full(1, np.inf)
    warmest, price = WARMEST * mean_duration(problem), PRICE * mean_duration(problem)
    for number in range(rounds):
        warm, cool = (warmest * (1 - (number + more) / rounds) for more in (0, 1))
        anneal(costs, lists, run, best, lowest, moves, warm, cool, price, seed + number)
        if np.isfinite(lowest[0]):
            found = best.copy()
            if number == rounds - 1:
                drop(costs, found, run)
            made = found.orders(problem, orders)
            yield objective_of(problem, made), made


@compiled_leaf
def anneal(
    costs: Costs,
    lists: Lists,
    run: Run,
    best: Lists,
    lowest: FloatArray,
    moves: int,
    warm: float,
    cool: float,
    price: float,
    seed: int,
) -> None:  # pragma: no cover - compiled
    """Apply moves to the lists; write the best that fit and their objective into ``best`` and ``lowest``."""
    np.random.seed(seed)
    value = execute(costs, lists, run) + price * _copies(run)
    _keep(lists, run, best, lowest, value)
    for number in range(moves):
        # Accepting a loss d with probability exp(-d / temperature) is drawing the largest loss accepted.
        temperature = warm + (cool - warm) * number / moves
        most = value - temperature * np.log(1.0 - np.random.random())
        source = np.random.randint(len(lists.cell))
        target, cell = source, lists.cell[source]
        if np.random.random() < TOGGLES:
            if costs.moved[cell // costs.m] <= 0:
                continue
            lists.copied[cell] = not lists.copied[cell]
        else:
            target = _target(costs, lists, source)
            if target == source:
                continue
            _shift(lists, source, target)
        found = execute(costs, lists, run) + price * _copies(run)
        if found <= most:
            value = found
            _keep(lists, run, best, lowest, value)
        elif target == source:
            lists.copied[cell] = not lists.copied[cell]
        else:
            _shift(lists, target, source)


@compiled_leaf
def _copies(run: Run) -> int:  # pragma: no cover - compiled
    """Number of copied activations."""
    found = 0
    for rank in range(len(run.counts)):
        found += run.counts[rank, ALL_WANTED]
    return found


@compiled_leaf
def drop(costs: Costs, lists: Lists, run: Run) -> None:  # pragma: no cover - compiled
    """Drop every copy without which the order is as short and fits."""
    value = execute(costs, lists, run)
    most = value + ROUNDING * abs(value)
    for cell in range(len(lists.copied)):
        if lists.copied[cell]:
            lists.copied[cell] = False
            if execute(costs, lists, run) > most or run.totals[0] > 0:
                lists.copied[cell] = True


@compiled_leaf
def _keep(
    lists: Lists, run: Run, best: Lists, lowest: FloatArray, value: float
) -> None:  # pragma: no cover - compiled
    """Keep the lists if they fit, and are the best so far."""
    if run.totals[0] > 0 or not value < lowest[0] - ROUNDING * abs(value):
        return
    lowest[0] = value
    for at in range(len(lists.cell)):
        best.letter[at], best.cell[at] = lists.letter[at], lists.cell[at]
    for cell in range(len(lists.copied)):
        best.copied[cell] = lists.copied[cell]


@compiled_leaf
def _target(costs: Costs, lists: Lists, source: int) -> int:  # pragma: no cover - compiled
    """Where an action moves: a few places earlier or later, as far as the rank's own rules allow."""
    rank = 0
    while lists.offset[rank + 1] <= source:
        rank += 1
    step = 1 if np.random.random() < 0.5 else -1
    at, m = source, costs.m
    for _ in range(1 + int((REACH - 1) * np.random.random() ** 2)):
        other = at + step
        if other < lists.offset[rank] or other >= lists.offset[rank + 1]:
            return at
        # Actions of a stage keep their order by letter, and those of a microbatch on it theirs.
        is_same = lists.cell[other] // m == lists.cell[source] // m
        if is_same and (
            lists.cell[other] == lists.cell[source] or lists.letter[other] == lists.letter[source]
        ):
            return at
        at = other
    return at


@compiled_leaf
def _shift(lists: Lists, source: int, target: int) -> None:  # pragma: no cover - compiled
    """Move an action; those in between make room."""
    letter, cell = lists.letter[source], lists.cell[source]
    step, at = 1 if target > source else -1, source
    while at != target:
        lists.letter[at], lists.cell[at] = lists.letter[at + step], lists.cell[at + step]
        at += step
    lists.letter[target], lists.cell[target] = letter, cell
