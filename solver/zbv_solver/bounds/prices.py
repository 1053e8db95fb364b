"""Prices of the time that microbatches spend in the gaps of a rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.bounds.memory_states import MemoryStates
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled
from zbv_solver.problem.numeric import OPTIMAL_GAP as TINY

ROUNDS = 48
"""Microbatches that value iteration looks ahead; more gained nothing in experiments."""
PERIODS = 6
"""Longest period, in microbatches, that value iteration recognises."""


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of a rank's gaps, and what a microbatch costs then: Lemma 39.

    Attributes
    ----------
    price
        (gaps,) per unit of time, such that no state earns more than 1 per unit.
    cost
        Least time less earnings of a microbatch, on average.
    potential
        (N,) per state. An action costs at least the difference of the potentials of its states, plus ``cost``
        if it is an F of chunk 0.
    slope
        Least time of a microbatch: ``cost`` and what its paths earn.
    """

    price: FloatArray
    cost: float
    potential: FloatArray
    slope: float

    @classmethod
    def of(cls, model: MemoryStates, proportions: FloatArray) -> Prices:
        """The highest prices in these proportions: Lemma 39."""
        earned = model.states[:, : len(model.paths)] @ proportions
        most = float(earned.max())
        rate = np.maximum(0.0, 1.0 - earned / most)
        cost, potential = _cheapest(model.follows, model.duration, rate)
        price = proportions / most
        return cls(price, cost, potential, cost + float(price @ model.paths))

    @classmethod
    def best(cls, model: MemoryStates) -> Prices:
        """The prices with the largest slope of a few proportions: Lemma 39.

        Tried are those of the memory that a microbatch holds in a gap, equal prices, and a price for one gap
        alone. Other proportions gained little in experiments.
        """
        gaps = len(model.paths)
        alone = np.eye(gaps)
        rows = [model.amount[:gaps], np.ones(gaps), alone[gaps // 2], alone[int(model.paths.argmax())]]
        different = {tuple(row / row.max()): row for row in rows}
        return max((cls.of(model, row) for row in different.values()), key=lambda each: each.slope)


@compiled
def _cheapest(
    follows: IntArray, duration: FloatArray, rate: FloatArray
) -> tuple[float, FloatArray]:  # pragma: no cover - compiled
    """A bound of the least mean cost of a cycle per F of chunk 0, and potentials that prove it: Lemma 39.

    ``rate`` (N,) is the cost of a state per unit of time.
    """
    n, actions = follows.shape
    kept = PERIODS + 1
    # Row k % kept: the least cost of a path that ends in a state after k F's of chunk 0.
    least = np.zeros((kept, n))
    best, potential = -1.0, np.zeros(n)
    for k in range(1, ROUNDS + 1):
        now, before = least[k % kept], least[(k - 1) % kept]
        now[:] = np.inf
        for s in range(n):
            t = follows[s, 0]
            if t >= 0:
                now[t] = before[s] + duration[0] * rate[t]
        # Other actions lead to later states.
        for s in range(n):
            for a in range(1, actions):
                t = follows[s, a]
                if t >= 0:
                    now[t] = min(now[t], now[s] + duration[a] * rate[t])
        for period in range(1, min(PERIODS, k) + 1):
            old = least[(k - period) % kept]
            growth = np.inf
            for s in range(n):
                growth = min(growth, now[s] - old[s])
            if growth / period > best * (1 + TINY):
                best = growth / period
                for s in range(n):
                    potential[s] = np.inf
                    for i in range(period):
                        potential[s] = min(potential[s], least[(k - period + i) % kept, s] - i * best)
    return best, potential
