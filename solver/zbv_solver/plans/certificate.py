"""What a lower bound proves about a plan. The gap and the status are computed here only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zbv_solver.errors import ContradictedBound
from zbv_solver.problem.layered_problem import AnyProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.writing import any_problem_json

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True)
class Certificate:
    """A proved bound on an objective, and the resulting gap."""

    lower_bound: float
    """Never above the objective: a bound that exceeds it by rounding only is set to the objective."""
    gap: float
    """objective / lower_bound - 1."""
    status: Status


def verdict(objective: float, lower_bound: float) -> Literal["contradicted", "optimal", "feasible"]:
    """Whether a lower bound proves a verified plan optimal, or contradicts it by more than rounding."""
    if lower_bound > objective * (1 + OPTIMAL_GAP):
        return "contradicted"
    return "optimal" if gap_of(objective, lower_bound) == 0 else "feasible"


def gap_of(objective: float, lower_bound: float) -> float:
    """objective / lower_bound - 1, relative; 0 when both are 0 or the difference is rounding."""
    if lower_bound > 0:
        gap = objective / lower_bound - 1
        return 0.0 if abs(gap) <= OPTIMAL_GAP else gap
    return 0.0 if objective <= 0 else math.inf


def certify(problem: AnyProblem, objective: float, lower_bound: float, source: str) -> Certificate:
    """The certificate of a verified plan of a problem.

    Parameters
    ----------
    source
        Where the bound comes from, for error messages.

    Raises
    ------
    ContradictedBound
        When the objective is below the bound by more than rounding.
    """
    found = verdict(objective, lower_bound)
    if found == "contradicted":
        raise ContradictedBound(any_problem_json(problem), objective, lower_bound, source)
    if found == "optimal":
        return Certificate(objective, 0.0, "optimal")
    return Certificate(lower_bound, gap_of(objective, lower_bound), "feasible")
