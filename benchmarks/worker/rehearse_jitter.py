"""Rehearsals with jitter, compared with simulations: real ranks, executors and transfers, and drawn sleeps.

A rehearsal and its simulation have the same durations and latencies in every step. They differ by what the
simulation leaves out: the executor, and transfers that take longer than drawn. Every rehearsal is repeated
with the same draws, and the median of each step counts, because other programs disturb single steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from benchmarks.findings import Finding, Target
from benchmarks.worker.paired_ratios import median_interval
from benchmarks.worker.rehearse import RehearseWorkload, rehearsed

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan

MOST_PERCENT = 3.0
_JITTER = {"action": 0.05, "transfer": 0.2}


@dataclass(frozen=True)
class RehearseJitterWorkload:
    """Plans to rehearse."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sizes: tuple[tuple[int, int], ...] = ((4, 8), (8, 16))
    """Ranks and microbatches."""
    baselines: tuple[str, ...] = ("1f1b",)
    """Classical schedules."""
    shares: tuple[float, ...] = (0.6, 1.0)
    """Memory limits of zbv's plans, as multiples of the memory of 1F1B."""
    steps: int = 20
    """Measured steps of a rehearsal."""
    rounds: int = 3
    """Rehearsals of each plan, all with the same draws."""
    transfer_bytes: int = 1024
    """Size of every tensor between ranks. It is small, because the drawn latencies stand for the network:
    between processes of one host, TCP delays some larger tensors by 40 ms."""
    costs: RehearseWorkload = field(default_factory=RehearseWorkload)
    """The problem, except for its size and its memory limit."""

    def plans(self, pp_degree: int, microbatches: int) -> Iterator[tuple[str, Plan]]:
        """Titles and plans: the classical schedules, and zbv's for every limit."""
        from dataclasses import replace

        from zbv_solver.search.assemble import baseline_plan
        from zbv_solver.search.options import SearchOptions
        from zbv_solver.search.run import search

        def problem(share: float) -> Any:
            return replace(self.costs, memory=share).problem(pp_degree, microbatches)

        size = f"p={pp_degree} m={microbatches}"
        for name in self.baselines:
            yield f"{size} {name}", baseline_plan(name, problem(1.0))
        for share in self.shares:
            yield f"{size} zbv, limit {share:g}", search(problem(share), SearchOptions(effort="quick"))


def measure(workload: RehearseJitterWorkload) -> list[Finding]:
    """Rehearse every plan, and compare."""
    from dataclasses import replace

    costs = replace(workload.costs, steps=workload.steps, transfer_bytes=workload.transfer_bytes)
    return [
        finding
        for size in workload.sizes
        for name, plan in workload.plans(*size)
        for finding in findings(name, plan, [rehearsed(plan, costs, _JITTER) for _ in range(workload.rounds)])
    ]


def findings(name: str, plan: Plan, outcomes: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """The difference between measured and simulated p95, and what else is known about the steps.

    Parameters
    ----------
    outcomes
        Documents of ``zbv-worker rehearse --jitter … --json`` with the same draws.
    """
    import numpy as np
    from zbv_solver.problem.jitter import parse_jitter
    from zbv_solver.search.jitter import P95, simulate

    simulated, scale = outcomes[0]["simulated"], outcomes[0]["planned"] / plan.objective
    measured = np.median([outcome["steps"] for outcome in outcomes], axis=0)
    expected = np.array(simulated["steps"])
    p95 = float(np.quantile(measured, P95))
    difference = 100 * abs(p95 / float(np.quantile(expected, P95)) - 1)
    yield Finding(f"{name}: p95, difference", difference, "%", Target(MOST_PERCENT))
    yield Finding("  mean, excess", 100 * float(measured.mean() / expected.mean() - 1), "%")
    median, interval = median_interval(100 * (measured / expected - 1))
    yield Finding("  steps, median excess", median, "%", None, interval)
    yield Finding("  steps, largest excess", 100 * float((measured / expected).max() - 1), "%")
    disturbed = max(100 * float((np.array(each["steps"]) / expected).max() - 1) for each in outcomes)
    yield Finding("  steps of any round, largest excess", disturbed, "%")
    drawn = simulate(plan, parse_jitter(simulated["jitter"]), seed=simulated["seed"]).spans
    yield Finding("  p95, excess over 256 scenarios", 100 * (p95 / (drawn.p95_span * scale) - 1), "%")
