"""A plan for every step: how soon there is a verified one, and how good it is after a fifth of a second.

Every step has other microbatches of the same distribution, and all steps have one memory limit. The quick
effort plans the same steps from scratch. Times depend on the machine and its load; the ratio of spans hardly
does, and the quick effort's plans do not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median, quantiles
from typing import Any

from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.search.step_planner import StepPlanner

from benchmarks.findings import Finding, at_most
from benchmarks.planner.lengths import LAWS, Distribution, PlanningInstance, costs_and_memory, limit

RANKS, MICROBATCHES = 8, 64
SHARES = (0.6, 1.0)
SECONDS = 0.2
"""Time of a search for a step."""
LEAST_STEPS = 4
FIRST_MILLISECONDS, LONGEST_SPAN = 20.0, 1.0
"""Targets: the median time to a first verified plan, and the mean ratio of spans to the quick effort's."""
HEADER = (
    f"{'run':18}{'first ms':>10}{'p95':>7}{'first span':>12}{'span':>8}{'worst':>8}{'quick s':>9}"
    f"{'early ms':>10}{'late ms':>9}\n"
)
"""Median and 95 % quantile of the time to a first plan; the spans of the first plan and of the plan after
:data:`SECONDS`, as ratios to the quick effort's (geometric means, and the worst one); the quick effort's
median time; the median time to a first plan in the first and in the last third of the steps."""

Values = dict[str, list[int]]


@dataclass(frozen=True)
class SteppedRun:
    """A training run; its memory limit is a share of what 1F1B holds in the median step."""

    law: Distribution
    share: float

    @property
    def name(self) -> str:
        """Such as ``tail-mem0.6``."""
        return f"{self.law.name}-mem{self.share}"

    def steps(self, count: int) -> tuple[Problem, list[Values]]:
        """The problem, and the features of every step's microbatches."""
        _, memory = costs_and_memory(RANKS)
        drawn = [
            PlanningInstance(self.law, RANKS, MICROBATCHES, self.share, seed=seed) for seed in range(count)
        ]
        per_token = memory["forward"]["tokens"]
        tokens = [[sum(own) for own in each.sequences] for each in drawn]
        limits = [limit(per_token, own, self.share) for own in tokens]
        needed = max(limit(per_token, own, 0.0) for own in tokens)
        document = drawn[0].document()
        document["memory"]["limit"] = max(round(median(limits)), needed)
        return parse_problem(document), [features_of(each.sequences) for each in drawn]


def features_of(sequences: Sequence[Sequence[int]]) -> Values:
    """Tokens and squared tokens of every microbatch."""
    return {
        "tokens": [sum(own) for own in sequences],
        "tokens_squared": [sum(length**2 for length in own) for own in sequences],
    }


def runs() -> list[SteppedRun]:
    """All runs."""
    return [SteppedRun(law, share) for law in LAWS.values() for share in SHARES]


@dataclass(frozen=True)
class StepRow:
    """One step: seconds to a first plan and of the quick effort, and the ratios of spans to the latter."""

    first_seconds: float
    quick_seconds: float
    first_ratio: float
    ratio: float


def per_step_table(chosen: Sequence[SteppedRun], count: int, write: Callable[[str], object]) -> list[Finding]:
    """Plan every step of the runs, print a row per run, and return times and ratios."""
    write(HEADER)
    findings = []
    for each in chosen:
        rows = list(planned(*each.steps(count)))
        first = median(1e3 * row.first_seconds for row in rows)
        ratio = geometric_mean([row.ratio for row in rows])
        write(_row(each.name, rows))
        findings += [
            Finding(f"{each.name}: first plan", first, "ms", at_most(FIRST_MILLISECONDS)),
            Finding(f"{each.name}: span to quick", ratio, "", at_most(LONGEST_SPAN)),
        ]
    return findings


def planned(problem: Problem, steps: Sequence[Values]) -> Iterator[StepRow]:
    """Plan the steps one after another."""
    planner = StepPlanner(problem)
    planner.first(steps[-1])  # kernels are loaded at their first call
    for values in steps:
        first, first_seconds = timed(planner.first, values)
        plan = planner.plan(values, seconds=SECONDS)
        quick, quick_seconds = timed(search, planner.problem_of(values), SearchOptions("quick"))
        span = quick.metrics.span
        yield StepRow(first_seconds, quick_seconds, first.metrics.span / span, plan.metrics.span / span)


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """A call's result, and its seconds."""
    began = time.perf_counter()
    found = call(*arguments)
    return found, time.perf_counter() - began


def _row(name: str, rows: Sequence[StepRow]) -> str:
    first = [1e3 * row.first_seconds for row in rows]
    third = max(1, len(rows) // 3)
    return (
        f"{name:18}{median(first):10.1f}{quantiles(first, n=20)[-1]:7.1f}"
        f"{geometric_mean([row.first_ratio for row in rows]):12.4f}"
        f"{geometric_mean([row.ratio for row in rows]):8.4f}{max(row.ratio for row in rows):8.4f}"
        f"{median(row.quick_seconds for row in rows):9.2f}"
        f"{median(first[:third]):10.1f}{median(first[-third:]):9.1f}\n"
    )
