"""Classical schedules as whole plans, and bounds at several memory limits: what pages draw beside a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from zbv_solver import memory_fraction
from zbv_solver.frontier import at_limit
from zbv_solver.layers.document import parse_layered
from zbv_solver.layers.layered_problem import LayeredProblem
from zbv_solver.layers.reading import to_layered
from zbv_solver.layers.writing import layered_json
from zbv_solver.plan import Plan
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem, problem_json

from zbv_service.cache import Cache
from zbv_service.packing import problem_key
from zbv_service.searches.aside import Aside

CACHED_PLANS = 24
CACHED_BOUNDS = 256


class Schedules:
    """Makes them once, in processes of their own; a large one takes half a second."""

    def __init__(self, aside: Aside):
        self._aside = aside
        self._plans: Cache[dict[str, Any]] = Cache(CACHED_PLANS)
        self._bounds: Cache[dict[str, Any]] = Cache(CACHED_BOUNDS)

    async def baseline(self, problem: Problem, name: str) -> Plan:
        """A classical schedule of a problem's model, by its name.

        Raises
        ------
        ProblemError
            503 when too many others wait already.
        """
        document = problem_json(problem)
        make = partial(baseline_of, name)
        made = await self._plans.get(
            f"{name} {problem_key(document)}", lambda: self._aside.run(make, document)
        )
        plan: Plan = made["plan"]
        return plan

    async def bounds(self, problem: Problem, fractions: Sequence[float]) -> tuple[float, ...]:
        """A lower bound of the objective at each fraction of 1F1B's memory.

        Raises
        ------
        ProblemError
            503 when too many others wait already.
        """
        document = problem_json(problem)
        document["memory"] = {**document["memory"], "limit": None}
        make = partial(bounds_of, tuple(fractions))
        key = f"{problem_key(document)} {' '.join(map(repr, fractions))}"
        made = await self._bounds.get(key, lambda: self._aside.run(make, document))
        return tuple(made["bounds"])

    async def limits(self, problem: LayeredProblem) -> tuple[float, ...]:
        """The memory limits of a frontier of layers, the smallest feasible one first.

        Raises
        ------
        InvalidInput
            When the layers say nothing about memory.
        ProblemError
            503 when too many others wait already.
        """
        document = _without_limit(problem)
        key = f"limits {problem_key(document)}"
        made = await self._bounds.get(key, lambda: self._aside.run(limits_of, document))
        return tuple(made["limits"])

    async def floors(self, problem: LayeredProblem, limits: Sequence[float]) -> tuple[float, ...]:
        """A lower bound on the objective of every cut that fits, at each of these limits of every rank.

        Raises
        ------
        ProblemError
            503 when too many others wait already.
        """
        document, make = _without_limit(problem), partial(floors_of, tuple(limits))
        key = f"{problem_key(document)} {' '.join(map(repr, limits))}"
        made = await self._bounds.get(key, lambda: self._aside.run(make, document))
        return tuple(made["floors"])


def _without_limit(problem: LayeredProblem) -> dict[str, Any]:
    document = layered_json(problem)
    document["memory"] = {**document["memory"], "limit": None}
    return document


def baseline_of(name: str, document: dict[str, Any]) -> dict[str, Any]:
    """A classical schedule of a normalised problem document; runs in a process of its own."""
    # Imported here: the solver's kernels take a second that the service should not spend.
    from zbv_solver.search import baseline_plan

    return {"plan": baseline_plan(name, parse_problem(document))}


def bounds_of(fractions: Sequence[float], document: dict[str, Any]) -> dict[str, Any]:
    """Bounds of a normalised problem document at these fractions; runs in a process of its own."""
    from zbv_solver.bounds import lower_bound

    problem = parse_problem(document)
    limited = (memory_fraction.at_fraction(problem, fraction) for fraction in fractions)
    return {"bounds": [lower_bound(each).value for each in limited]}


def limits_of(document: dict[str, Any]) -> dict[str, Any]:
    """The limits of the frontier of a normalised layered document; runs in a process of its own."""
    from zbv_solver.frontier_layers import limits

    return {"limits": limits(to_layered(parse_layered(document)))}


def floors_of(limits: Sequence[float], document: dict[str, Any]) -> dict[str, Any]:
    """Bounds of a normalised layered document at these limits; runs in a process of its own."""
    from zbv_solver.frontier_layers import floor

    problem = to_layered(parse_layered(document))
    return {"floors": [floor(at_limit(problem, limit)) for limit in limits]}
