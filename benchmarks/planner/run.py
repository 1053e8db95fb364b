"""Run suites, and write their tables and summaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
        return tuple(Instance(name, *pair, {}) for pair in jitter.instances())
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
    bench = _Bench(instances, out, spinner)
    full = bench.run(options, options.without, ())
    runs, entries = [full], list[Contribution]()
    for mechanism in MECHANISMS if ablate else ():
        if runs[-1].interrupted:
            break
        if mechanism.name not in options.without:
            known = [outcome for outcome in full.outcomes if not mechanism.concerns(outcome.instance)]
            with mechanism.left_out(options) as without:
                runs.append(bench.run(without, (*options.without, mechanism.name), known))
            if not runs[-1].interrupted:
                entries += contributions(mechanism.name, full.outcomes, runs[-1].outcomes)
    if entries:
        out.write("\nwhat each mechanism adds:\n" + ablation_table(entries))
    return Report(options, tuple(runs), tuple(entries))


@dataclass(frozen=True)
class _Bench:
    instances: Sequence[Instance]
    out: TextIO
    spinner: Spinner

    def run(self, options: SearchOptions, without: tuple[str, ...], known: Sequence[Outcome]) -> Run:
        """Run all instances once: a table per suite, then the summary.

        Instances whose outcomes are ``known`` do not run again; ``without`` is for the report.
        """
        outcomes: list[Outcome] = []
        interrupted = False
        self.out.write(f"\n{_title(self.instances, options, without)}\n")
        try:
            for suite, members in groupby(self.instances, key=lambda instance: instance.suite):
                self._run_suite(suite, tuple(members), options, outcomes, known)
        except KeyboardInterrupt:
            interrupted = True
        self.out.write("\n" + summary(tally(outcomes)))
        return Run(without, tuple(outcomes), interrupted)

    def _run_suite(
        self,
        suite: str,
        instances: Sequence[Instance],
        options: SearchOptions,
        outcomes: list[Outcome],
        known: Sequence[Outcome],
    ) -> None:
        """Search the instances of one file; ``outcomes`` grows as they finish."""
        table = Table(instances)
        self.out.write(f"\n{suite}\n{table.header()}")
        self.out.flush()
        for position, instance in enumerate(instances, 1):
            label = f"[{position}/{len(instances)}] {instance.name}"
            outcome = next((each for each in known if each.instance is instance), None)
            if outcome is None:
                with self.spinner(label) as say:
                    outcome = interruptible(partial(measure, instance, options, _teller(label, say)))
            outcomes.append(outcome)
            self.out.write(table.row(outcome))
            self.out.flush()


def _teller(label: str, say: Callable[[str], None]) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        say(f"{label}: {progress.objective:.8g}, gap {progress.gap:.2%} ({progress.method})")

    return tell


def _title(instances: Sequence[Instance], options: SearchOptions, without: tuple[str, ...]) -> str:
    """The options that all rows share."""
    objectives = " and ".join(sorted({instance.problem.objective for instance in instances}))
    limit = "none" if options.time_limit is None else f"{options.time_limit:g} s"
    facts = [f"objective: {objectives}", f"effort: {options.effort}", f"time limit: {limit}"]
    facts.append(f"seed: {options.seed}")
    facts += [f"without: {', '.join(without)}"] if without else []
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
            short = replace(options, effort=effort, time_limit=WARM_UP_SECONDS)
            search(problem, short, cancelled=cancelled)
