"""Classical schedules as whole plans, and bounds at several memory limits, for comparison on pages."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from zbv_solver.construct.baselines import without_limit
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import at_limit
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem

from zbv_service.compute.cache import Cache
from zbv_service.compute.computations import Computations
from zbv_service.documents.problems import Question, require_stages

T = TypeVar("T")
CACHED_PLANS = 24
CACHED_BOUNDS = 256


class Schedules:
    """Computes schedules and bounds in other processes, and caches them; a large one takes half a second.

    All methods raise :class:`ProblemError` 503 when too many computations are waiting.
    """

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
        """
        require_stages(problem)
        return await self._made(self._plans, baseline_of, problem, name)

    async def bounds(self, problem: Problem, fractions: Sequence[float]) -> tuple[float, ...]:
        """A lower bound of the objective at each fraction of 1F1B's memory.

        Raises
        ------
        InvalidInput
            The problem has too many stages.
        """
        require_stages(problem)
        return await self._made(self._bounds, bounds_of, without_limit(problem), *fractions)

    async def limits(self, problem: LayeredProblem) -> tuple[float, ...]:
        """The memory limits of a frontier of layers in increasing order, from the smallest feasible one.

        Raises
        ------
        InvalidInput
            The layers have no memory.
        """
        return await self._made(self._bounds, limits_of, replace(problem, limit=None))

    async def floors(self, problem: LayeredProblem, limits: Sequence[float]) -> tuple[float, ...]:
        """For each limit per rank, a lower bound on the objective of all cuts that fit."""
        return await self._made(self._bounds, floors_of, replace(problem, limit=None), *limits)

    async def _made(
        self, cache: Cache[T], make: Callable[..., T], question: Question, *arguments: str | float
    ) -> T:
        """The cached result of ``make(packed question, *arguments)``."""
        packed = _pack(question)
        key = f"{make.__name__} {hashlib.sha256(packed).hexdigest()} {arguments}"
        run = partial(_with_arguments, make, arguments)
        return await cache.get(key, lambda: self._computations.run(run, packed))


def _with_arguments(make: Callable[..., T], arguments: Sequence[str | float], packed: bytes) -> T:
    return make(_unpack(packed), *arguments)


def _pack(question: Question) -> bytes:
    """The fields of a problem without derived values; much faster than its document for many stages."""
    parts = {each.name: getattr(question, each.name) for each in fields(question)}
    return pickle.dumps((type(question), parts), protocol=5)


def _unpack(packed: bytes) -> Any:
    kind, parts = pickle.loads(packed)
    return kind(**parts)


def baseline_of(problem: Problem, name: str) -> Plan:
    """A classical schedule of a problem; this and the functions below run in another process."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.search.search import baseline_plan

    return baseline_plan(name, problem)


def bounds_of(problem: Problem, *fractions: float) -> tuple[float, ...]:
    """Lower bounds of a problem at fractions of 1F1B's memory."""
    from zbv_solver.bounds import lower_bound

    limited = (memory_fraction.at_fraction(problem, fraction) for fraction in fractions)
    return tuple(lower_bound(each).value for each in limited)


def limits_of(problem: LayeredProblem) -> tuple[float, ...]:
    """The limits of a frontier of layers."""
    from zbv_solver.frontiers.by_layers import limits

    return tuple(limits(problem))


def floors_of(problem: LayeredProblem, *limits: float) -> tuple[float, ...]:
    """Bounds on all cuts of layers at limits per rank."""
    from zbv_solver.frontiers.by_layers import floor

    return tuple(floor(at_limit(problem, limit)) for limit in limits)
