"""Packings of global batches: against other methods with the same search, and against what is usual.

What is usual: microbatches of equal tokens in the order of arrival, dealt to the replicas in turn, run by a
plan for the mean microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.packing.arrange import Arrangement, Replicas, equal_tokens
from zbv_solver.packing.batch import Batch, parse_batch
from zbv_solver.packing.packing import Packing, pack, packer_of, plans_of, step_time
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate

from benchmarks.findings import Finding, at_least
from benchmarks.planner.lengths import PackingInstance
from benchmarks.planner.packers import PACKERS

LEAST_GAIN_PERCENT = 15.0
"""On batches with a long tail, against what is usual."""
USUAL = "equal tokens, given order, mean plan"
CLASSICAL = "equal tokens, given order, 1F1B"
HEADER = (
    f"{'batch':27}{'step':>10}{'gap':>7}{'m':>5}{'s':>6}"
    f"{'ff':>7}{'eq':>7}{'bw':>7}{'dp':>7}{'mean':>8} {'1f1b':>8}\n"
)
"""Step, gap to the bound over all packings, microbatches, seconds; then by how many percent the step is
shorter than those of first-fit, equal-tokens, balanced-work, dynamic-program, and of the mean plan and 1F1B
in the given order. A star: that one exceeds the memory limit."""


@dataclass(frozen=True)
class GivenOrder:
    """The step of the slowest replica, and whether every replica keeps the memory limit."""

    name: str
    step_time: float
    fits: bool


def packing_table(
    chosen: Sequence[PackingInstance], options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Pack, print a row per batch, and return the gains."""
    write(HEADER)
    findings = []
    for each in chosen:
        batch = parse_batch(each.document())
        found = pack(batch, options)
        others = [plans_of(batch, each, options) for each in other_packings(batch)]
        usual = in_given_order(batch, options)
        gain = shorter(found.step_time, usual[0].step_time)
        write(_row(each.name, found, [*map(step_time, others)], usual))
        sys.stdout.flush()
        target = at_least(LEAST_GAIN_PERCENT) if each.law.name == "tail" else None
        findings.append(Finding(f"{each.name}: shorter than {USUAL}", gain, "%", target))
    return findings


def other_packings(batch: Batch) -> list[Arrangement]:
    """What the methods of :mod:`.packers` make of a batch."""
    packer = packer_of(batch)
    return [Arrangement.of(packer, method(packer)) for method in PACKERS.values()]


def in_given_order(batch: Batch, options: SearchOptions) -> tuple[GivenOrder, GivenOrder]:
    """Steps of equal tokens in the given order: by plans for the mean microbatch, and by 1F1B."""
    problems = [batch.problem_of(contents) for contents in given_order(batch)]
    planned = [(problem, search(problem.averaged(), options).orders) for problem in problems]
    return (
        _given_order(USUAL, planned),
        _given_order(CLASSICAL, [baseline("1f1b", problem) for problem in problems]),
    )


def given_order(batch: Batch) -> Replicas:
    """Microbatches of equal tokens in the given order, dealt to the replicas in turn."""
    return equal_tokens(packer_of(batch))


def _given_order(name: str, replicas: Sequence[tuple[Problem, Orders]]) -> GivenOrder:
    timings = [(problem, evaluate(without_limit(problem), orders)) for problem, orders in replicas]
    fits = [
        not any(map(exceeds, timing.peak_memory, problem.memory.limit or ())) for problem, timing in timings
    ]
    step = max(objective_value(problem.objective, timing) for problem, timing in timings)
    return GivenOrder(name, step, all(fits))


def shorter(step: float, than: float) -> float:
    """By how many percent a step is shorter than another."""
    return 100 * (1 - step / than)


def _row(name: str, found: Packing, others: Sequence[float], usual: Sequence[GivenOrder]) -> str:
    microbatches = sum(len(each.microbatches) for each in found.replicas)
    gains = [shorter(found.step_time, step) for step in others]
    given = [f"{shorter(found.step_time, each.step_time):8.1f}{' ' if each.fits else '*'}" for each in usual]
    return (
        f"{name:27}{found.step_time:10.4g}{found.gap:7.1%}{microbatches:5}{found.seconds:6.1f}"
        f"{''.join(f'{gain:7.1f}' for gain in gains)}{''.join(given)}\n"
    )
