"""Packings of global batches: against other methods with the same search, and against what is usual.

What is usual: microbatches of equal tokens in the order of arrival, dealt to the replicas in turn, run by a
plan for the mean microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zbv_solver.construct.baselines import without_limit
from zbv_solver.packing.arrangement import Packer
from zbv_solver.packing.batch import Batch, parse_batch
from zbv_solver.packing.pack import pack
from zbv_solver.packing.packing import Packing
from zbv_solver.packing.rivals import equal_tokens
from zbv_solver.packing.step_costs import StepCosts
from zbv_solver.problem.numeric import exceeds
from zbv_solver.search.search import SearchOptions, search
from zbv_solver.timing.start_times import evaluate

from benchmarks.errors import WrongInput
from benchmarks.findings import Finding, at_least
from benchmarks.lengths.instances import PackingInstance, packing_instances

LEAST_GAIN_PERCENT = 15.0
"""On batches with a long tail, against what is usual."""
USUAL = "equal tokens, given order, mean plan"


@dataclass(frozen=True)
class Usual:
    """The step of the slowest replica, and whether every replica keeps the memory limit."""

    step_time: float
    fits: bool


def instances(only: str | None = None) -> tuple[PackingInstance, ...]:
    """The batches; raises :class:`WrongInput` if ``only``, a glob, matches no name."""
    every = packing_instances()
    chosen = tuple(each for each in every if only is None or fnmatchcase(each.name, only))
    if not chosen:
        raise WrongInput(
            f"--only: found {only!r}, which matches none of the {len(every)} batches ({every[0].name}, …, "
            f"{every[-1].name}). Give a name or a pattern with * and ?."
        )
    return chosen


def packing_table(
    chosen: Sequence[PackingInstance], options: SearchOptions, write: Callable[[str], object]
) -> list[Finding]:
    """Pack, print a row per batch, and return the gains."""
    write(f"{'batch':26} {'step':>9} {'gap':>6} {'m':>4} {'s':>6}   shorter than, in %\n")
    findings = []
    for each in chosen:
        batch = parse_batch(each.document())
        found = pack(batch, options, compare=True)
        usual = usual_step(batch, options)
        gain = shorter(found.step_time, usual.step_time)
        write(_row(each.name, found, usual))
        sys.stdout.flush()
        target = at_least(LEAST_GAIN_PERCENT) if each.law.name == "tail" else None
        findings.append(Finding(f"{each.name}: shorter than {USUAL}", gain, "%", target))
    return findings


def usual_step(batch: Batch, options: SearchOptions) -> Usual:
    """The step of equal tokens in the given order with plans for the mean microbatch."""
    packer = Packer(StepCosts.of(batch.problem), batch.sequences, batch.max_tokens, batch.replicas)
    steps, fits = [], []
    for contents in equal_tokens(packer):
        problem = batch.problem_of(contents)
        orders = search(problem.averaged(), options).orders
        timing = evaluate(without_limit(problem), orders)
        steps.append(timing.span if problem.objective == "span" else timing.makespan)
        limits = problem.memory.limit or ()
        fits.append(not any(map(exceeds, timing.peak_memory, limits)))
    return Usual(max(steps), all(fits))


def shorter(step: float, than: float) -> float:
    """By how many percent a step is shorter than another."""
    return 100 * (1 - step / than)


def _row(name: str, found: Packing, usual: Usual) -> str:
    microbatches = sum(len(each.microbatches) for each in found.replicas)
    gains = [
        f"{each.name} {shorter(found.step_time, each.step_time):.1f}"
        for each in found.rivals
        if each.step_time is not None
    ]
    exceeding = "" if usual.fits else " (exceeds the limit)"
    gains.append(f"{USUAL} {shorter(found.step_time, usual.step_time):.1f}{exceeding}")
    return (
        f"{name:26} {found.step_time:9.4g} {found.gap:6.1%} {microbatches:4} {found.seconds:6.1f}   "
        f"{', '.join(gains)}\n"
    )
