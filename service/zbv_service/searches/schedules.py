"""Classical schedules as whole plans, and bounds at several memory limits: what pages draw beside a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from zbv_solver import memory_fraction
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
