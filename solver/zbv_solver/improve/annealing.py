"""Annealing on the order itself: single actions move a few places along their rank.

A move (:mod:`.order_state`) is applied if its judgement is better, or worse by no more than the temperature
allows. For a span, the ranks' first starts are fixed during a round, at the values that attain the exact span
of the round's first order.

Usually, all stages keep running the microbatches in one order. In an order where small microbatches overtake
large ones, an action may pass another one of its stage and letter.

Rounds come in threes of falling temperature. How good an order becomes is hard to tell from its objective
before: tuned orders gain ten times as much as orders of the search for injections. So all starts are annealed
a little, and the best a little more (successive halving: Karnin, Koren and Somekh, "Almost Optimal
Exploration in Multi-Armed Bandits", 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zbv_solver.construct.board import from_orders
from zbv_solver.construct.tables import Tables, make_tables, mean_duration, swap
from zbv_solver.improve.order_repair import (
    critical_path,
    repair_ends,
    repair_path,
    repair_tails,
    spread,
)
from zbv_solver.improve.order_state import (
    REACH,
    Move,
    Queue,
    State,
    apply_move,
    compute_all,
    delimit,
    draw,
    judge,
    objective,
    rotate,
    sum_memory,
    sweep_ends,
)
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled_leaf
from zbv_solver.plans.orders import Orders, in_entry_order
from zbv_solver.problem.numeric import OPTIMAL_GAP, ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of, span_start_times

ENTRIES, NEAR = 0.02, 4
"""Where microbatches differ: share of moves that swap two of them in the order of entry, and how far apart
these are at most in most of the swaps."""
PROPOSALS = 40
"""A round ends after this many moves looked at for each move that it may apply."""
THREE = 3
"""Rounds until the temperature rises again; the first of them starts from the best order."""
WARMEST = 0.1
"""Temperature in the first of three rounds of annealing, as a share of the mean duration."""
COOLER = 0.3
"""Factor of the temperatures where half of the work is to be done at lower ones."""


class Level(NamedTuple):
    """One step of successive halving."""

    kept: int
    """Number of orders, the best ones, that are annealed."""
    share: float
    """Share of all moves."""
    rounds: int
    """Rounds for each of the orders."""
    factors: tuple[float, ...]
    """Factors of the temperature; the orders take turns, the best one takes the first."""


LEVELS = (
    Level(10, 0.25, THREE, (COOLER,)),
    Level(4, 0.25, 2 * THREE, (COOLER, 1.0)),
    Level(2, 0.5, 4 * THREE, (COOLER, 1.0)),
)


class Kept(NamedTuple):
    """A copy of an order; kernels write into it."""

    code: IntArray
    microbatch: IntArray
    """As in :class:`~.order_state.State`."""
    entry: IntArray
    """(m,) the microbatch of every number."""

    @classmethod
    def of(cls, state: State, tables: Tables) -> Kept:
        """A copy of the state's order."""
        return cls(state.code.copy(), state.microbatch.copy(), tables.entry.copy())

    def orders(self, problem: Problem, length: IntArray) -> Orders:
        """The order, of a problem whose ranks have ``length`` (p,) actions."""
        rows, stages = [], np.array(problem.placement.stages_of, dtype=np.int32)
        for rank, until in enumerate(length):
            code, number = self.code[rank, :until], self.microbatch[rank, :until]
            rows.append(np.stack([stages[rank, code >> 2], code & 3, self.entry[number]], axis=1))
        return Orders.of_rows([row.astype(np.int32) for row in rows])


@dataclass(frozen=True, eq=False)
class Annealed:
    """The result of a round."""

    orders: Orders
    value: float
    """The best order and its exact objective."""
    last: Orders
    """The order at the end of the round."""
    moves: int
    """Number of moves applied."""
    looked: int
    """Number of moves looked at."""
    judged: float
    """The best order's objective as the kernel computed it, with the first starts fixed at the beginning
    of the round; at least ``value``."""


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
    best, length = Kept.of(state, tables), state.length
    applied, looked, lowest = _round(
        tables,
        state,
        trial_of(state),
        best,
        Round(moves, temperature, seed, overtakes),
        Space.of(*state.code.shape),
        np.zeros(1, np.uint8) if halt is None else halt,
    )
    better = best.orders(problem, length)
    last = Kept.of(state, tables).orders(problem, length)
    return Annealed(better, objective_of(problem, better), last, int(applied), int(looked), float(lowest))


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
    unit = mean_duration(problem)
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


class Space(NamedTuple):
    """What a round writes into."""

    move: Move
    queue: Queue
    path: IntArray
    """(actions, 2) the critical path that moves are drawn from, rows (rank, index)."""
    fresh: IntArray
    """As large, for the part of the path that is traced again."""

    @classmethod
    def of(cls, ranks: int, most: int) -> Space:
        """Arrays for so many ranks with up to ``most`` actions each."""
        actions = ranks * most
        return cls(
            Move.empty(),
            Queue.of(ranks, most),
            np.zeros((actions, 2), np.int64),
            np.zeros((actions, 2), np.int64),
        )


class Round(NamedTuple):
    """The parameters of one round; see :func:`anneal`."""

    moves: int
    temperature: float
    seed: int
    overtakes: bool


@compiled_leaf
def _round(
    tables: Tables,
    state: State,
    trial: State,
    best: Kept,
    budget: Round,
    space: Space,
    halt: IntArray,
) -> tuple[int, int, float]:  # pragma: no cover - compiled
    """Move actions of the state; write the best order into ``best``.

    Returns the moves applied, the moves looked at, and the best value. Random numbers are drawn in the same
    order on every machine, so a seed gives the same plan everywhere.
    """
    np.random.seed(budget.seed)
    length, end, release = state.length, state.end, state.release
    move, queue, path = space.move, space.queue, space.path
    compute_all(tables, state)
    value = objective(state)
    spread(queue, value)
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
                    _keep(tables, state, best)
            continue
        rank, at = draw(path, size, length)
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
        if judge(tables, state, rank, move) > value - budget.temperature * np.log(1.0 - np.random.random()):
            continue
        apply_move(tables, state, rank, move)
        bar = end[rank, low - 1] if low > 0 else release[rank]
        latest = repair_ends(tables, state, queue, rank, low, high)
        repair_tails(tables, state, queue, rank, low, high, move.tail)
        sum_memory(tables, state, rank, low, high)
        size = repair_path(tables, state, path, size, bar, latest, space.fresh)
        value = objective(state)
        applied += 1
        # The tolerance keeps rounding from counting as progress; only real gains copy the order, in
        # O(actions).
        if value < lowest - ROUNDING * abs(lowest):
            lowest = value
            _keep(tables, state, best)
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
def _keep(tables: Tables, state: State, kept: Kept) -> None:  # pragma: no cover - compiled
    """Copy the state's order."""
    _copy(tables.entry, kept.entry)
    for rank in range(len(state.length)):
        _copy(state.code[rank], kept.code[rank])
        _copy(state.microbatch[rank], kept.microbatch[rank])


@compiled_leaf
def _copy(source: IntArray, target: IntArray) -> None:  # pragma: no cover - compiled
    """Copy a row; NumPy's assignment would make an array in between."""
    for at in range(len(source)):
        target[at] = source[at]
