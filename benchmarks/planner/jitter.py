"""Plans when durations vary: chosen for jitter, chosen without it, and the classical schedules.

Every schedule of an instance is simulated in the same scenarios, which no search has seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.plans.plan import Spans
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.problem import Problem
from zbv_solver.search.jitter import P95, search_for_jitter, simulate
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate

from benchmarks.findings import Finding, Target, at_least
from benchmarks.planner.suite import parse_suite

SUITE = Path(__file__).parents[1] / "public.json"
NAMES = (
    "unit_p8_m16",
    "het_rand0_p8_m32_mem1.0",
    "het_head2_p8_m32_mem0.5",
    "real_6.2B_p8_m32_mem0.4",
    "real_1.5B_p8_m24_mem1.0",
    "typ_p8_m32",
    "het_head1_5_p16_m64_mem1.0",
    "real_v6.2B_p16_m48_mem1.0",
    "attn_p16_m64",
)
"""Instances of the suite; their limits are replaced."""
SHARES = (0.6, 1.0)
"""Memory limits, as shares of the activation memory of 1F1B on its fullest rank."""
JITTER = Jitter.of(action=0.05, transfer=0.2)
SCENARIOS_SEED = 1_000_003
LEAST_GAIN_PERCENT = 1.0


@dataclass(frozen=True)
class JitterRow:
    """One instance."""

    name: str
    span: float
    """Without jitter, of the plan that was chosen without jitter."""
    planned: Spans
    chosen: Spans
    """In the scenarios, of the plans that were chosen without and with jitter."""
    fitting: float | None
    any: float
    """The smallest p95 of the classical schedules that keep the limit (None if none does), and of all."""
    planned_seconds: float
    chosen_seconds: float
    """Of the searches."""

    @property
    def gain(self) -> float:
        """By how many percent of its p95 the plan chosen with jitter is shorter than the other plan."""
        return 100 * (1 - self.chosen.p95_span / self.planned.p95_span)


def instances() -> list[tuple[str, Problem]]:
    """Names and problems."""
    suite = {each.name: each.problem for each in parse_suite(json.loads(SUITE.read_text()), SUITE.name)}
    return [
        (f"{name.partition('_mem')[0]}_mem{share}", _limited(suite[name], share))
        for name in NAMES
        for share in SHARES
    ]


def _limited(problem: Problem, share: float) -> Problem:
    """The problem for the span, in a share of the activation memory of 1F1B."""
    of, orders = baseline("1f1b", problem)
    peaks = evaluate(without_limit(of), orders).peak_memory
    fullest = max(peak - static for peak, static in zip(peaks, of.memory.static, strict=True))
    limit = tuple(static + share * fullest for static in problem.memory.static)
    return replace(problem, memory=replace(problem.memory, limit=limit), objective="span")


def measure_jitter(name: str, problem: Problem, options: SearchOptions, scenarios: int) -> JitterRow:
    """Search with and without jitter, and simulate."""
    began = time.perf_counter()
    planned = search(problem, options)
    between = time.perf_counter()
    chosen = search_for_jitter(problem, options, jitter=JITTER, quantile=P95)
    ended = time.perf_counter()
    found = simulate(planned, JITTER, scenarios=scenarios, seed=SCENARIOS_SEED)
    other = simulate(chosen, JITTER, scenarios=scenarios, seed=SCENARIOS_SEED)
    return JitterRow(
        name=name,
        span=planned.metrics.span,
        planned=found.spans,
        chosen=other.spans,
        fitting=min((each.spans.p95_span for each in found.baselines if each.fits), default=None),
        any=min(each.spans.p95_span for each in found.baselines),
        planned_seconds=between - began,
        chosen_seconds=ended - between,
    )


def jitter_findings(rows: Iterable[JitterRow]) -> Iterator[Finding]:
    """The numbers with targets."""
    rows = tuple(rows)
    gains = [row.gain for row in rows]
    yield Finding(
        "p95 gained by choosing with jitter, mean", sum(gains) / len(gains), "%", at_least(LEAST_GAIN_PERCENT)
    )
    yield Finding("  smallest of an instance", min(gains), "%")
    fitting = [row.chosen.p95_span / row.fitting for row in rows if row.fitting is not None]
    if fitting:
        yield Finding("p95 / best schedule that fits, largest", max(fitting), "", Target(1.0))
    yield Finding(
        "p95 / best schedule without limit, largest", max(row.chosen.p95_span / row.any for row in rows)
    )


HEADER = (
    "mean and p95 as multiples of the span of the plan without jitter; best p95 of the classical schedules\n"
    f"{'instance':26} {'span':>9} {'planned':>15} {'chosen':>15} {'gain':>7} {'fitting':>8} {'any':>7} "
    f"{'seconds':>14}\n"
)


def jitter_line(row: JitterRow) -> str:
    """A row as text."""
    planned, chosen = (
        f"{spans.expected_span / row.span:.4f} {spans.p95_span / row.span:.4f}"
        for spans in (row.planned, row.chosen)
    )
    fitting = "–" if row.fitting is None else f"{row.fitting / row.span:.4f}"
    seconds = f"{row.planned_seconds:.1f} {row.chosen_seconds:.1f}"
    return (
        f"{row.name:26} {row.span:9.6g} {planned:>15} {chosen:>15} {row.gain:>+6.2f}% {fitting:>8} "
        f"{row.any / row.span:7.4f} {seconds:>14}\n"
    )


def jitter_table(
    problems: Iterable[tuple[str, Problem]],
    options: SearchOptions,
    scenarios: int,
    out: Callable[[str], object],
) -> list[Finding]:
    """Measure every instance, write its row as soon as it is known, and return the findings."""
    out(HEADER)
    rows = []
    for name, problem in problems:
        rows.append(measure_jitter(name, problem, options, scenarios))
        out(jitter_line(rows[-1]))
    return list(jitter_findings(rows))
