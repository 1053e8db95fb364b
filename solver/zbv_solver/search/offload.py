"""The search with copies to the host: orders for the memory that copies free, and copies that make them fit.

What is on the host takes no memory, but activations on their way do, and what a W waits with cannot move. How
much can be away depends on the engines: an order for more of it is shorter, and needs more copies. So orders
are constructed for several shares, and the best ones are then annealed together with their copies.

Annealing knows no pairs. So a problem that has them is first searched without them; then come orders with
pairs, for the memory that copies free and for the problem's own limit, and copies that make them fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter, sub

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
from zbv_solver.search.options import PHASES, SearchOptions, budgets_of
from zbv_solver.search.run import Search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

SHARES = tuple(number / 8 for number in range(8, -1, -1))
"""How much of what copies can move is away at any time."""
ON_THE_WAY = (1, 2)
"""Activations for whose copies a rank keeps room."""
FEW_ACTIONS = 20_000
"""Largest problem, in actions, whose first plan has time for more orders than one."""
ROUNDS = 10
"""Rounds of annealing; between two of them the search may end."""
FIRST_LOOK, BEST_STARTS = 1 / 3, 2
"""The share of annealing for all starts, and the number of the best ones that share the rest."""
ANNEALED = ", annealed"

Start = tuple[float, Orders, str]
"""The objective of an order with copies, the order, and the method that found it."""


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
        self.best: Start | None = None
        self.reason: str | None = None
        """Why the search ended early: ``cancelled`` or ``time limit``; None if it did not."""

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
        """Construct orders for the memory that copies free, and anneal the best ones."""
        first = serial_with_copies(self.problem)
        self.keep(objective_of(self.problem, first), first, "one microbatch after another, with copies")
        if self.problem.communication is None:
            self.anneal(
                [start for start in map(self.construct, _families(self.problem)) if start is not None]
            )
        else:
            self.begin_without_pairs()
            self.construct([_alone(self.problem)])
            self.construct(next(_families(self.problem)))
        self.refine()

    def construct(self, family: Sequence[Problem]) -> Start | None:
        """The best order with copies, of one for each problem without them; None without any.

        Orders of later problems are longer, and need fewer copies.
        """
        best: Start | None = None
        for alone in family:
            if self.is_over():
                break
            plan = self._search(alone, 1 / (2 * len(family)))
            method = f"{plan.provenance.method}, with copies"
            made = plan_copies(self.problem, plan.orders)
            if made is not None:
                self.keep(*made, method)
            if made is not None and (best is None or made[0] < best[0]):
                best = (*made, method)
            if best is not None and plan.objective >= best[0]:
                break
        return best

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

    def anneal(self, starts: list[Start]) -> None:
        """Anneal orders with their copies: all of them for a short time, and the best ones for longer."""
        actions = budgets_of(self.options.effort, self.problem)[-1].copied
        different = list({start[0]: start for start in starts}.values())
        for share, number in ((FIRST_LOOK, len(different)), (1 - FIRST_LOOK, BEST_STARTS)):
            rivals = sorted(different, key=itemgetter(0))[:number]
            different = [self._annealed(start, int(share * actions / len(rivals))) for start in rivals]

    def _annealed(self, start: Start, actions: int) -> Start:
        """A start after annealing that executes so many actions, or itself if it is no longer."""
        _, orders, method = best = start
        annealing = anneal_copies(
            self.problem,
            orders,
            rounds=ROUNDS,
            moves=actions // (len(orders) * ROUNDS),
            seed=self.options.seed,
        )
        while not self.is_over() and (found := next(annealing, None)) is not None:
            best = min(best, (*found, f"{method.removesuffix(ANNEALED)}{ANNEALED}"), key=itemgetter(0))
            self.keep(*best)
        return best

    def _search(self, alone: Problem, share: float) -> Plan:
        """An order without copies, in a share of the time that is left.

        With pairs, the problem's own limit has the full effort, unless the bound there rules it out: so the
        plan is never longer than that of the same search without copies.
        """
        has_pairs = alone.communication is not None
        # Without pairs, annealing with copies does the work of all phases after the first orders.
        options = replace(self.options, effort="quick", without=() if has_pairs else PHASES)
        if (
            self.best is not None
            and has_pairs
            and alone.memory == self.problem.memory
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


def first_with_copies(problem: Problem, orders: Orders, method: str, cancelled: Cancelled | None) -> Plan:
    """The plan of an order, or of a shorter one that is constructed in about a second."""
    running = CopySearch(problem, SearchOptions("quick"), None, cancelled)
    running.keep(objective_of(problem, orders), orders, method)
    if problem.communication is None and problem.max_actions <= FEW_ACTIONS:
        running.construct(next(_families(problem)))
    return running.plan()


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


def _families(problem: Problem) -> Iterator[list[Problem]]:
    """Problems without copies whose orders copies may make fit, each list from the freest to the tightest."""
    for on_the_way in ON_THE_WAY:
        yield [_freed(problem, share, on_the_way) for share in SHARES]
    yield [_full(problem)]


def _freed(problem: Problem, share: float, on_the_way: int) -> Problem:
    """The problem without copies, if a share of what they move took no memory until its backward.

    What a backward leaves to its W takes memory again. The limit is lower by some activations on their way.
    """
    if problem.copies is None:
        return problem
    memory, moved = problem.memory, np.array(problem.copies.offloadable)
    held = tuple((np.array(memory.forward) - share * moved).tolist())
    by_inputs = tuple((np.array(memory.backward_input) + share * moved).tolist())
    room = [on_the_way * float(moved[list(stages)].max()) for stages in problem.placement.stages_of]
    freed = replace(memory, forward=held, backward_input=by_inputs, limit=None)
    alone = replace(problem.without_copies(), memory=freed, model=None)
    limits = map(sub, problem.arrays.limit.tolist(), room)
    return _at_limit(alone, tuple(map(max, limits, alone.smallest_limit)))


def _at_limit(problem: Problem, limit: tuple[float, ...] | None) -> Problem:
    """The problem without copies, with another memory limit."""
    return replace(problem.without_copies(), memory=replace(problem.memory, limit=limit))


def _alone(problem: Problem) -> Problem:
    """The problem without copies in its own memory, or in the least that it needs without them."""
    least = problem.without_copies().smallest_limit
    return _at_limit(problem, tuple(map(max, least, problem.arrays.limit.tolist())))


def _full(problem: Problem) -> Problem:
    """The problem without copies in the memory of 1F1B, if that is more than its own."""
    least, static = problem.without_copies().smallest_limit, problem.memory.static
    in_flight = min(problem.pp_degree, problem.microbatches)
    full = (held + in_flight * (one - held) for one, held in zip(least, static, strict=True))
    return _at_limit(problem, tuple(map(max, full, least, problem.arrays.limit.tolist())))
