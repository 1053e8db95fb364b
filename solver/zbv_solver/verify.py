"""An independent check of plans: nothing leaves the solver, the service or the command line without it.

Shares no code with timing or search, on purpose: it builds the precedence graph as explicit edges, orders
it by Kahn's algorithm, and checks a stated span by the system of inequalities that defines it instead of
computing it. A fault would have to be made twice, in two different ways, to pass.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidPlan
from zbv_solver.jit import compiled_where_possible
from zbv_solver.orders import Orders
from zbv_solver.plan import Plan
from zbv_solver.problem import LETTERS, B, F, I, Problem, W

RELATIVE = 1e-7
"""Stated metrics may differ from the recomputed ones by float rounding, not by more than this."""


def verify_orders(problem: Problem, orders: Orders) -> None:
    """Check completeness, placement, precedence, deadlock-freedom and memory.

    Raises
    ------
    InvalidPlan
        Naming the first broken rule, with the action and rank that break it.
    """
    _check_range(problem, orders)
    _check_placement(problem, orders)
    _check_complete(problem, orders)
    _check_local_precedence(problem, orders)
    _check_memory(problem, orders)
    _Simulation(problem, orders)


def verify(plan: Plan) -> None:
    """:func:`verify_orders`, and stated against recomputed metrics.

    Raises
    ------
    InvalidPlan
        As there, or naming the metric with its stated and recomputed value.
    """
    problem, orders, metrics = plan.problem, plan.orders, plan.metrics
    verify_orders(problem, orders)
    simulation = _Simulation(problem, orders)
    _compare("makespan", metrics.makespan, simulation.makespan())
    if not simulation.windows_fit(metrics.span * (1 + RELATIVE)):
        raise InvalidPlan(f"the stated span {metrics.span:.15g} is too small: no start times reach it.")
    if metrics.span > 0 and simulation.windows_fit(metrics.span * (1 - RELATIVE)):
        raise InvalidPlan(f"the stated span {metrics.span:.15g} is too large: the order reaches less.")
    busy = float(np.sum(simulation.duration))
    bubble = 1 - busy / (problem.pp_degree * metrics.span) if metrics.span > 0 else 0.0
    if abs(bubble - metrics.bubble_rate) > RELATIVE:
        raise InvalidPlan(f"the stated bubble_rate {metrics.bubble_rate:.9g} is {bubble:.9g} recomputed.")
    if len(metrics.peak_memory) != problem.pp_degree:
        raise InvalidPlan(f"peak_memory states {len(metrics.peak_memory)} ranks, not {problem.pp_degree}.")
    for rank, stated in enumerate(metrics.peak_memory):
        _compare(f"peak_memory of rank {rank}", stated, _peak(problem, orders, rank))
    _check_bound(plan)


def _check_bound(plan: Plan) -> None:
    value, metrics = plan.objective, plan.metrics
    if metrics.lower_bound > value * (1 + RELATIVE):
        raise InvalidPlan(
            f"the stated lower_bound {metrics.lower_bound:.15g} is above the objective {value:.15g}, so it "
            f"is no bound."
        )
    gap = value / metrics.lower_bound - 1 if metrics.lower_bound > 0 else math.inf if value > 0 else 0.0
    if math.isfinite(gap) and abs(gap - metrics.gap) > RELATIVE:
        raise InvalidPlan(f"the stated gap {metrics.gap:.9g} is {gap:.9g} recomputed.")
    if metrics.status == "optimal" and gap > RELATIVE:
        raise InvalidPlan(f"the stated status is optimal at a gap of {gap:.3g}; optimal means a gap of 0.")


def _compare(name: str, stated: float, recomputed: float) -> None:
    if abs(stated - recomputed) > RELATIVE * max(abs(stated), abs(recomputed)):
        raise InvalidPlan(f"the stated {name} {stated:.15g} is {recomputed:.15g} recomputed.")


def _text(orders: Orders, index: int) -> str:
    return f"{orders.stage[index]}{LETTERS[orders.letter[index]]}{orders.microbatch[index]}"


def _check_range(problem: Problem, orders: Orders) -> None:
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    wrong = (orders.stage >= problem.n_stages) | (orders.microbatch >= problem.microbatches)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidPlan(
            f"found {_text(orders, at)}; stages are 0 to {problem.n_stages - 1} and microbatches 0 to "
            f"{problem.microbatches - 1}."
        )


def _check_placement(problem: Problem, orders: Orders) -> None:
    host = np.array(problem.placement.rank_of)[orders.stage]
    wrong = host != orders.rank_index()
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidPlan(
            f"found {_text(orders, at)} on rank {orders.rank_index()[at]}; placement "
            f"{problem.placement.kind} puts stage {orders.stage[at]} on rank {host[at]}."
        )


def _check_complete(problem: Problem, orders: Orders) -> None:
    shape = (4, problem.n_stages, problem.microbatches)
    count = np.zeros(shape, dtype=np.int64)
    np.add.at(count, (orders.letter, orders.stage, orders.microbatch), 1)
    fused, split = count[B] == 1, count[B] == 0
    right = (count[F] == 1) & (
        (fused & (count[I] == 0) & (count[W] == 0)) | (split & (count[I] == 1) & (count[W] == 1))
    )
    if not right.all():
        stage, microbatch = (int(index[0]) for index in np.nonzero(~right))
        found = ", ".join(f"{count[k, stage, microbatch]} {LETTERS[k]}" for k in range(4))
        raise InvalidPlan(
            f"stage {stage} microbatch {microbatch} has {found}; it must have one F, and either one B or "
            f"one I and one W."
        )


def _check_local_precedence(problem: Problem, orders: Orders) -> None:
    """F before I or B, and I before W: all three are on one rank, so positions decide."""
    position = np.full((4, problem.n_stages, problem.microbatches), -1, dtype=np.int64)
    position[orders.letter, orders.stage, orders.microbatch] = np.arange(len(orders))
    backward = np.maximum(position[I], position[B])
    for first, then, names in ((position[F], backward, "F"), (position[I], position[W], "I")):
        wrong = (then >= 0) & (then < first)
        if wrong.any():
            stage, microbatch = (int(index[0]) for index in np.nonzero(wrong))
            late = _text(orders, int(then[stage, microbatch]))
            raise InvalidPlan(f"{late} comes before {stage}{names}{microbatch} on its rank, which it needs.")


def _check_memory(problem: Problem, orders: Orders) -> None:
    if problem.memory.limit is None:
        return
    for rank, limit in enumerate(problem.memory.limit):
        peak = _peak(problem, orders, rank)
        if peak > limit + 1e-9 * max(abs(peak), abs(limit)):
            raise InvalidPlan(f"rank {rank} needs {peak:.15g} of memory; its limit is {limit:.15g}.")


def _peak(problem: Problem, orders: Orders, rank: int) -> float:
    memory = problem.memory
    held = highest = memory.static[rank]
    begin, end = int(orders.offset[rank]), int(orders.offset[rank + 1])
    deltas = np.zeros((4, problem.n_stages))
    deltas[F], deltas[I], deltas[W] = memory.forward, memory.backward_input, memory.backward_weight
    deltas[B] = deltas[I] + deltas[W]
    changes = deltas[orders.letter[begin:end], orders.stage[begin:end]]
    held_after = held + np.cumsum(changes)
    held_before = held_after - changes
    return float(max(highest, np.max(np.maximum(held_before, held_after), initial=held)))


class _Simulation:
    """The precedence graph of an order as explicit edges, sorted by Kahn's algorithm.

    Raises :class:`InvalidPlan` when a cycle makes the order a deadlock.
    """

    def __init__(self, problem: Problem, orders: Orders):
        self.orders = orders
        costs, n = problem.costs, len(orders)
        durations = np.zeros((4, problem.n_stages))
        durations[F], durations[I], durations[W] = costs.forward, costs.backward_input, costs.backward_weight
        durations[B] = [costs.fused(stage) for stage in range(problem.n_stages)]
        self.duration = durations[orders.letter, orders.stage]
        at = np.full((4, problem.n_stages, problem.microbatches), -1, dtype=np.int64)
        at[orders.letter, orders.stage, orders.microbatch] = np.arange(n)
        backward = np.maximum(at[I], at[B])
        tails, heads, lags = [], [], []
        for boundary in range(problem.n_stages - 1):
            local = problem.placement.rank_of[boundary] == problem.placement.rank_of[boundary + 1]
            lag = 0.0 if local else costs.p2p[boundary]
            tails += [at[F, boundary], backward[boundary + 1]]
            heads += [at[F, boundary + 1], backward[boundary]]
            lags += [np.full(2 * problem.microbatches, lag)]
        first = np.zeros(n, dtype=bool)
        first[orders.offset[:-1][np.diff(orders.offset) > 0]] = True
        follows = np.flatnonzero(~first)
        tail = np.concatenate([follows - 1, *tails]).astype(np.int64)
        head = np.concatenate([follows, *heads]).astype(np.int64)
        lag_of = np.concatenate([np.zeros(len(follows)), *lags])
        by_tail = np.argsort(tail, kind="stable")
        self.head, self.lag = head[by_tail], lag_of[by_tail]
        self.edges = np.searchsorted(tail[by_tail], np.arange(n + 1))
        self.sorted, done = _kahn(self.edges, self.head)
        if done < n:
            stuck = np.ones(n, dtype=bool)
            stuck[self.sorted[:done]] = False
            raise InvalidPlan(
                f"the order deadlocks: {n - done} actions wait in a circle, among them "
                f"{_text(orders, int(np.argmax(stuck)))}."
            )
        self.first = orders.offset[:-1].copy()
        self.last = orders.offset[1:] - 1

    def makespan(self) -> float:
        """Last end when everything starts as early as it can."""
        start = np.zeros(len(self.duration))
        _propagate(self.sorted, self.edges, self.head, self.lag, self.duration, start)
        return float(np.max(start + self.duration, initial=0.0) - np.min(start, initial=np.inf))

    def windows_fit(self, window: float) -> bool:
        """Whether start times exist with last end - first start <= window on every rank.

        Pushes first starts up until every window fits; p rounds decide, for a system that can be
        satisfied needs no more than the longest simple path among p windows.
        """
        release = np.zeros(len(self.first))
        for _ in range(len(self.first) + 1):
            start = np.zeros(len(self.duration))
            start[self.first] = release
            _propagate(self.sorted, self.edges, self.head, self.lag, self.duration, start)
            # A start can also be forced up by inputs; the window then begins there.
            needed = start[self.last] + self.duration[self.last] - window
            if (needed <= start[self.first] + 1e-12 * abs(window)).all():
                return True
            release = np.maximum(start[self.first], needed)
        return False


@compiled_where_possible
def _kahn(edges: NDArray[Any], head: NDArray[Any]) -> tuple[NDArray[Any], int]:  # pragma: no cover - compiled
    n = len(edges) - 1
    waiting = np.zeros(n, np.int64)
    for node in head:
        waiting[node] += 1
    queue = np.empty(n, np.int64)
    size = 0
    for node in range(n):
        if waiting[node] == 0:
            queue[size] = node
            size += 1
    done = 0
    while done < size:
        node = queue[done]
        done += 1
        for edge in range(edges[node], edges[node + 1]):
            follower = head[edge]
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
    return queue, done


@compiled_where_possible
def _propagate(
    order: NDArray[Any],
    edges: NDArray[Any],
    head: NDArray[Any],
    lag: NDArray[Any],
    duration: NDArray[Any],
    start: NDArray[Any],
) -> None:  # pragma: no cover - compiled
    for node in order:
        end = start[node] + duration[node]
        for edge in range(edges[node], edges[node + 1]):
            start[head[edge]] = max(start[head[edge]], end + lag[edge])
