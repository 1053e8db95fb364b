"""The search of an order with pairs, next to that of orders of single actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zbv_solver.bounds import lower_bound
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import fits
from zbv_solver.search.incumbent import CHAINS, Chain, Halt, Incumbent, Solution, is_over
from zbv_solver.search.options import ANNEAL_SHARE, MORE_WITH_PAIRS, ROUNDS, Budget, SearchOptions
from zbv_solver.timing.start_times import evaluate, objective_of


class PairSearch:
    """The best order with pairs. Single actions and their best order are the incumbent's."""

    def __init__(self, problem: Problem, options: SearchOptions, incumbent: Incumbent, halt: Halt):
        self.problem, self.options = problem, options
        self.incumbent, self.halt = incumbent, halt
        self.best: Solution | None = None
        self.alone = 0.0  # no order without pairs is shorter than this

    def resume_from(self, orders: Orders) -> None:
        """Start from a known order, which may have pairs."""
        if orders.paired is not None:
            self.best = Solution(objective_of(self.problem, orders), orders, "resumed")

    @property
    def is_settled(self) -> bool:
        """Whether no order can be shorter, or none without pairs."""
        best = self.best
        return best is not None and (best.value <= self.alone or self.incumbent.meets_bound(best))

    @property
    def is_open(self) -> bool:
        """Whether there is an order that may not be the best, and time to find out."""
        if self.best is None or self.incumbent.meets_bound(self.best):
            return False
        return not is_over(self.incumbent, self.halt)

    def anneal(self, budget: Budget, race: Callable[[Chain, float], list[Solution]]) -> None:
        """Let pairs form and part: in the best order, and in fixed orders that are made for pairs."""
        best, problem = self.incumbent.best, self.problem
        if best is None:
            return
        if not self.alone:
            self.alone = lower_bound(problem.without_pairs()).value
        # Orders made for pairs and others lead to different ones, and which is better shows at the end only.
        is_second, starts = self.best is not None, self._starts(best)
        self.best = min(starts, key=lambda solution: solution.value)
        self.incumbent.announce(self.best)
        moves = min(budget.most_annealed, budget.annealed // problem.max_actions)
        if moves == 0 or not problem.is_equal:
            return
        from zbv_solver.improve.pair_search import anneal_pairs  # few problems need it

        def chain(number: int, halt: Halt) -> Iterator[Solution]:
            start = starts[number % len(starts)]
            for value, orders in anneal_pairs(
                problem,
                start.orders,
                start.value,
                rounds=ROUNDS,
                moves=max(1, MORE_WITH_PAIRS * moves // ROUNDS),
                factor=1.0,
                seed=((2 * self.options.seed + is_second) * CHAINS + number) * ROUNDS,
                halt=halt.flag,
            ):
                yield Solution(value, orders, "annealing of pairs")

        # A race improves the current order; the other phases cannot start from one with pairs.
        kept, self.incumbent.current = self.incumbent.current, self.best
        race(chain, ANNEAL_SHARE)
        self.best, self.incumbent.current = self.incumbent.current, kept

    def solve(self, budget: Budget) -> None:
        """Solve the whole problem by CP-SAT, if it is small enough."""
        start, problem = self.best, self.problem
        if start is None or not self.is_open:
            return
        if not problem.is_equal or problem.max_actions > budget.exact_actions:
            return
        from zbv_solver.improve.cp_entries import refine_entries  # OR-Tools takes a second to import

        result = refine_entries(
            problem,
            start.orders,
            effort=budget.exact_time,
            seed=self.options.seed,
            cancelled=self.halt.check,
        )
        if result.orders is not None:
            self.best = Solution(objective_of(problem, result.orders), result.orders, "cp-sat")
            self.incumbent.announce(self.best)
        self.incumbent.raise_bound(result.lower_bound, "cp-sat")

    def choose(self, single: Solution) -> Solution:
        """The better one of the best order of single actions and the best with pairs, which is kept."""
        found = self._starts(single) if self.best is None else [single, self.best]
        self.best = min(found, key=lambda solution: solution.value)
        return self.best

    def _starts(self, single: Solution) -> list[Solution]:
        """The best order so far, with pairs or without, and the best of the fixed ones that have pairs."""
        from zbv_solver.construct.pairs import joined, starts  # few problems need it

        problem = self.problem
        found = [single] if self.best is None else [single, self.best]
        fixed: list[Solution] = []
        for solutions, name, orders in (
            (found, "pairs", single.orders),
            *((fixed, *it) for it in starts(problem)),
        ):
            made = joined(problem, orders)
            if fits(problem, evaluate(problem, made).peak_memory):
                solutions.append(Solution(objective_of(problem, made), made, name))
        return [min(some, key=lambda solution: solution.value) for some in (found, fixed) if some]
