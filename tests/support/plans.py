"""Plans for tests of the worker: problems of equal stages, and plan files without metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import identity
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement, PlacementKind
from zbv_solver.problem.writing import problem_json


def unit_problem(p: int, microbatches: int, kind: str = "v") -> Problem:
    """A problem whose actions and transfers all take 1, with unlimited memory."""
    placement = Placement.of(cast("PlacementKind", kind), p)
    ones = (1.0,) * placement.n_stages
    return Problem(placement, microbatches, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))


def plan_document(problem: Problem, orders: Orders) -> dict[str, Any]:
    """A plan file's content."""
    document, ranks = problem_json(problem), orders.all_text()
    return {"problem": document, "ranks": ranks, "plan_id": identity(document, ranks)}


def write_plan(path: Path, problem: Problem, orders: Orders) -> Path:
    """Write a plan file; returns its path."""
    path.write_text(json.dumps(plan_document(problem, orders)))
    return path
