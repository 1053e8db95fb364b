"""``zbv export``, ``zbv refit`` and ``zbv simulate``: what is made of a plan file."""

from __future__ import annotations

import argparse
import json
import sys

from zbv_solver.commands import tables
from zbv_solver.commands.jitter_flag import read_jitter, trace_of
from zbv_solver.commands.messages import named_flags, print_json
from zbv_solver.documents.files import file_label, read_json, write
from zbv_solver.errors import InvalidInput
from zbv_solver.export import RENUMBERED
from zbv_solver.export import export as exported
from zbv_solver.export.quantities import counted, percent
from zbv_solver.export.torch_csv import batch_order
from zbv_solver.measure.refit import largest_change, relative_residual
from zbv_solver.measure.refit import refit as refitted
from zbv_solver.plans.plan import identity, simulation_json
from zbv_solver.plans.reading import load_plan_document, parse_orders
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.claims import load_plan
from zbv_solver.search.jitter import DEFAULT_JITTER
from zbv_solver.search.jitter import simulate as simulated


def export(arguments: argparse.Namespace) -> None:
    """Convert a plan to the file of another tool."""
    plan = load_plan(arguments.plan)
    try:
        text = exported(plan, arguments.format)
    except InvalidInput as error:
        is_flag = error.issues[0].pointer == "/format"
        raise (named_flags(error) if is_flag else error.found_in(file_label(arguments.plan))) from None
    write(arguments.output, text)
    order = batch_order(plan) if arguments.format in RENUMBERED else None
    if order is not None:
        sys.stderr.write(
            "The microbatches differ, and this format numbers them in the order in which they run. Give the "
            f"batch in this order of the plan's microbatches: {', '.join(map(str, order))}\n"
        )


def refit(arguments: argparse.Namespace) -> None:
    """Write a plan's problem with the costs that its ranks measured."""
    problem, orders = parse_orders(load_plan_document(arguments.plan))
    plan_id = identity(problem_json(problem), orders.all_text())
    traces = []
    for path in arguments.traces:
        try:
            traces.append(trace_of(plan_id, read_json(path)))
        except InvalidInput as error:
            raise error.found_in(file_label(path)) from None
    measured = refitted(problem, traces, orders)
    write(arguments.output, json.dumps(problem_json(measured)) + "\n")
    sys.stderr.write(
        f"{counted(len(traces), 'rank')} measured; the cost that differs most from its planned value differs "
        f"by {percent(largest_change(problem, measured), 1)}\n"
    )
    if measured.features:
        residual = relative_residual(measured, traces, orders)
        sys.stderr.write(
            f"fitted over features; relative residual {percent(residual, 1)} "
            f"(root mean square of fitted minus measured costs, by that of measured costs)\n"
        )


def simulate(arguments: argparse.Namespace) -> None:
    """Simulate a plan and the classical schedules, and print the times of their iterations."""
    plan = load_plan(arguments.plan)
    jitter = DEFAULT_JITTER if arguments.jitter is None else read_jitter(arguments.jitter, plan)
    try:
        found = simulated(plan, jitter, scenarios=arguments.scenarios, seed=arguments.seed)
    except InvalidInput as error:
        is_flag = error.issues[0].pointer in ("/scenarios", "/seed")
        raise (named_flags(error) if is_flag else error.found_in("--jitter")) from None
    if arguments.json:
        print_json({"plan_id": plan.plan_id, **simulation_json(found)})
    else:
        tables.print_simulation(plan, found)
