"""The problems that benchmarks of the service submit."""

from __future__ import annotations

from typing import Any

from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.reading import parse_problem

SMALL: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "costs": {"forward": 1000, "backward_input": 1000, "backward_weight": 1000},
}
"""Planned in less time than it takes to start its process."""

LONG: dict[str, Any] = {
    "pp_degree": 8,
    "microbatches": 64,
    "costs": {
        "forward": [1000 + 37 * (s % 5) for s in range(16)],
        "backward_input": 1100,
        "backward_weight": 700,
        "p2p": 50,
    },
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 20},
}
"""Searched for as long as it is let."""


def plan_to_serve(pp_degree: int = 32, microbatches: int = 64) -> dict[str, Any]:
    """The document of a plan of many ranks: what a large run fetches at its start."""
    from zbv_solver.search.search import baseline_plan

    costs = {"forward": 1000, "backward_input": 1000, "backward_weight": 1000}
    problem = parse_problem({"pp_degree": pp_degree, "microbatches": microbatches, "costs": costs})
    plan: Plan = baseline_plan("1f1b", problem)
    return plan_json(plan)


def plan_to_see(pp_degree: int, microbatches: int) -> dict[str, Any]:
    """The document of a plan as a search finds it, with stages that differ: what people look at."""
    from zbv_solver.search.search import SearchOptions, search

    stages = range(2 * pp_degree)
    problem = parse_problem(
        {
            "pp_degree": pp_degree,
            "microbatches": microbatches,
            "costs": {**LONG["costs"], "forward": [1000 + 37 * (s % 5) for s in stages]},
            "memory": {**LONG["memory"], "limit": 4 * pp_degree},
            "units": {"time": "us"},
        }
    )
    return plan_json(search(problem, SearchOptions(effort="quick")))
