"""Plans of problems whose microbatches differ: against bounds, classical schedules and the mean plan.

The mean plan is made for microbatches that all cost the average, by the same search, and run on the real
ones: in the given order, and in the order used in practice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, geometric_mean
from typing import get_args

from zbv_solver.construct.baselines import PRACTICE, without_limit
from zbv_solver.construct.rules import practice_order
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Baseline
from zbv_solver.problem.numeric import SEARCH_MEMORY, exceeds
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import compare
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import Timing, evaluate

from benchmarks.findings import Finding, at_least, at_most
from benchmarks.planner.lengths import LAWS, SHARES, LimitKind, PlanningInstance
from benchmarks.planner.outcome import SAME_FIGURE

LEAST_GAIN_PERCENT = {0.6: 12.0, 1.0: 4.0}
"""Over the mean plan in the order used in practice, by memory limit; geometric means."""
LARGEST_GAP_PERCENT = {0.6: 5.0, 1.0: 1.0}
"""Means by memory limit."""
MOST_SECONDS = 10.0
WARM_UP = PlanningInstance(LAWS["web"], 4, 8, 0.6)
"""Planned before the first instance, so that no measurement includes loading code."""
MEAN_PLAN = "mean"
FITTING = "mean-fitting"
MOST_TIGHTENINGS = 4
HEADER = (
    f"{'instance':24}{'s':>6}{'span':>12}{'gap':>8}  {'shortest that fits':24}{'gain':>6}"
    f"{'given':>13}{'practice':>13}{'fitting':>9}\n"
)
"""Seconds, span and gap of the plan; the shortest other schedule that keeps the limit. Then by how many
percent the plan is shorter than that one, than the mean plan in the given order and in that of practice (with
its memory as a multiple of the limit), and than a mean plan made within less memory, so that it fits."""


@dataclass(frozen=True)
class Rival:
    """Another schedule; ``needs`` is the largest peak memory of a rank as a multiple of its limit."""

    name: str
    value: float
    needs: float
    fits: bool


@dataclass(frozen=True)
class UnequalRow:
    """One instance."""

    instance: PlanningInstance
    seconds: float
    value: float
    gap: float
    """Of the plan."""
    rivals: tuple[Rival, ...]
    """The baselines of the plan, and the mean plan in both orders."""

    @property
    def best(self) -> Rival | None:
        """The shortest rival that keeps the limit; None without any."""
        return min((each for each in self.rivals if each.fits), key=lambda each: each.value, default=None)

    def rival(self, name: str) -> Rival | None:
        """The rival with this name, if there is one."""
        return next((each for each in self.rivals if each.name == name), None)

    def shorter(self, rival: Rival) -> float:
        """By how many percent the plan is shorter than a rival."""
        return 100 * (1 - self.value / rival.value)


def unequal_table(
    chosen: Sequence[PlanningInstance], options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Plan every instance, write its row as soon as it is known, and return the findings."""
    search(parse_problem(WARM_UP.document()), options)
    write(HEADER)
    rows = []
    for each in chosen:
        rows.append(measure_unequal(each, options))
        write(unequal_line(rows[-1]))
    return list(unequal_findings(rows))


def measure_unequal(instance: PlanningInstance, options: SearchOptions) -> UnequalRow:
    """Plan an instance and its mean microbatch."""
    problem = parse_problem(instance.document())
    began = time.perf_counter()
    plan = search(problem, options)
    seconds = time.perf_counter() - began
    baselines = [_rival(each.name, problem, each) for each in compare(problem)]
    rivals = (*baselines, *mean_plans(problem, options))
    return UnequalRow(instance, seconds, plan.objective, plan.metrics.gap, rivals)


def mean_plans(problem: Problem, options: SearchOptions) -> Iterator[Rival]:
    """Plans for the mean microbatch, run on the real ones.

    ``mean`` in the given order; ``mean-practice`` in the order used in practice; ``mean-fitting`` in the
    latter, made within less and less memory until the real microbatches fit (missing if that fails).
    """
    averaged, practice = problem.averaged(), practice_order(problem)

    def found(name: str, orders: Orders) -> Rival:
        return _rival(name, problem, evaluate(without_limit(problem), orders))

    orders = search(averaged, options).orders
    yield found(MEAN_PLAN, orders)
    tried = found(MEAN_PLAN + PRACTICE, orders.renamed(practice))
    yield tried
    share = 1.0
    for _ in range(MOST_TIGHTENINGS):
        if tried.fits:
            yield replace(tried, name=FITTING)
            return
        share /= tried.needs
        limit = tuple(share * each for each in problem.memory.limit or ())
        tightened = replace(averaged, memory=replace(averaged.memory, limit=limit))
        try:
            orders = search(tightened, options).orders
        except InfeasibleMemory:
            return
        tried = found(FITTING, orders.renamed(practice))
    if tried.fits:
        yield tried


def _rival(name: str, problem: Problem, found: Baseline | Timing) -> Rival:
    pairs = list(zip(found.peak_memory, problem.memory.limit or found.peak_memory, strict=True))
    return Rival(
        name,
        objective_value(problem.objective, found),
        max(peak / limit for peak, limit in pairs),
        not any(exceeds(peak, limit, SEARCH_MEMORY) for peak, limit in pairs),
    )


def unequal_line(row: UnequalRow) -> str:
    """A row as text."""
    best = row.best
    shortest, gain = ("–", "–") if best is None else (best.name, f"{row.shorter(best):.1f}")
    mean = ""
    for name, width in ((MEAN_PLAN, 13), (MEAN_PLAN + PRACTICE, 13), (FITTING, 9)):
        each = row.rival(name)
        needs = f" ({each.needs:.2f})" if each is not None and width > 9 else ""
        mean += ("–" if each is None else f"{row.shorter(each):.1f}{needs}").rjust(width)
    figures = f"{row.seconds:6.1f}{row.value:12.5g}{row.gap:8.2%}"
    return f"{row.instance.name:24}{figures}  {shortest:24}{gain:>6}{mean}\n"


def unequal_findings(rows: Iterable[UnequalRow]) -> Iterator[Finding]:
    """The numbers with targets."""
    rows = tuple(rows)
    losses = sum(row.best is not None and row.value > row.best.value * (1 + SAME_FIGURE) for row in rows)
    yield Finding("plans longer than another schedule that fits", losses, "", at_most(0))
    for kind, share in product(get_args(LimitKind), SHARES):
        own = [row for row in rows if (row.instance.limit_kind, row.instance.share) == (kind, share)]
        if not own:
            continue
        about = f"{kind}{share}, {len(own)} instances"
        fitting = [row.value / row.best.value for row in own if row.best is not None]
        if fitting:
            yield Finding(f"{about}: shorter than the best that fits", _shorter_in_mean(fitting), "%")
        for name, than, least in (
            (MEAN_PLAN + PRACTICE, "the mean plan in the order of practice", LEAST_GAIN_PERCENT.get(share)),
            (FITTING, "a mean plan that fits, in the order of practice", None),
        ):
            ratios = [row.value / found.value for row in own if (found := row.rival(name)) is not None]
            if ratios:
                target = None if least is None else at_least(least)
                yield Finding(f"  shorter than {than} ({len(ratios)})", _shorter_in_mean(ratios), "%", target)
        gaps = [100 * row.gap for row in own]
        yield Finding("  certified gap, mean", fmean(gaps), "%", at_most(LARGEST_GAP_PERCENT.get(share)))
        yield Finding("  certified gap, largest", max(gaps), "%")
    yield Finding(
        "seconds of a search, largest", max(row.seconds for row in rows), "s", at_most(MOST_SECONDS)
    )


def _shorter_in_mean(ratios: Sequence[float]) -> float:
    """Percent by which plans are shorter, in the geometric mean of their ratios."""
    return 100 * (1 - geometric_mean(ratios))
