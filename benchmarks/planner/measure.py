"""Search one instance, and record what was found, when, and by which method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from zbv_solver.errors import InfeasibleMemory, InvalidPlan
from zbv_solver.plans.plan import Plan
from zbv_solver.search.incumbent import Cancelled, Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.planner.suite import Instance


@dataclass(frozen=True)
class Point:
    """The best plan and bound of a search at one moment."""

    seconds: float
    """Time since the start of the search."""
    objective: float
    lower_bound: float
    """In the problem's time unit; the plan was verified."""
    gap: float
    method: str


@dataclass(frozen=True)
class Outcome:
    """The result of a search of one instance."""

    instance: Instance
    options: SearchOptions
    """The options of this search, including those of the instance."""
    seconds: float
    """Duration of the whole search, with final verification and baselines."""
    curve: tuple[Point, ...] = ()
    """Every report in order; the last one is that of the plan. Empty if no plan fits the memory."""
    infeasible: str | None = None
    """Why no plan fits the memory, or None."""
    cut: str | None = None
    """The reason why the search ended early, or None."""

    @property
    def value(self) -> float:
        """Value of the problem's objective; inf without a plan."""
        return self.curve[-1].objective if self.curve else math.inf

    @property
    def lower_bound(self) -> float:
        """The lower bound; inf if there can be no plan."""
        return self.curve[-1].lower_bound if self.curve else math.inf

    @property
    def gap(self) -> float:
        """value / lower_bound - 1; inf without a plan."""
        return self.curve[-1].gap if self.curve else math.inf

    @property
    def method(self) -> str | None:
        """The method that found the plan."""
        return self.curve[-1].method if self.curve else None

    @property
    def first_plan_seconds(self) -> float | None:
        """Seconds until the first verified plan."""
        return self.curve[0].seconds if self.curve else None


def measure(
    instance: Instance,
    options: SearchOptions,
    watch: Callable[[Progress], None] | None = None,
    cancelled: Cancelled | None = None,
) -> Outcome:
    """Search an instance. ``watch`` receives every report; ``cancelled`` is polled as in a search."""
    own = instance.options(options)
    curve: list[Point] = []
    began = time.perf_counter()

    def report(found: Progress) -> None:
        now = time.perf_counter() - began
        curve.append(Point(now, found.objective, found.lower_bound, found.gap, found.method))
        if watch is not None:
            watch(found)

    try:
        plan = search(instance.problem, own, on_progress=report, cancelled=cancelled)
    except InfeasibleMemory as error:
        return Outcome(instance, own, time.perf_counter() - began, infeasible=_why(error))
    except InvalidPlan as error:
        # The user's input is right, so this must not look like wrong input.
        raise RuntimeError(
            f"{instance.name}: the search made an invalid plan. This is a bug in zbv; please report it."
        ) from error
    seconds = time.perf_counter() - began
    curve.append(_last_point(plan, seconds))
    return Outcome(instance, own, seconds, tuple(curve), cut=plan.provenance.extra.get("cut"))


def _last_point(plan: Plan, seconds: float) -> Point:
    metrics = plan.metrics
    return Point(seconds, plan.objective, metrics.lower_bound, metrics.gap, plan.provenance.method)


def _why(error: InfeasibleMemory) -> str:
    rank = error.ranks[0]
    return f"no plan fits: limit of rank {rank} is {error.limits[rank]:.8g}, needs {error.smallest[rank]:.8g}"
