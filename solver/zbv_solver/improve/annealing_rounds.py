"""Rounds of annealing: in threes of falling temperature, and successive halving of several starts.

How good an order becomes by annealing is hard to tell from its objective before: tuned orders gain ten times
as much as orders of the search for injections. So all are annealed a little, and the best a little more
(successive halving: Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbv_solver.improve.annealing import anneal, is_overtaking
from zbv_solver.kernels.arrays import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem

THREE = 3
"""Rounds until the temperature rises again; the first of them starts from the best order."""
WARMEST = 0.1
"""Temperature in the first of three rounds of annealing, as a share of the mean duration."""
COOLER = 0.3
"""Factor of the temperatures where half of the work is to be done at lower ones."""


class Level(NamedTuple):
    """One step of successive halving.

    Attributes
    ----------
    kept
        Number of orders, the best ones, that are annealed.
    share
        Share of all moves.
    rounds
        Rounds for each of the orders.
    factors
        Factors of the temperature; the orders take turns, the best one takes the first.
    """

    kept: int
    share: float
    rounds: int
    factors: tuple[float, ...]


LEVELS = (
    Level(10, 0.25, THREE, (COOLER,)),
    Level(4, 0.25, 2 * THREE, (COOLER, 1.0)),
    Level(2, 0.5, 4 * THREE, (COOLER, 1.0)),
)


def anneal_in_rounds(
    problem: Problem,
    orders: Orders,
    value: float,
    *,
    rounds: int,
    moves: int,
    factor: float,
    seed: int,
    halt: IntArray | None = None,
) -> Iterator[tuple[float, Orders]]:
    """The objective and the best order after each round; they never get worse.

    Parameters
    ----------
    value
        The objective of ``orders``.
    moves
        Number of moves of each round.
    factor
        Of the temperatures.
    seed
        Different by at least ``rounds`` for different random numbers.
    """
    unit = float(problem.arrays.duration[:3].mean())
    best = last = orders
    overtakes = is_overtaking(problem, orders)
    for number in range(rounds):
        of_three = number % THREE
        result = anneal(
            problem,
            best if of_three == 0 else last,
            moves=moves,
            temperature=WARMEST * unit * (1 - of_three / THREE) * factor,
            seed=seed + number,
            halt=halt,
            overtakes=overtakes,
        )
        last = result.last
        if result.value < value * (1 - OPTIMAL_GAP):
            value, best = result.value, result.orders
        yield value, best
