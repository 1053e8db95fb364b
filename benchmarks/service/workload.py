"""Problems and plans for the benchmarks of the service."""

from __future__ import annotations

from typing import Any

from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.reading import parse_problem

SMALL: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "costs": {"forward": 1000, "backward_input": 1000, "backward_weight": 1000},
}
"""A problem that is planned faster than a process starts."""

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
"""A problem with an endless search."""

MANY_LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["deepseek-v3"]},
    "cluster": {"nodes": 5040, "gpus_per_node": 8, "device": "h100"},
    "global_batch": 55_440,
    "sequence_length": 4096,
}
"""A request of 300 bytes with 1,468,832 layouts."""


def plan_to_serve(pp_degree: int = 32, microbatches: int = 64) -> dict[str, Any]:
    """A plan of many ranks, as a large run fetches it at its start."""
    from zbv_solver.search.assemble import baseline_plan

    costs = {"forward": 1000, "backward_input": 1000, "backward_weight": 1000}
    problem = parse_problem({"pp_degree": pp_degree, "microbatches": microbatches, "costs": costs})
    plan: Plan = baseline_plan("1f1b", problem)
    return plan_json(plan)


def plan_to_see(pp_degree: int, microbatches: int) -> dict[str, Any]:
    """A plan of uneven stages, as a search finds it."""
    from zbv_solver.search.options import SearchOptions
    from zbv_solver.search.run import search

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
