"""The problems of a frontier: one for each memory limit, and others whose plans or bounds apply to it.

The functions hash dozens of documents, so they run in another process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbv_solver.documents.text import numbers
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import LARGEST, at_limit
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS

from zbv_service.documents.packing import problem_key
from zbv_service.documents.shared import OptionsDocument
from zbv_service.searches.searches import request_key

FINE = 0.025
"""Plans are also looked up at multiples of this fraction, because forms offer these limits."""


@dataclass(frozen=True)
class LimitedProblem:
    """The problem of one point; see :class:`zbv_service.frontier.points.Point`.

    ``key`` is its hash where stored plans are found by it.
    """

    at: float
    limit: float
    problem: dict[str, Any]
    key: str = ""


@dataclass(frozen=True)
class FrontierProblems:
    """The problems of a frontier.

    Attributes
    ----------
    points
        The points, by ascending limit.
    keys
        The hashes of all problems whose stored plans matter, each with the limit up to which a lower bound
        for that problem holds; empty if layers are cut again for every limit.
    requests
        The same for searches, by the key of their request.
    """

    points: tuple[LimitedProblem, ...]
    keys: dict[str, float]
    requests: dict[str, float]


def problems_of_stages(problem: Problem, grid: Sequence[float]) -> FrontierProblems:
    """The problem at the fractions of a grid, at fractions in between, at its own limit and without one."""
    base = problem_json(problem)
    own = memory_fraction.of_limit(problem)
    keys = {
        problem_key(_limited(base, None)): math.inf,
        problem_key(base): math.inf if own is None else own,
    }
    points = []
    least = grid[0] * (1 + MEMORY_TOLERANCE)
    fine = (round(count * FINE, 3) for count in range(1, round(LARGEST / FINE) + 1))
    for fraction in sorted({*grid, *(each for each in fine if each > least)}):
        limits = memory_fraction.limits(problem, fraction)
        document = _limited(base, numbers(limits))
        key = problem_key(document)
        keys[key] = fraction
        if fraction in grid:
            points.append(LimitedProblem(fraction, max(limits), document, key))
    return FrontierProblems(tuple(points), keys, _requests([(each.problem, each.at) for each in points]))


def problems_of_layers(question: LayeredProblem, grid: Sequence[float]) -> FrontierProblems:
    """The layers at the limits of a grid, at their own limit and without one.

    Plans are found by their searches alone: the problem of a plan is cut already, and says nothing about
    other limits.
    """
    own = layered_json(question)
    points = [LimitedProblem(limit, limit, layered_json(at_limit(question, limit))) for limit in grid]
    others = [(_limited(own, None), math.inf), (own, holds_up_to(question.limit))]
    requests = _requests([*others, *((each.problem, each.at) for each in points)])
    return FrontierProblems(tuple(points), {}, requests)


def holds_up_to(limit: Sequence[float] | None) -> float:
    """The largest limit, equal on all ranks, at which a bound for these limits per rank holds."""
    return math.inf if limit is None else min(limit)


def _limited(document: dict[str, Any], limit: Any) -> dict[str, Any]:
    return {**document, "memory": {**document["memory"], "limit": limit}}


def _requests(documents: Sequence[tuple[dict[str, Any], float]]) -> dict[str, float]:
    """The keys of searches of any effort for these documents, each with its document's limit."""
    return {
        request_key(document, OptionsDocument(effort=effort).stored()): at
        for document, at in documents
        for effort in EFFORTS
    }
