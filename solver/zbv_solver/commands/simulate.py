"""``zbv simulate``: how a plan behaves when durations vary."""

from __future__ import annotations

import argparse
import json
import sys

from zbv_solver.commands import tables
from zbv_solver.commands.jitter_flag import read_jitter
from zbv_solver.commands.messages import named_flags
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import simulation_json
from zbv_solver.search.claims import load_plan
from zbv_solver.search.jitter import DEFAULT_JITTER
from zbv_solver.search.jitter import simulate as simulated


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
        document = {"plan_id": plan.plan_id, **simulation_json(found)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        tables.print_simulation(plan, found)
