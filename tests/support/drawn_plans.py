"""Plans for pictures and pages."""

from __future__ import annotations

from typing import Any

from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

MEMORY = {"forward": 2, "backward_input": -1, "backward_weight": -1, "static": 1, "limit": 14}
COSTS = {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50}


def plan_of(p: int, m: int, **more: Any) -> Plan:
    """A plan that was searched, with a memory limit."""
    document = {"pp_degree": p, "microbatches": m, "costs": COSTS, "memory": MEMORY, **more}
    return search(parse_problem(document), SearchOptions(effort="quick"))


def one_by_one(p: int, m: int, **more: Any) -> Plan:
    """One microbatch after the other: poor, but made in no time at any size."""
    problem = parse_problem({"pp_degree": p, "microbatches": m, "costs": COSTS, **more})
    rank_of, stages = problem.placement.rank_of, range(problem.n_stages)
    ranks: list[list[Action]] = [[] for _ in range(p)]
    for j in range(m):
        for s in stages:
            ranks[rank_of[s]].append(Action(s, "F", j))
        for s in reversed(stages):
            ranks[rank_of[s]] += [Action(s, "I", j), Action(s, "W", j)]
    return make_plan(problem, Orders.from_actions(ranks), method="sequential", lower_bound=0.0)
