"""The search with copies to the host: orders for several amounts of memory, and copies that make them fit.

An order for more memory is shorter, and needs more copies; which amount is best depends on the engines. So
quick searches try several, and order and copies of the best one are then annealed together.

Annealing knows no pairs. So a problem that has them is first searched without them; then come orders with
pairs, for more memory and for the problem's own limit, and copies that make them fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np

from zbv_solver.bounds import lower_bound
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.copies import plan_copies
from zbv_solver.improve.copy_search import anneal_copies
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, gap_of
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import D, O, Problem, R, least_with_copies
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.incumbent import Cancelled, OnProgress, Progress
from zbv_solver.search.options import SearchOptions, budgets_of
from zbv_solver.search.run import Search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

SHARES = (1.0, 0.7, 0.0)
"""Memory for which orders are searched, as shares of what 1F1B needs; the last is the problem's limit."""
WITH_PAIRS = (1.5, *SHARES)
"""The same for orders with pairs, which hold more microbatches."""
ROUNDS = 10
"""Rounds of annealing; between two of them the search may end."""


class CopySearch:
    """The search of an order and its copies."""

    def __init__(
        self,
        problem: Problem,
        options: SearchOptions,
        on_progress: OnProgress | None,
        cancelled: Cancelled | None,
    ):
        self.problem, self.options = problem, options
        self.on_progress, self.cancelled = on_progress, cancelled
        self.began = time.monotonic()
        self.bound = lower_bound(problem).value
        self.best: tuple[float, Orders, str] | None = None
        self.reason: str | None = None
        """Why the search ended early: ``cancelled`` or ``time limit``; None if it did not."""

    def try_orders(self, orders: Orders, method: str) -> float | None:
        """Find the copies of an order; returns the objective, or None if no copies keep the limit."""
        made = plan_copies(self.problem, orders)
        if made is None:
            return None
        self.keep(*made, method)
        return made[0]

    def keep(self, value: float, orders: Orders, method: str) -> None:
        """Keep an order if it is the best so far, or has fewer copies than an equal one."""
        if self.best is not None and (value, _copies(orders)) >= (self.best[0], _copies(self.best[1])):
            return
        self.best = value, orders, method
        if self.on_progress is not None:
            gap = gap_of(value, self.bound)
            self.on_progress(Progress(value, self.bound, gap, method, self.seconds, orders, self.problem))

    @property
    def seconds(self) -> float:
        """Time since the search began."""
        return time.monotonic() - self.began

    def is_over(self) -> bool:
        """Whether the bound is met, the time is up, or the search is cancelled."""
        limit = self.options.time_limit
        if self.best is not None and self.best[0] <= self.bound:
            return True
        if self.cancelled is not None and self.cancelled():
            self.reason = "cancelled"
        elif limit is not None and self.seconds >= limit:
            self.reason = "time limit"
        return self.reason is not None

    def run(self) -> None:
        """Try orders for several amounts of memory, and anneal the best one."""
        first = serial_with_copies(self.problem)
        self.keep(objective_of(self.problem, first), first, "one microbatch after another, with copies")
        if self.problem.communication is not None:
            self.begin_without_pairs()
        limits = list(_limits(self.problem))
        for number, limit in enumerate(limits):
            if self.is_over():
                return
            plan = self._search(limit, 1 / (2 * len(limits) - number))
            self.try_orders(plan.orders, f"{plan.provenance.method}, with copies")
        if self.problem.communication is None:
            self.anneal()
        self.refine()

    def begin_without_pairs(self) -> None:
        """Keep the best order without pairs, found in half of the time."""
        limit = self.options.time_limit
        options = replace(self.options, time_limit=None if limit is None else limit / 2)
        alone = CopySearch(self.problem.without_pairs(), options, None, self.cancelled)
        alone.run()
        if alone.best is not None:
            self.keep(*alone.best)

    def refine(self) -> None:
        """Let CP-SAT improve the order of a small problem, or prove it optimal."""
        budget = budgets_of(self.options.effort, self.problem)[-1]
        if self.best is None or self.is_over() or self.problem.max_actions > budget.exact_actions:
            return
        from zbv_solver.improve.cp_entries import refine_entries  # OR-Tools takes a second to import

        _, orders, method = self.best
        result = refine_entries(
            self.problem,
            orders,
            effort=budget.exact_time,
            seed=self.options.seed,
            cancelled=self.is_over,
        )
        self.bound = max(self.bound, result.lower_bound)
        if result.orders is not None:
            fewest = without_needless_copies(self.problem, result.orders)
            self.keep(objective_of(self.problem, fewest), fewest, f"{method}, cp-sat")

    def prove(self) -> None:
        """Compute the thorough bound, last: with a good order, a part of it may be enough."""
        if self.best is not None and self.options.effort != "quick" and not self.is_over():
            bound = lower_bound(self.problem, "thorough", self.best[0], self.is_over)
            self.bound = max(self.bound, bound.value)

    def anneal(self) -> None:
        """Anneal the best order with its copies."""
        if self.best is None or self.is_over():
            return
        _, orders, method = self.best
        moves = budgets_of(self.options.effort, self.problem)[-1].copied // (len(orders) * ROUNDS)
        annealing = anneal_copies(self.problem, orders, rounds=ROUNDS, moves=moves, seed=self.options.seed)
        for value, annealed in annealing:
            self.keep(value, annealed, f"{method}, annealed")
            if self.is_over():
                return

    def _search(self, limit: tuple[float, ...], share: float) -> Plan:
        """An order without copies for a memory limit, in a share of the time that is left.

        With pairs, the problem's own limit has the full effort, unless the bound there rules it out: so the
        plan is never longer than that of the same search without copies.
        """
        alone, options = _at_limit(self.problem, limit), replace(self.options, effort="quick")
        if (
            self.best is not None
            and self.problem.communication is not None
            and limit == self.problem.memory.limit
            and lower_bound(alone).value < self.best[0]
        ):
            options = self.options
        if options.time_limit is not None:
            left = max(0.01, options.time_limit - self.seconds)
            options = replace(options, time_limit=share * left)
        running = Search(alone, options, cancelled=self.cancelled)
        running.run()
        return running.plan()

    def plan(self) -> Plan:
        """The verified plan of the best order."""
        if self.best is None:
            raise RuntimeError("the search ended without an order; this is a bug in zbv, please report it.")
        _, orders, method = self.best
        return make_plan(
            self.problem,
            orders,
            method=method,
            lower_bound=self.bound,
            seed=self.options.seed,
            seconds=self.seconds,
            extra={"effort": self.options.effort} | ({"cut": self.reason} if self.reason else {}),
        )


def search_with_copies(
    problem: Problem,
    options: SearchOptions,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | None = None,
) -> Plan:
    """Find a plan of a problem with copies to the host; parameters and errors as in :func:`.search`."""
    running = CopySearch(problem, options, on_progress, cancelled)
    if incumbent is not None:
        verify_orders(problem, incumbent)
        running.keep(objective_of(problem, incumbent), incumbent, "resumed")
    running.run()
    running.prove()
    return replace(running.plan(), baselines=compare(problem))


def serial_with_copies(problem: Problem) -> Orders:
    """One microbatch after another, with the copies by which it needs the least memory."""
    orders = serial(_at_limit(problem, None)).orders
    rows = []
    for rank, stages in enumerate(problem.placement.stages_of):
        _, moved = least_with_copies(problem, rank)
        copied = {stage for stage, amount in zip(stages, moved.tolist(), strict=True) if amount > 0}
        part = orders.slice_of(rank)
        for at, action in enumerate(orders.actions(rank), part.start):
            if action.stage in copied and action.letter == "F":
                rows += [(at + 1, letter, action.stage, action.microbatch) for letter in (O, D)]
            elif action.stage in copied:
                rows.append((at, R, action.stage, action.microbatch))
    if not rows:
        return orders
    return replace(orders, copies=np.array(sorted(rows, key=itemgetter(0)), np.int32))


def without_needless_copies(problem: Problem, orders: Orders) -> Orders:
    """The orders without every copy that they need neither to fit nor to be as short."""
    most = objective_of(problem, orders) * (1 + ROUNDING)
    for _, letter, stage, microbatch in () if orders.copies is None else orders.copies.tolist():
        if letter != O or orders.copies is None:
            continue
        others = (orders.copies[:, 2:] != (stage, microbatch)).any(axis=1)
        fewer = replace(orders, copies=orders.copies[others] if others.any() else None)
        try:
            verify_orders(problem, fewer)
        except InvalidPlan:
            continue
        orders = fewer if objective_of(problem, fewer) <= most else orders
    return orders


def _copies(orders: Orders) -> int:
    return 0 if orders.copies is None else len(orders.copies)


def _at_limit(problem: Problem, limit: tuple[float, ...] | None) -> Problem:
    """The problem without copies, with another memory limit."""
    return replace(problem.without_copies(), memory=replace(problem.memory, limit=limit))


def _limits(problem: Problem) -> Iterator[tuple[float, ...]]:
    """Memory limits for orders that copies make fit: from what 1F1B needs down to the problem's own limit."""
    own, static = problem.memory.limit, problem.memory.static
    needed = problem.without_copies().smallest_limit
    in_flight = min(problem.pp_degree, problem.microbatches)
    full = [in_flight * (least - held) for least, held in zip(needed, static, strict=True)]
    seen = set()
    for share in SHARES if problem.communication is None else WITH_PAIRS:
        limit = tuple(
            max(mine, least, held + share * most)
            for mine, least, held, most in zip(own or needed, needed, static, full, strict=True)
        )
        if limit not in seen:
            seen.add(limit)
            yield limit
