"""Plans for tests of the worker: problems of equal stages, and plan files without metrics."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, cast

from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, identity
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement, PlacementKind
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from support.selfcheck import random_orders

V_OF_TWO = Orders.from_text(
    [
        ["0F0", "0F1", "3F0", "3I0", "3F1", "3I1", "0I0", "0W0", "0I1", "0W1", "3W0", "3W1"],
        ["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2I1", "1I1", "2W0", "1W0", "2W1", "1W1"],
    ]
)
"""The lists of two ranks of a V with two microbatches."""


def unit_problem(p: int, microbatches: int, kind: str = "v") -> Problem:
    """A problem whose actions and transfers all take 1, with unlimited memory."""
    placement = Placement.of(cast("PlacementKind", kind), p)
    ones = (1.0,) * placement.n_stages
    return Problem(placement, microbatches, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))


def random_plan(p: int = 2, microbatches: int = 3, seed: int = 0, kind: str = "v") -> tuple[Problem, Orders]:
    """A problem of equal stages with a random valid order, in which some backwards are fused."""
    problem = unit_problem(p, microbatches, kind)
    return problem, random_orders(problem, Random(seed))


def searched(problem: Problem) -> Plan:
    """The plan that a quick search finds."""
    return search(problem, SearchOptions(effort="quick"))


def plan_document(problem: Problem, orders: Orders) -> dict[str, Any]:
    """A plan file's content."""
    document, ranks = problem_json(problem), orders.all_text()
    return {"problem": document, "ranks": ranks, "plan_id": identity(document, ranks)}


def write_plan(path: Path, problem: Problem, orders: Orders) -> Path:
    path.write_text(json.dumps(plan_document(problem, orders)))
    return path
