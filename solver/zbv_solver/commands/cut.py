"""``zbv cut``: the best cut for the order of another executor, and that executor's settings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isinf
from typing import Any

from rich.table import Table
from zbv_models.fixed_orders.best_cut import LEAST_SECONDS, BestCut, free_plan
from zbv_models.fixed_orders.executor_cut import ExecutorCut, cut_for_executor, executor_cut_json
from zbv_models.fixed_orders.score import score_layout

from zbv_solver.commands.cut_score import score_json, score_summary, score_table
from zbv_solver.commands.interrupt import Interruption, terminated_like_interrupted
from zbv_solver.commands.messages import flag_of, named_flags, print_json, print_whole, spinner, table_of
from zbv_solver.documents.files import file_label, output, parse_json, read_text
from zbv_solver.documents.validation import require_kind
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.export import quantities
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, gap_of, plan_json
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.options import SearchOptions

OTHER_FLAGS = ("layout", "recompute", "recompute_layers")
FLAGS = ("virtual_stages", "group_size", "schedule", *OTHER_FLAGS)
"""Flags that mistakes may be in: those that restrict the schedules, and others."""
SHOWN = 0.0005
"""A smaller difference is none with one decimal of a percent."""
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
    problem = _load(arguments.problem)
    if not isinstance(problem, LayeredProblem):
        raise InvalidInput.at(
            "/layers", "this key is absent or already cut; give a problem by layers without a partition."
        ).found_in(file_label(arguments.problem))
    if arguments.layout is not None:
        _score(problem, arguments)
        return
    began = time.monotonic()

    def work(stop: Callable[[], bool]) -> tuple[ExecutorCut, Plan | None]:
        with _named(arguments):
            found = cut_for_executor(problem, arguments.executor, **_asked(arguments), cancelled=stop)
        if arguments.no_free_order or stop():
            return found, None
        left = None
        if options.time_limit is not None:
            left = max(options.time_limit - (time.monotonic() - began), LEAST_SECONDS)
        best = quantities.time(found.best.objective, quantities.stated(problem.units))
        say(f"searching a free order, best cut {best}")
        return found, free_plan(problem, found.best, replace(options, time_limit=left), stop)

    with terminated_like_interrupted(), spinner("searching the best cut", options.time_limit) as say:
        interruption = Interruption(say)
        found, free = interruption.run(work)
    if arguments.output is not None:
        best = found.best
        _write(arguments.output, best.problem, best.orders, f"{found.executor} {best.schedule.name}")
    if arguments.json:
        document = executor_cut_json(found) | {"free_order": None if free is None else _free_json(free)}
        print_json(document)
    else:
        print_whole(_table(found, free))
        sys.stdout.write(_summary(found, free))
    interruption.finish("the cut shown")


def _load(path: str) -> AnyProblem:
    """The problem of a file. If the rules of its cut suit no cut on its own placement, that is ``auto``.

    The executor has its own placement, and the free order may have any.
    """
    document = parse_json(read_text(path), path)
    try:
        require_kind(document, "problem")
        return parse_any_problem(document)
    except InvalidInput as error:
        has_placement = isinstance(document, dict) and document.get("placement") != "auto"
        if has_placement and {issue.pointer for issue in error.issues} <= {"/layers", "/cut"}:
            try:
                return parse_any_problem({**document, "placement": "auto"})
            except InvalidInput as of_auto:
                error = of_auto
        raise error.found_in(file_label(path)) from None


def _score(problem: LayeredProblem, arguments: argparse.Namespace) -> None:
    """Print what a given cut achieves, and write it as a plan."""
    with terminated_like_interrupted(), spinner("searching better cuts") as say, _named(arguments):
        stages = arguments.virtual_stages or [None]
        if len(stages) > 1:
            raise InvalidInput.at(
                "/virtual_stages", f"found {len(stages)} numbers with a given cut; give one."
            )
        given = {**_asked(arguments), "virtual_stages": stages[0]}
        interruption = Interruption(say)
        score = interruption.run(
            lambda stop: score_layout(problem, arguments.executor, arguments.layout, **given, cancelled=stop)
        )
    if arguments.json:
        print_json(score_json(score))
    else:
        print_whole(score_table(score))
        sys.stdout.write(score_summary(score))
    if arguments.output is not None:
        if score.too_full:
            memory, unit = score.problem.memory, score.problem.units.memory
            raise InfeasibleMemory(score.timing.peak_memory, memory.limit or (), of_cut=True, unit=unit)
        method = f"{score.executor} {score.schedule.name}, given cut"
        _write(arguments.output, score.problem, score.orders, method)
    interruption.finish("the best cut shown")


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags ask of a search, by the names of its parameters."""
    same = ("virtual_stages", "recompute", "recompute_layers", "effort", "seed", "time_limit")
    named = {name: getattr(arguments, name) for name in same}
    return named | {"group": arguments.group_size, "schedules": arguments.schedule or ()}


@contextmanager
def _named(arguments: argparse.Namespace) -> Iterator[None]:
    """Errors name the file, or the flags as the user wrote them."""
    try:
        yield
    except InvalidInput as error:
        pointers = {issue.pointer for issue in error.issues}
        if pointers <= {f"/{name}" for name in FLAGS}:
            raise named_flags(error) from None
        given = ", ".join(
            flag_of(name)
            for name in FLAGS
            if getattr(arguments, name) is not None and name not in OTHER_FLAGS
        )
        source = given if given and pointers == {""} else file_label(arguments.problem)
        raise error.found_in(source) from None


def _write(path: str, problem: Problem, orders: Orders, method: str) -> None:
    """Write the executor's order as a verified plan."""
    plan = make_plan(problem, orders, method=method)
    plan = Plan(problem, orders, plan.metrics, compare(problem), plan.provenance)
    with output(path) as write_text:
        write_text(json.dumps(plan_json(plan)) + "\n")


def _bound_of_all_cuts(free: Plan) -> float:
    return free.metrics.lower_bound if free.cut is None else free.cut.lower_bound


def _free_json(free: Plan) -> dict[str, object]:
    return {
        "objective": free.objective,
        "lower_bound": _bound_of_all_cuts(free),
        "placement": free.problem.placement.name,
        "plan_id": free.plan_id,
    }


def _table(found: ExecutorCut, free: Plan | None) -> Table:
    best, units = found.best, found.best.problem.units
    time = quantities.timer(best.objective, units)
    columns = ("schedule", "virtual stages", "group", "recompute", "best cut", "lower bound", "even cut")
    rows = [
        (
            each.schedule.name,
            str(each.schedule.placement.chunks),
            str(each.schedule.group or ""),
            each.recompute if each.recompute_layers is None else f"first {each.recompute_layers}",
            (NONE_FITS if isinf(each.objective) else time(each.objective))
            if each.is_searched
            else UNSEARCHED,
            NONE_FITS if isinf(each.lower_bound) else time(each.lower_bound),
            UNSEARCHED if isinf(each.even) else time(each.even),
        )
        for each in best.results[:MOST_ROWS]
    ]
    table = table_of(f"{best.problem.objective} of the best cut by schedule", columns, rows)
    if free is not None:
        table.add_section()
        name = f"any order, placement {free.problem.placement.name}"
        table.add_row(name, "", "", "", time(free.objective), time(_bound_of_all_cuts(free)), "")
    return table


def _gain(best: BestCut) -> str:
    """The comparison with the even cut. It may be shorter, as it ignores the memory limit and the rules."""
    if isinf(best.even):
        return ""
    gain = 1 - best.objective / best.even
    if abs(gain) < SHOWN:
        return ", as long as the even cut"
    if best.least > best.even * (1 + OPTIMAL_GAP):
        rules = "the memory" if best.problem.memory.limit is not None else "the rules of the problem"
        return f", {quantities.percent(-gain, 1)} above the even cut, which ignores {rules}"
    return f", {quantities.percent(abs(gain), 1)} {'below' if gain > 0 else 'above'} the even cut"


def _refusals(best: BestCut) -> list[str]:
    """Schedules without a cut, and why; those that differ in the group only once."""
    reasons = {(each.name, each.placement.chunks): issue for each, issue in best.refused.items()}
    return [
        f"{name} with {chunks} virtual {'stage' if chunks == 1 else 'stages'} has no cut: {issue.detail}"
        for (name, chunks), issue in reasons.items()
    ]


def _summary(found: ExecutorCut, free: Plan | None) -> str:
    best = found.best
    gap = gap_of(best.objective, best.lower_bound)
    proof = (
        "proved optimal for this schedule"
        if gap == 0
        else f"at most {quantities.percent(gap)} above the optimum"
    )
    model, units = best.problem.model, quantities.stated(best.problem.units)
    sizes = [] if model is None else [str(len(stage)) for stage in model.partition]
    lines = [
        f"{best.schedule.name}: {best.problem.objective} {quantities.time(best.objective, units)} "
        f"({proof}){_gain(best)}",
        f"layers per stage: {' '.join(sizes)}",
    ]
    if best.objective - best.least >= SHOWN / 10 * best.objective > 0:
        shortest = found.shortest_layout or " ".join(
            str(len(stage))
            for stage in ([] if best.shortest.model is None else best.shortest.model.partition)
        )
        lines.append(
            f"The shortest cut is less regular: {shortest}, {best.problem.objective} "
            f"{quantities.time(best.least, units)}, "
            f"{quantities.percent(1 - best.least / best.objective)} shorter."
        )
    lines += _refusals(best)
    if best.unsearched:
        lines.append(
            f"The search ended before {best.unsearched} of {len(best.results)} schedules were tried; a "
            f"longer one tries them."
        )
    if free is not None and free.objective < best.objective:
        gain, placement = 1 - free.objective / best.objective, free.problem.placement.name
        lines.append(
            f"With any order, as zbv plan finds it for placement {placement}, the {best.problem.objective} "
            f"is {quantities.percent(gain, 1)} shorter."
        )
    if found.even_remark:
        lines.append(found.even_remark)
    lines += ["", found.settings.rstrip()] if found.settings else [found.remark]
    return "\n".join(lines) + "\n"
