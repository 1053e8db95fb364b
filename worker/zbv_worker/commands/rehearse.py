"""``zbv-worker rehearse``: options and execution, and the ranks that it starts if torchrun did not."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import add_plan, add_timeout, json_output, positive, positive_number

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from zbv_worker.host.local_ranks import LaunchError
    from zbv_worker.measure.rehearse.rehearse import RehearseOptions
    from zbv_worker.transport.world import World

_EXAMPLES = """\
examples:
  zbv-worker rehearse --plan-file plan.json                     # all ranks on this machine
  zbv-worker rehearse --plan-file plan.json --scale 0.01 --trace rehearsal.json
  zbv-worker rehearse --plan-file plan.json --overhead --bytes 64 --steps 50
  torchrun --nnodes 4 --nproc-per-node 2 … --no-python zbv-worker rehearse \\
      --server http://planner:8000 --plan 1f3a… --bytes 33554432
"""
_START_SECONDS = 60.0
"""Time for a rank to start; importing torch on a busy machine is slow."""

_PREFIX = "zbv-worker: "
"""The start of a rank's error message."""

_PATIENCE = 4.0
"""A rehearsal that takes this many times longer than planned is stopped."""


def add_rehearse(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    rehearse = commands.add_parser(
        "rehearse",
        help="run a plan with real transfers and sleeps instead of compute; needs no model",
        description="Run a plan on real ranks with real transfers and sleeps instead of compute, and compare "
        "planned and measured times. Under torchrun, this is one of the ranks; otherwise it starts all ranks "
        "on this machine.",
        epilog=_EXAMPLES,
    )
    add_plan(rehearse, are_several=False)
    rehearse.add_argument("--steps", type=positive, help="steps to measure, after a warm-up step (default 5)")
    length = rehearse.add_mutually_exclusive_group()
    length.add_argument(
        "--overhead",
        action="store_true",
        help="let actions take no time, and print the CPU time of the executor and the transfers",
    )
    length.add_argument(
        "--scale",
        type=positive_number,
        metavar="S",
        help="seconds per time unit of the plan (default: from the plan's units; for units without a fixed "
        "length, such that an action takes 10 ms on average)",
    )
    rehearse.add_argument(
        "--bytes",
        type=positive,
        default=1 << 16,
        metavar="N",
        help="size of every tensor between ranks (default 65536)",
    )
    add_timeout(rehearse)
    rehearse.add_argument("--json", metavar="FILE", type=Path, help="write the numbers as JSON, in seconds")
    rehearse.set_defaults(execute=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Run as one rank under torchrun, otherwise start all ranks; returns the exit status."""
    from zbv_worker.transport.world import World

    options = _options(parsed)
    if "RANK" in os.environ:
        _be_a_rank(options, World.from_environment(), parsed)
        return 0
    try:
        _start_ranks(options, parsed.arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _stop(number: int, _frame: object) -> NoReturn:
    # An exception, so that the `with` block ends the ranks.
    raise SystemExit(128 + number)


def _options(parsed: argparse.Namespace) -> RehearseOptions:
    from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
    from zbv_worker.execution.plan_source import PlanSource
    from zbv_worker.measure.rehearse.rehearse import DEFAULT_STEPS, RehearseOptions

    return RehearseOptions(
        source=PlanSource(parsed.server, parsed.plan, parsed.plan_file),
        steps=parsed.steps or DEFAULT_STEPS,
        scale=0.0 if parsed.overhead else parsed.scale,
        transfer_bytes=parsed.bytes,
        timeout=parsed.timeout,
        look_ahead=parsed.look_ahead or DEFAULT_LOOK_AHEAD,
        trace=parsed.trace,
    )


def _be_a_rank(options: RehearseOptions, world: World, parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from zbv_worker.measure.rehearse.outcome import outcome_json, overhead, sentences, table
    from zbv_worker.measure.rehearse.rehearse import rehearse

    with json_output("--json", parsed.json if world.rank == 0 else None) as write:
        outcome = rehearse(options, world)
        if outcome is None:
            return
        write(outcome_json(outcome))
    out = Console()
    if not parsed.overhead:
        out.print(table(outcome))
    for sentence in [overhead(outcome)] if parsed.overhead else sentences(outcome):
        out.print(sentence, soft_wrap=True, highlight=False)


def _start_ranks(options: RehearseOptions, arguments: Sequence[str]) -> None:
    """Run all ranks of the plan on this machine; prints rank 0's output."""
    from zbv_solver.export.quantities import SECONDS, time

    from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command

    plan = options.plan()  # reports a wrong plan once, instead of on every rank
    count = plan.problem.pp_degree
    step = plan.objective_value * options.seconds_per_unit(plan)
    print(
        f"rehearsing on {count} local ranks: {options.steps} steps after a warm-up step, each planned to "
        f"take {time(step, SECONDS)}",
        file=sys.stderr,
        flush=True,
    )
    signal.signal(signal.SIGTERM, _stop)
    command = python_command("zbv_worker", *arguments)
    longest = _PATIENCE * step * (options.steps + 1) + options.timeout + _START_SECONDS * (1 + count / 4)
    with (
        tempfile.TemporaryDirectory(prefix="zbv-rehearse-") as folder,
        LocalRanks([command] * count, Path(folder)) as ranks,
    ):
        try:
            ranks.wait(longest)
        except LaunchError as error:
            raise _with_reasons(error, [ranks.log(rank) for rank in range(count)]) from error
        sys.stdout.write(ranks.log(0))


def _with_reasons(error: LaunchError, logs: Sequence[str]) -> LaunchError:
    """Add what every rank reported to an error: the first rank to end is rarely the cause."""
    lines = [line for log in logs for line in log.splitlines() if line.startswith(_PREFIX)]
    said = [line.removeprefix(_PREFIX) for line in lines]
    if not said:
        return error
    # A rank that waited knows more than those that then lost their peer.
    said.sort(key=lambda line: " waited " not in line)
    return type(error)("the rehearsal failed.\n" + "\n".join(f"  {line}" for line in dict.fromkeys(said)))
