"""Run suites, and write their tables and summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TextIO

from zbv_solver.commands.interrupt import interruptible
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.incumbent import Cancelled, Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.planner import jitter, lengths
from benchmarks.planner.ablation import MECHANISMS, Contribution, ablation_table, contributions
from benchmarks.planner.outcome import Outcome, measure, tally
from benchmarks.planner.report import Report, Run, Table, summary
from benchmarks.planner.suite import NO_OPTIONS, Instance

Spinner = Callable[[str], AbstractContextManager[Callable[[str], None]]]
"""Shows a text while something runs, and yields a function that changes the text."""

WARM_UP_SECONDS = 2.0
"""Time limit of a warm-up search; with compiled kernels it takes a fraction of that."""


GENERATED = ("unequal", "jitter")
"""Benchmarks whose problems can also be planned."""


def generated(name: str) -> tuple[Instance, ...]:
    """The problems of a benchmark of :data:`GENERATED`, without its other schedules."""
    if name == "jitter":
        return tuple(Instance(name, *each, {}) for each in jitter.instances())
    documents = ((each.name, each.document()) for each in lengths.instances())
    return tuple(Instance(name, each, parse_problem(document), {}) for each, document in documents)


def bench(
    instances: Sequence[Instance], options: SearchOptions, *, ablate: bool, out: TextIO, spinner: Spinner
) -> Report:
    """Search every instance; write a row to ``out`` for each, and the summary at the end.

    With ``ablate``, run the suites again without each mechanism of the planner; instances that it does not
    concern keep their outcome. Ctrl-C ends the measurement and keeps its results so far.
    """
    with spinner("loading"):
        interruptible(partial(_warm_up, instances, options))
    full = _run(instances, options, options.without, out, spinner)
    runs, found = [full], list[Contribution]()
    for mechanism in MECHANISMS if ablate else ():
        if runs[-1].interrupted:
            break
        if mechanism.name not in options.without:
            without = (*options.without, mechanism.name)
            known = {
                (each.instance.suite, each.instance.name): each
                for each in full.outcomes
                if not mechanism.concerns(each.instance)
            }
            with mechanism.left_out(options) as own:
                runs.append(_run(instances, own, without, out, spinner, known))
            if not runs[-1].interrupted:
                found += contributions(mechanism.name, full.outcomes, runs[-1].outcomes)
    if found:
        out.write("\nwhat each mechanism adds:\n" + ablation_table(found))
    return Report(options, tuple(runs), tuple(found))


def _run(
    instances: Sequence[Instance],
    options: SearchOptions,
    without: tuple[str, ...],
    out: TextIO,
    spinner: Spinner,
    known: Mapping[tuple[str, str], Outcome] | None = None,
) -> Run:
    """Run all instances once: a table per suite, then the summary; ``without`` is for the report.

    Instances whose outcomes are ``known`` do not run again.
    """
    outcomes: list[Outcome] = []
    interrupted = False
    out.write(f"\n{_title(instances, options, without)}\n")
    try:
        for suite, members in groupby(instances, key=lambda instance: instance.suite):
            _run_suite(suite, tuple(members), options, outcomes, out, spinner, known or {})
    except KeyboardInterrupt:
        interrupted = True
    out.write("\n" + summary(tally(outcomes)))
    return Run(without, tuple(outcomes), interrupted)


def _run_suite(
    suite: str,
    instances: Sequence[Instance],
    options: SearchOptions,
    outcomes: list[Outcome],
    out: TextIO,
    spinner: Spinner,
    known: Mapping[tuple[str, str], Outcome],
) -> None:
    """Search the instances of one file; ``outcomes`` grows as they finish."""
    table = Table(instances)
    out.write(f"\n{suite}\n{table.header()}")
    out.flush()
    for position, instance in enumerate(instances, 1):
        label = f"[{position}/{len(instances)}] {instance.name}"
        with spinner(label) as say:
            outcome = known.get((instance.suite, instance.name)) or interruptible(
                partial(measure, instance, options, _teller(label, say))
            )
        outcomes.append(outcome)
        out.write(table.row(outcome))
        out.flush()


def _teller(label: str, say: Callable[[str], None]) -> Callable[[Progress], None]:
    def tell(found: Progress) -> None:
        say(f"{label}: {found.objective:.8g}, gap {found.gap:.2%} ({found.method})")

    return tell


def _title(instances: Sequence[Instance], options: SearchOptions, without: tuple[str, ...]) -> str:
    """The options that all rows share."""
    objectives = sorted({instance.problem.objective for instance in instances})
    limit = "none" if options.time_limit is None else f"{options.time_limit:g} s"
    facts = [
        f"objective: {' and '.join(objectives)}",
        f"effort: {options.effort}",
        f"time limit: {limit}",
        f"seed: {options.seed}",
        *([f"without: {', '.join(without)}"] if without else []),
    ]
    own = sum(instance.options != NO_OPTIONS for instance in instances)
    note = f" ({own} of {len(instances)} instances have their own effort or limit)" if own else ""
    return "; ".join(facts) + note


def _warm_up(instances: Sequence[Instance], options: SearchOptions, cancelled: Cancelled) -> None:
    """Search a tiny problem with every effort in use, so that no measurement includes loading code."""
    costs = {"forward": [3, 5, 4, 6, 5, 4], "backward_input": 5, "backward_weight": 3, "p2p": 1}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 7}
    for objective in sorted({instance.problem.objective for instance in instances}):
        problem = parse_problem(
            {"pp_degree": 3, "microbatches": 4, "objective": objective, "costs": costs, "memory": memory}
        )
        for effort in sorted({instance.search_options(options).effort for instance in instances}):
            own = replace(options, effort=effort, time_limit=WARM_UP_SECONDS)
            search(problem, own, cancelled=cancelled)
