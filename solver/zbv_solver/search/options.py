"""Options of a search: efforts and their budgets, time limit, seed and workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from zbv_solver.errors import InvalidInput
from zbv_solver.jitter.noise import Jitter
from zbv_solver.problem.problem import Problem

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[str, ...] = get_args(Effort)

STAGES = ("tune", "inject", "overtake", "anneal", "windows", "exact")
"""Stages of the search that can be left out to measure their contribution. Orders are always constructed."""


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
    window_actions: int
    """Largest problem, in actions, that CP-SAT improves window by window."""
    window_time: float
    """CP-SAT's deterministic time for all windows of one size; one unit is about ten seconds."""
    exact_actions: int
    """Largest problem, in actions, that CP-SAT solves as a whole."""
    exact_time: float
    """CP-SAT's deterministic time for the whole problem."""

    def of(self, actions: int) -> Budget:
        """The budget for a number of actions: problems that CP-SAT can solve need no long search before."""
        if actions > self.exact_actions:
            return self
        return replace(
            self,
            most_injected=min(self.most_injected, BRIEFLY_INJECTED),
            most_tuned=min(self.most_tuned, BRIEFLY_TUNED),
            most_annealed=min(self.most_annealed, BRIEFLY_ANNEALED),
            window_time=min(self.window_time, BRIEF_WINDOWS),
        )

    def for_differing(self) -> Budget:
        """The budget for microbatches that differ: there are many more rules, as the order of entry is one.

        Injections rarely find more than tuning there. CP-SAT solves only the smallest of such problems, so no
        other stage is kept short for it.
        """
        return replace(
            self,
            injected=max(self.injected // 2, INJECTED_DIFFERING),
            most_injected=max(self.most_injected // 2, MOST_INJECTED_DIFFERING),
            tuned=max(int(1.4 * self.tuned), TUNED_DIFFERING),
            most_tuned=max(int(1.4 * self.most_tuned), MOST_TUNED_DIFFERING),
            window_time=WINDOW_SHARE_DIFFERING * self.window_time,
            exact_actions=min(self.exact_actions, EXACT_DIFFERING),
        )


INJECTED_DIFFERING, MOST_INJECTED_DIFFERING = 4_000_000, 1_000
TUNED_DIFFERING = 4_000_000
MOST_TUNED_DIFFERING = 2_000
WINDOW_SHARE_DIFFERING, EXACT_DIFFERING = 0.5, 240
BRIEFLY_INJECTED = 2_000
BRIEFLY_TUNED, BRIEFLY_ANNEALED, BRIEF_WINDOWS = 3_000, 60_000, 0.05
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
        window_actions=30_000,
        window_time=2.0,
        exact_actions=800,
        exact_time=8.0,
    ),
}


def budgets_of(effort: Effort, problem: Problem) -> list[Budget]:
    """The budgets of a search, which runs all its stages with one after the other.

    Where microbatches differ, random choices decide more than budgets do, and a longer search may end with a
    worse plan than a shorter one. So the effort ``thorough`` begins with all that ``standard`` does.
    """
    if problem.is_equal:
        return [BUDGETS[effort].of(problem.max_actions)]
    efforts = ["standard", effort] if effort == "thorough" else [effort]
    return [BUDGETS[each].for_differing() for each in efforts]


LEAST_QUANTILE, LARGEST_QUANTILE = 0.5, 0.99


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
    """Stages of ``STAGES`` to leave out."""
    jitter: Jitter | None = None
    """By how much durations vary. With it, the plan is chosen for its simulated time
    (:mod:`zbv_solver.search.for_jitter`), not for the time with planned durations."""
    quantile: float | None = None
    """The quantile of the simulated times to choose for, or None for their mean."""

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
        for stage in self.without:
            if stage not in STAGES:
                raise InvalidInput.at("/without", f"found {stage!r}; must be one of {', '.join(STAGES)}.")
        if self.quantile is not None:
            if self.jitter is None:
                raise InvalidInput.at(
                    "/quantile", "is of the times when durations vary; give jitter too, or remove it."
                )
            if not LEAST_QUANTILE <= self.quantile <= LARGEST_QUANTILE:
                raise InvalidInput.at(
                    "/quantile",
                    f"found {self.quantile:g}; must be from {LEAST_QUANTILE} to {LARGEST_QUANTILE}.",
                )
