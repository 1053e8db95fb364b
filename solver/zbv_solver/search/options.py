"""Options of a search: efforts and their budgets, time limit, seed and workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from zbv_solver.errors import InvalidInput

Effort = Literal["quick", "standard", "thorough"]
EFFORTS: tuple[str, ...] = get_args(Effort)

STAGES = ("tune", "inject", "anneal", "windows", "exact")
"""Stages of the search that can be left out to measure their contribution. Orders are always constructed."""


@dataclass(frozen=True)
class Budget:
    """The budget of an effort, in units that do not depend on the machine.

    Attributes
    ----------
    constructed
        Actions that the constructors may place after their first orders.
    injected
        Actions that the search for injections may place.
    most_injected
        Orders that it may construct.
    tuned
        Actions that the parameter search may place.
    most_tuned
        Orders that the parameter search may construct.
    annealed
        Moves of annealing times the problem's actions: larger problems get fewer moves.
    most_annealed
        Moves of annealing.
    window_actions
        Largest problem, in actions, that CP-SAT improves window by window.
    window_time
        CP-SAT's deterministic time for all windows of one size; one unit is about ten seconds.
    exact_actions
        Largest problem, in actions, that CP-SAT solves as a whole.
    exact_time
        CP-SAT's deterministic time for the whole problem.
    """

    constructed: int
    injected: int
    most_injected: int
    tuned: int
    most_tuned: int
    annealed: int
    most_annealed: int
    window_actions: int
    window_time: float
    exact_actions: int
    exact_time: float

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


BRIEFLY_INJECTED = 2_000
BRIEFLY_TUNED, BRIEFLY_ANNEALED, BRIEF_WINDOWS = 3_000, 60_000, 0.05
BUDGETS: dict[str, Budget] = {
    "quick": Budget(2_000_000, 4_000_000, 1_000, 0, 0, 600_000, 3_000, 0, 0.0, 0, 0.0),
    "standard": Budget(
        8_000_000, 60_000_000, 64_000, 60_000_000, 8_000, 400_000_000, 100_000, 4_000, 0.5, 200, 0.4
    ),
    "thorough": Budget(
        40_000_000,
        1_000_000_000,
        400_000,
        500_000_000,
        80_000,
        1_500_000_000,
        1_000_000,
        30_000,
        2.0,
        800,
        8.0,
    ),
}


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes
    ----------
    time_limit
        Seconds, or None. With a limit, the plan may depend on the speed of the machine.
    workers
        Threads of the search; the plan does not depend on their number.
    without
        Stages of ``STAGES`` to leave out.

    Raises
    ------
    InvalidInput
        When an option is out of range; the pointer is its name.
    """

    effort: Effort = "standard"
    time_limit: float | None = None
    seed: int = 0
    workers: int = 1
    without: tuple[str, ...] = ()

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
