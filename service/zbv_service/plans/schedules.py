"""Classical schedules as whole plans, and bounds at several memory limits, for comparison on pages."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from zbv_solver.construct.baselines import without_limit
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import at_limit
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem

from zbv_service.compute.cache import Cache
from zbv_service.compute.computations import Computations
from zbv_service.documents.problems import Question, require_stages

CACHED_PLANS = 24
CACHED_BOUNDS = 256


class Schedules:
    """Computes schedules and bounds in other processes, and caches them; a large one takes half a second."""

    def __init__(self, computations: Computations):
        self._computations = computations
        self._plans: Cache[Plan] = Cache(CACHED_PLANS)
        self._bounds: Cache[tuple[float, ...]] = Cache(CACHED_BOUNDS)

    async def baseline(self, problem: Problem, name: str) -> Plan:
        """The classical schedule with this name for a problem's model.

        Raises
        ------
        InvalidInput
            The problem has too many stages.
        ProblemError
            503: too many computations are waiting.
        """
        require_stages(problem)
        asked = _Asked.of(problem)
        run = self._computations.run
        return await self._plans.get(f"{name} {asked.key}", lambda: run(partial(baseline_of, name), asked))

    async def bounds(self, problem: Problem, fractions: Sequence[float]) -> tuple[float, ...]:
        """A lower bound of the objective at each fraction of 1F1B's memory.

        Raises
        ------
        InvalidInput
            The problem has too many stages.
        ProblemError
            503: too many computations are waiting.
        """
        require_stages(problem)
        asked = _Asked.of(without_limit(problem))
        return await self._bounds_of(asked, "bounds", partial(bounds_of, tuple(fractions)), fractions)

    async def limits(self, problem: LayeredProblem) -> tuple[float, ...]:
        """The memory limits of a frontier of layers in increasing order, from the smallest feasible one.

        Raises
        ------
        InvalidInput
            The layers have no memory.
        ProblemError
            503: too many computations are waiting.
        """
        return await self._bounds_of(_Asked.of(replace(problem, limit=None)), "limits", limits_of, ())

    async def floors(self, problem: LayeredProblem, limits: Sequence[float]) -> tuple[float, ...]:
        """For each limit per rank, a lower bound on the objective of all cuts that fit.

        Raises
        ------
        ProblemError
            503: too many computations are waiting.
        """
        asked = _Asked.of(replace(problem, limit=None))
        return await self._bounds_of(asked, "floors", partial(floors_of, tuple(limits)), limits)

    async def _bounds_of(
        self,
        asked: _Asked,
        what: str,
        make: Callable[[_Asked], tuple[float, ...]],
        places: Sequence[float],
    ) -> tuple[float, ...]:
        key = f"{what} {asked.key} {' '.join(map(repr, places))}"
        return await self._bounds.get(key, lambda: self._computations.run(make, asked))


@dataclass(frozen=True)
class _Asked:
    """A problem without its derived values, for another process."""

    key: str
    content: bytes

    @classmethod
    def of(cls, question: Question) -> _Asked:
        """Take a problem apart, which is much faster than writing its document for many stages."""
        parts = {each.name: getattr(question, each.name) for each in fields(question)}
        content = pickle.dumps((type(question), parts), protocol=5)
        return cls(hashlib.sha256(content).hexdigest(), content)

    @property
    def question(self) -> Any:
        """The problem."""
        kind, parts = pickle.loads(self.content)
        return kind(**parts)


def baseline_of(name: str, asked: _Asked) -> Plan:
    """A classical schedule of a problem; runs in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.search.search import baseline_plan

    return baseline_plan(name, asked.question)


def bounds_of(fractions: Sequence[float], asked: _Asked) -> tuple[float, ...]:
    """Bounds of a problem at these fractions; runs in another process."""
    from zbv_solver.bounds import lower_bound

    problem = asked.question
    limited = (memory_fraction.at_fraction(problem, fraction) for fraction in fractions)
    return tuple(lower_bound(each).value for each in limited)


def limits_of(asked: _Asked) -> tuple[float, ...]:
    """The limits of a frontier of layers; runs in another process."""
    from zbv_solver.frontiers.by_layers import limits

    return tuple(limits(asked.question))


def floors_of(limits: Sequence[float], asked: _Asked) -> tuple[float, ...]:
    """Bounds on the cuts of layers at these limits; runs in another process."""
    from zbv_solver.frontiers.by_layers import floor

    problem = asked.question
    return tuple(floor(at_limit(problem, limit)) for limit in limits)
