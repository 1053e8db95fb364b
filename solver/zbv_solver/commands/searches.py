"""``zbv plan``, ``compare``, ``frontier`` and ``pack``: the commands that search plans."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table

from zbv_solver.commands import tables
from zbv_solver.commands.interrupt import Interruption, terminated_like_interrupted
from zbv_solver.commands.jitter_flag import read_jitter
from zbv_solver.commands.messages import named_flags, print_json, print_whole, spinner, table_of
from zbv_solver.documents.files import output, plain, write
from zbv_solver.errors import InvalidInput
from zbv_solver.export import quantities
from zbv_solver.export.timeline import pair_savings
from zbv_solver.frontiers.frontier import FrontierPoint, frontier_points, point_json
from zbv_solver.packing.batch import Batch, load_batch
from zbv_solver.packing.packing import Packing, packing_json
from zbv_solver.packing.packing import pack as packed
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.jitter import Jitter, check_quantile
from zbv_solver.problem.layered_problem import AnyProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import load_problem
from zbv_solver.search.incumbent import OnProgress, Progress
from zbv_solver.search.jitter import search_for_jitter
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


def plan(arguments: argparse.Namespace) -> None:
    """Search a plan and write it, or print a summary of it to a terminal."""
    problem = load_problem(arguments.problem)
    options, jitter = _search_options(arguments), _jitter(arguments, problem)
    run = search if jitter is None else partial(search_for_jitter, jitter=jitter, quantile=arguments.quantile)
    is_summary = arguments.output is None and sys.stdout.isatty()
    path = arguments.output or "-"
    with output(path) as write_text, terminated_like_interrupted():

        def keep(found: Plan) -> None:
            if not is_summary:
                write_text(json.dumps(plan_json(found)) + "\n")

        found, interruption = _watched_search(problem, options, keep, run)
    if is_summary:
        sys.stdout.write(f"{_verdict(found)}\n")
        tables.print_comparison(found)
        if found.simulation is not None:
            tables.print_simulation(found, found.simulation)
        sys.stdout.write(f"{tables.first_actions(found)}{tables.cut_summary(found)}")
        sys.stdout.write("The plan is not saved. To save it, add: -o plan.json\n")
    elif path != "-":
        sys.stderr.write(f"{path}: {_verdict(found)}\n{tables.cut_summary(found)}")
    interruption.finish("the plan shown" if is_summary else "the plan written")


def compare(arguments: argparse.Namespace) -> None:
    """Search a plan and compare it with the classical schedules."""
    problem = load_problem(arguments.problem)
    found, interruption = _watched_search(problem, _search_options(arguments))
    if arguments.json:
        print_json(
            {
                "plan_id": found.plan_id,
                "metrics": plan_json(found)["metrics"],
                "baselines": [plain(baseline) for baseline in found.baselines],
            }
        )
    else:
        tables.print_comparison(found)
    interruption.finish("the plan compared")


def frontier(arguments: argparse.Namespace) -> None:
    """Search a plan within every memory limit; print the frontier, and keep the plans with ``-o``."""
    problem = load_problem(arguments.problem)
    options = _search_options(arguments)
    folder = None if arguments.output is None else Path(arguments.output)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with terminated_like_interrupted(), spinner("searching") as say:
        interruption = Interruption(say)
        points = interruption.run(partial(_watched_frontier, problem, options, say))
    document = {"objective": problem.objective, "points": [point_json(point) for point in points]}
    if folder is not None:
        for found in {point.plan.plan_id: point.plan for point in points}.values():
            write(folder / f"{found.plan_id[:12]}.json", json.dumps(plan_json(found)) + "\n")
        write(folder / "frontier.json", json.dumps(document, indent=2) + "\n")
    if arguments.json:
        print_json(document)
    else:
        tables.print_frontier(problem, points)
    interruption.finish("the part of the frontier shown")


def _watched_frontier(
    problem: AnyProblem, options: SearchOptions, say: Callable[[str], None], stop: Callable[[], bool]
) -> tuple[FrontierPoint, ...]:
    """The points of the frontier; after Ctrl-C, those of the smallest limits."""
    place = ""

    def at(number: int, of: int) -> None:
        nonlocal place
        place = f"limit {number} of {of}: "
        say(f"{place}searching")

    def search_limit(limited: AnyProblem) -> Plan:
        return search(limited, options, on_progress=_reporter(limited, say, place), cancelled=stop)

    return frontier_points(problem, search_limit, at, stop)


def _search_options(arguments: argparse.Namespace) -> SearchOptions:
    """The options of a search; raises :class:`InvalidInput` naming the wrong flags."""
    try:
        return SearchOptions(
            effort=arguments.effort,
            time_limit=arguments.time_limit,
            seed=arguments.seed,
            workers=arguments.workers,
        )
    except InvalidInput as error:
        raise named_flags(error) from None


def _watched_search(
    problem: AnyProblem,
    options: SearchOptions,
    keep: Callable[[Plan], None] | None = None,
    search: Callable[..., Plan] = search,
) -> tuple[Plan, Interruption]:
    """Search with a progress display on standard error.

    The first Ctrl-C ends the search early with the best plan so far. ``keep`` stores the plan; Ctrl-C while
    it is being stored has no effect.
    """
    with spinner("searching", options.time_limit) as say:

        def work(stop: Callable[[], bool]) -> Plan:
            plan = search(problem, options, on_progress=_reporter(problem, say), cancelled=stop)
            if keep is not None:
                keep(plan)
            return plan

        interruption = Interruption(say)
        return interruption.run(work), interruption


def _reporter(problem: AnyProblem, say: Callable[[str], None], place: str = "") -> OnProgress:
    """Show every better plan, and the method that made it."""

    def report(found: Progress) -> None:
        best = quantities.time(found.objective, quantities.stated(problem.units))
        say(f"{place}{problem.objective} {best}, gap {quantities.percent(found.gap)}, {found.method}")

    return report


def _jitter(arguments: argparse.Namespace, problem: AnyProblem) -> Jitter | None:
    """The jitter of ``zbv plan``; raises :class:`InvalidInput` naming the wrong flag."""
    jitter = None if arguments.jitter is None else read_jitter(arguments.jitter)
    try:
        check_quantile(arguments.quantile, jitter)
    except InvalidInput as error:
        raise named_flags(error) from None
    if jitter is not None:
        try:
            jitter.require_ranks(problem.pp_degree)
        except InvalidInput as error:
            raise error.found_in("--jitter") from None
    return jitter


def _verdict(plan: Plan) -> str:
    """What the plan achieves, in one line."""
    metrics, units = plan.metrics, quantities.stated(plan.problem.units)
    pairs = pair_savings(plan)
    above = f"at most {quantities.percent(metrics.gap)} above optimal"
    proved = "proved optimal" if metrics.status == "optimal" else above
    return (
        f"{plan.problem.objective} {quantities.time(plan.objective, units)} "
        f"({proved}), bubble rate {quantities.percent(metrics.bubble_rate)}, found in "
        f"{quantities.time(plan.provenance.seconds, quantities.SECONDS)}, plan {plan.plan_id[:12]}"
        f"{f'; {pairs.text(units)}' if pairs else ''}"
    )


def pack(arguments: argparse.Namespace) -> None:
    """Pack a batch and write the packing, or print a summary of it to a terminal."""
    batch = load_batch(arguments.batch)
    options = _search_options(arguments)
    is_summary = arguments.output is None and sys.stdout.isatty()
    path = arguments.output or "-"
    with output(path) as write_text, terminated_like_interrupted():
        found, interruption = _watched_packing(batch, options, arguments.compare)
        if not is_summary:
            write_text(json.dumps(packing_json(found)) + "\n")
    if is_summary:
        print_whole(_replicas(found))
        print_whole(_baselines(found))
        sys.stdout.write(f"{_packed(found)}\nThe packing is not saved. To save it, add: -o packed.json\n")
    elif path != "-":
        sys.stderr.write(f"{path}: {_packed(found)}\n")
    interruption.finish("the packing shown" if is_summary else "the packing written")


def _watched_packing(batch: Batch, options: SearchOptions, compare: bool) -> tuple[Packing, Interruption]:
    """Pack on a separate thread, with a progress display; Ctrl-C ends all searches early."""
    with spinner("packing") as say:

        def work(stop: Callable[[], bool]) -> Packing:
            def planner(problem: Problem, own: SearchOptions) -> Plan:
                return search(problem, own, cancelled=stop)

            return packed(batch, options, compare=compare, say=say, planner=planner)

        interruption = Interruption(say)
        return interruption.run(work), interruption


def _packed(found: Packing) -> str:
    """What the packing achieves, in one line."""
    microbatches = quantities.counted(sum(len(each.microbatches) for each in found.replicas), "microbatch")
    usual = "".join(
        f"; {each.name} takes {_longer(each.estimate, found.estimate)} longer by estimate"
        if each.step_time is None
        else f"; {each.name} takes {_longer(each.step_time, found.step_time)} longer"
        for each in found.baselines
    )
    return (
        f"{found.batch.problem.objective} "
        f"{quantities.time(found.step_time, quantities.stated(found.batch.problem.units))} "
        f"(at most {quantities.percent(found.gap)} above any packing{usual}), "
        f"{microbatches} on {quantities.counted(len(found.replicas), 'replica')}, found in "
        f"{quantities.time(found.seconds, quantities.SECONDS)}"
    )


def _replicas(found: Packing) -> Table:
    lengths, rows = found.batch.sequences, []
    columns = ("replica", "microbatches", "sequences", "tokens", "largest", found.batch.problem.objective)
    time = quantities.timer(found.step_time, found.batch.problem.units)
    for place, each in enumerate(found.replicas):
        tokens = [sum(lengths[index] for index in contents) for contents in each.microbatches]
        numbers = (place, len(tokens), sum(map(len, each.microbatches)), sum(tokens), max(tokens))
        rows.append([*(quantities.figure(number, 12) for number in numbers), time(each.plan.objective)])
    bound = quantities.time(found.lower_bound, quantities.stated(found.batch.problem.units))
    return table_of(f"lower bound of every packing: {bound}", columns, rows)


def _baselines(found: Packing) -> Table:
    columns = ("", "microbatches", "estimate", "longer by", found.batch.problem.objective, "longer by")
    time = quantities.timer(found.step_time, found.batch.problem.units)
    rows = (
        (
            each.name,
            str(each.microbatches),
            time(each.estimate),
            _longer(each.estimate, found.estimate),
            "–" if each.step_time is None else time(each.step_time),
            "–" if each.step_time is None else _longer(each.step_time, found.step_time),
        )
        for each in found.baselines
    )
    return table_of("the usual way to pack this batch, compared with this one", columns, rows)


def _longer(value: float, than: float) -> str:
    return quantities.percent(value / than - 1) if than > 0 else "–"
