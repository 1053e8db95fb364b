"""``zbv cut``: the best cut for the order of another executor, and that executor's settings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from math import isinf

from rich.table import Table

from zbv_solver.commands.messages import flag_of, named_flags
from zbv_solver.commands.searching import spinner
from zbv_solver.commands.tables import print_whole
from zbv_solver.documents.files import file_label, output
from zbv_solver.errors import InvalidInput
from zbv_solver.executors.best_cut import BestCut
from zbv_solver.executors.executor_cut import ExecutorCut, cut_for_executor, executor_cut_json
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.reading import load_problem
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

FLAGS = ("virtual_stages", "group_size", "schedule", "recompute_layers")
"""Flags that restrict the schedules, and what they recompute."""
LEAST_SECONDS = 0.01
"""What the search of a free order may take at least."""
MOST_ROWS = 12
"""Schedules that a summary shows."""
NONE_FITS = "none fits"
UNSEARCHED = "–"
"""Instead of the objectives of a schedule that was not searched."""


def cut(arguments: argparse.Namespace) -> None:
    """Find the best cut, print it with the executor's settings, and write it as a plan."""
    try:
        options = SearchOptions("quick", arguments.time_limit, arguments.seed)
    except InvalidInput as error:
        raise named_flags(error) from None
    problem = load_problem(arguments.problem)
    if not isinstance(problem, LayeredProblem):
        raise InvalidInput.at(
            "/layers", "this key is absent or already cut; give a problem by layers without a partition."
        ).found_in(file_label(arguments.problem))
    began = time.monotonic()
    with spinner("searching the best cut") as say:
        found = _best(problem, arguments)
        if options.time_limit is not None:
            left = options.time_limit - (time.monotonic() - began)
            options = replace(options, time_limit=max(left, LEAST_SECONDS))
        say("searching a free order")
        free = None if arguments.no_free_order else search(problem, options)
    if arguments.output is not None:
        with output(arguments.output) as write_text:
            write_text(json.dumps(plan_json(_plan(found))) + "\n")
    if arguments.json:
        document = executor_cut_json(found) | {"free_order": None if free is None else _free_json(free)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    print_whole(_table(found, free))
    sys.stdout.write(_summary(found, free))


def _best(problem: LayeredProblem, arguments: argparse.Namespace) -> ExecutorCut:
    """The best cut; raises :class:`InvalidInput` naming the file or the flags."""
    try:
        return cut_for_executor(
            problem,
            arguments.executor,
            virtual_stages=arguments.virtual_stages,
            group=arguments.group_size,
            schedules=arguments.schedule or (),
            recompute=arguments.recompute,
            recompute_layers=arguments.recompute_layers,
            effort=arguments.effort,
            seed=arguments.seed,
            time_limit=arguments.time_limit,
        )
    except InvalidInput as error:
        pointers = {issue.pointer for issue in error.issues}
        if pointers <= {f"/{name}" for name in FLAGS}:
            raise named_flags(error) from None
        given = ", ".join(flag_of(name) for name in FLAGS if getattr(arguments, name) is not None)
        source = given if given and pointers == {""} else file_label(arguments.problem)
        raise error.found_in(source) from None


def _plan(found: ExecutorCut) -> Plan:
    """The executor's order of the best cut as a verified plan."""
    best = found.best
    plan = make_plan(best.problem, best.orders, method=f"{found.executor} {best.schedule.name}")
    return Plan(best.problem, best.orders, plan.metrics, compare(best.problem), plan.provenance)


def _free_json(free: Plan) -> dict[str, object]:
    bound = free.metrics.lower_bound if free.cut is None else free.cut.lower_bound
    return {"objective": free.objective, "lower_bound": bound, "plan_id": free.plan_id}


def _table(found: ExecutorCut, free: Plan | None) -> Table:
    best = found.best
    table = Table(title=f"{best.problem.objective} of the best cut by schedule")
    for name in ("schedule", "virtual stages", "group", "recompute", "best cut", "lower bound", "even cut"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for each in best.results[:MOST_ROWS]:
        table.add_row(
            each.schedule.name,
            str(each.schedule.placement.chunks),
            str(each.schedule.group or ""),
            each.recompute if each.recompute_layers is None else f"first {each.recompute_layers}",
            _value(each.objective) if each.is_searched else UNSEARCHED,
            _value(each.lower_bound),
            UNSEARCHED if isinf(each.even) else f"{each.even:.6g}",
        )
    if free is not None:
        bound = free.metrics.lower_bound if free.cut is None else free.cut.lower_bound
        table.add_section()
        table.add_row("any order (zbv plan)", "", "", "", f"{free.objective:.6g}", f"{bound:.6g}", "")
    return table


def _value(objective: float) -> str:
    return NONE_FITS if isinf(objective) else f"{objective:.6g}"


def _gain(best: BestCut) -> str:
    """The comparison with the even cut. Only one that does not fit may be shorter."""
    if isinf(best.even):
        return ""
    gain = 1 - best.objective / best.even
    if gain < -OPTIMAL_GAP:
        return f", {-gain:.1%} above the even cut, which does not fit"
    return f", {gain:.1%} below the even cut"


def _summary(found: ExecutorCut, free: Plan | None) -> str:
    best = found.best
    gap = gap_of(best.objective, best.lower_bound)
    proof = "proved optimal for this schedule" if best.is_optimal else f"at most {gap:.2%} above the optimum"
    model = best.problem.model
    sizes = [] if model is None else [str(len(stage)) for stage in model.partition]
    lines = [
        f"{best.schedule.name}: {best.problem.objective} {best.objective:.6g} ({proof}){_gain(best)}",
        f"layers per stage: {' '.join(sizes)}",
    ]
    if best.unsearched:
        lines.append(
            f"The time limit ended the search before {best.unsearched} of {len(best.results)} schedules were "
            f"tried; a longer --time-limit tries them."
        )
    if free is not None and free.objective < best.objective:
        lines.append(f"A free order gains {1 - free.objective / best.objective:.1%} more: see zbv plan.")
    lines += ["", found.settings.rstrip()] if found.settings else [found.remark]
    return "\n".join(lines) + "\n"
