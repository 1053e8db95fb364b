"""Options of a search: efforts and their budgets, time limit, seed and workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import Problem

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[str, ...] = get_args(Effort)

PHASES = ("pairs", "tune", "inject", "overtake", "anneal", "windows", "exact")
"""Phases of a search that can be left out to measure their contribution. Orders are always constructed."""


OVERTAKE_SHARE = 0.375
"""Placements of the search with overtaking, as a share of those of the search for injections."""
REST_SHARE = 0.5
"""Share of the tuning budget for the search of the rest of an order."""
TUNE_SHARE, TIGHT_TUNE_SHARE, INJECT_SHARE, ANNEAL_SHARE = 0.8, 0.4, 0.6, 0.8
"""Shares of the remaining time limit for these phases."""
ROUNDS = 12
"""Rounds of annealing of one start, at most."""
SEVERAL = 2
"""Times the most moves of annealing, if these are divided among several starts."""
MORE_WITH_PAIRS = 3
"""Times the most moves of annealing of every start with pairs."""
LEAST_MOVES = 1_300
"""A start is given at least as many moves, or none."""
FIRST_ATTEMPTS = 8
"""Orders that are constructed for a problem of any size."""
FINISH_SECONDS = 1.3e-6
"""Seconds per action that timing, verifying and comparing the final plan take; reserved before a deadline."""
LEAST_SECONDS = 0.01
"""The shortest remaining time of a phase."""


@dataclass(frozen=True)
class Budget:
    """The budget of an effort, in units that do not depend on the machine."""

    constructed: int
    """Actions that the constructors may place after their first orders."""
    ample: float
    """Times p: with memory for as many microbatches in flight, tuning does better than a search for
    injections, which is left out."""
    injected: int
    """Actions that the search for injections may place."""
    most_injected: int
    """Orders that it may construct."""
    tuned: int
    """Actions that the parameter search may place."""
    most_tuned: int
    """Orders that the parameter search may construct."""
    annealed: int
    """Moves of annealing times the problem's actions: larger problems get fewer moves."""
    most_annealed: int
    """Moves of annealing."""
    copied: int
    """Actions that the annealing of orders with copies may execute."""
    window_actions: int
    """Largest problem, in actions, that CP-SAT improves window by window."""
    window_time: float
    """CP-SAT's deterministic time for all windows of one size; one unit is about ten seconds."""
    exact_actions: int
    """Largest problem, in actions, that CP-SAT solves as a whole."""
    exact_time: float
    """CP-SAT's deterministic time for the whole problem."""


BUDGETS: dict[str, Budget] = {
    "quick": Budget(
        constructed=2_000_000,
        ample=0.95,
        injected=4_000_000,
        most_injected=1_000,
        tuned=0,
        most_tuned=0,
        annealed=600_000,
        most_annealed=3_000,
        copied=4_000_000,
        window_actions=0,
        window_time=0.0,
        exact_actions=0,
        exact_time=0.0,
    ),
    "standard": Budget(
        constructed=8_000_000,
        ample=0.75,
        injected=60_000_000,
        most_injected=64_000,
        tuned=60_000_000,
        most_tuned=8_000,
        annealed=400_000_000,
        most_annealed=100_000,
        copied=240_000_000,
        window_actions=3_000,
        window_time=0.5,
        exact_actions=200,
        exact_time=0.4,
    ),
    "thorough": Budget(
        constructed=40_000_000,
        ample=0.75,
        injected=1_000_000_000,
        most_injected=400_000,
        tuned=500_000_000,
        most_tuned=80_000,
        annealed=1_500_000_000,
        most_annealed=1_000_000,
        copied=1_000_000_000,
        window_actions=30_000,
        window_time=2.0,
        exact_actions=800,
        exact_time=8.0,
    ),
}


DIFFERING: dict[str, Budget] = {
    "quick": replace(BUDGETS["quick"], tuned=4_000_000, most_tuned=2_000),
    "standard": replace(
        BUDGETS["standard"],
        injected=30_000_000,
        most_injected=32_000,
        tuned=84_000_000,
        most_tuned=11_200,
        window_time=0.25,
    ),
    "thorough": replace(
        BUDGETS["thorough"],
        injected=500_000_000,
        most_injected=200_000,
        tuned=700_000_000,
        most_tuned=112_000,
        window_time=1.0,
        exact_actions=240,
    ),
}
"""Budgets where microbatches differ. There are many more rules to tune, as the order of entry is one;
injections rarely find more than tuning, and CP-SAT solves only the smallest of such problems."""


def budgets_of(effort: Effort, problem: Problem) -> list[Budget]:
    """The budgets of a search, which runs all its phases with one after the other.

    Where microbatches differ, random choices decide more than budgets do, and a longer search may end with a
    worse plan than a shorter one. So the effort ``thorough`` begins with all that ``standard`` does.
    """
    if not problem.is_equal:
        shorter = [DIFFERING["standard"]] if effort == "thorough" else []
        return [*shorter, DIFFERING[effort]]
    budget = BUDGETS[effort]
    return [before_exact(budget) if problem.max_actions <= budget.exact_actions else budget]


def before_exact(budget: Budget) -> Budget:
    """A budget for a problem that CP-SAT solves as a whole, which needs no long search before."""
    return replace(
        budget,
        most_injected=min(budget.most_injected, 2_000),
        most_tuned=min(budget.most_tuned, 3_000),
        most_annealed=min(budget.most_annealed, 60_000),
        window_time=min(budget.window_time, 0.05),
    )


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Raises
    ------
    InvalidInput
        When an option is out of range; the pointer is its name.
    """

    effort: Effort = "standard"
    time_limit: float | None = None
    """Seconds, or None. With a limit, the plan may depend on the speed of the machine."""
    seed: int = 0
    workers: int = 1
    """Threads of the search; the plan does not depend on their number."""
    without: tuple[str, ...] = ()
    """Phases of ``PHASES`` to leave out."""

    def __post_init__(self) -> None:
        if self.effort not in EFFORTS:
            raise InvalidInput.at("/effort", f"found {self.effort!r}; must be one of {', '.join(EFFORTS)}.")
        if self.time_limit is not None and not 0 < self.time_limit < float("inf"):
            raise InvalidInput.at(
                "/time_limit", f"found {self.time_limit}; must be a positive number of seconds."
            )
        if self.workers < 1:
            raise InvalidInput.at("/workers", f"found {self.workers}; must be at least 1.")
        if not 0 <= self.seed < 2**31:
            raise InvalidInput.at("/seed", f"found {self.seed}; must be from 0 to {2**31 - 1}.")
        for phase in self.without:
            if phase not in PHASES:
                raise InvalidInput.at("/without", f"found {phase!r}; must be one of {', '.join(PHASES)}.")
