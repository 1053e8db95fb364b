"""``zbv-worker run``: options and execution."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import (
    add_compile,
    add_model,
    add_plan,
    add_program,
    positive,
    positive_number,
)

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from zbv_worker.run.options import RunOptions
    from zbv_worker.transport.world import Backend

_RUN_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 --no-python zbv-worker run --server http://planner:8000 --plan 1f3a… \\
      --model mypackage.model:build --steps 1000
  torchrun --nproc-per-node 2 --no-python zbv-worker run --plan-file plan.json \\
      --model zbv_worker.models.gpt:gpt --model-args '{"layers": 8}' --steps 20
"""


def execute(parsed: argparse.Namespace) -> int:
    """Run one rank; returns the exit status."""
    from zbv_worker.failures.failures import OwnProcess
    from zbv_worker.host.process import pin_to_core
    from zbv_worker.run.run import run
    from zbv_worker.transport.world import World, default_backend

    world = World.from_environment()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.local_rank + 1))
    options = _options(parsed, parsed.backend or default_backend(local_ranks))
    if parsed.pin:
        pin_to_core(world.local_rank)
    run(options, world, OwnProcess())
    return 0


def _options(parsed: argparse.Namespace, backend: Backend) -> RunOptions:
    from zbv_worker.checkpoints.checkpoint import CheckpointOptions
    from zbv_worker.execution.plan_source import PlanSource
    from zbv_worker.model.spec import ModelSpec
    from zbv_worker.run.options import RunOptions, TrainingOptions

    fetched = [PlanSource(parsed.server, plan) for plan in parsed.plan]
    sources = (*fetched, *(PlanSource(file=file) for file in parsed.plan_file))
    checkpoint = parsed.checkpoint_dir and CheckpointOptions(
        parsed.checkpoint_dir,
        parsed.checkpoint_every,
        parsed.checkpoints_kept,
        parsed.checkpoint_timeout,
        parsed.checkpoint_sync,
    )
    return RunOptions(
        sources=sources or (PlanSource(parsed.server),),
        model=ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed),
        steps=parsed.steps,
        backend=backend,
        timeout=parsed.timeout,
        startup_timeout=parsed.startup_timeout,
        look_ahead=parsed.look_ahead,
        threads=parsed.threads,
        result_dir=parsed.result_dir,
        trace=parsed.trace,
        training=TrainingOptions(
            replicas=parsed.data_parallel,
            is_sharded=parsed.shard,
            precision=parsed.precision,
            is_compiled=parsed.compile,
            has_main_gradients=parsed.main_gradients,
            parts=parsed.accumulate,
            clip_norm=parsed.clip_norm,
            non_finite=parsed.non_finite,
            evaluate_every=parsed.evaluate_every,
            checkpoint=checkpoint,
            next_plan=parsed.next_plan,
        ),
    )


def add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    run = commands.add_parser(
        "run",
        help="train a model as one rank of a plan (under torchrun)",
        description="Train a model as one rank of a plan. Start one process per rank with torchrun.",
        epilog=_RUN_EXAMPLES,
    )
    add_plan(run, are_several=True)
    add_model(run)
    run.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
    run.add_argument(
        "--startup-timeout",
        type=positive_number,
        default=1800.0,
        metavar="S",
        help="longest wait for the other ranks to start and connect, and for a tensor in a plan's first "
        "step, when ranks may compile (default 1800)",
    )
    run.add_argument(
        "--threads", type=positive, help="compute threads per rank (default: cores of the host / its ranks)"
    )
    run.add_argument("--pin", action="store_true", help="bind every local rank to one CPU core")
    run.add_argument(
        "--result-dir",
        metavar="DIR",
        type=Path,
        help="write losses, step times and traces to this directory, one file per rank; with several plans, "
        "one folder per plan",
    )
    _add_training(run.add_argument_group("training"))
    _add_checkpoints(run.add_argument_group("checkpoints and plan changes"))
    run.set_defaults(execute=execute)


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-parallel",
        type=positive,
        default=1,
        metavar="D",
        help="number of data-parallel replicas; needs p × D ranks, of which D neighbours hold the same "
        "stages (default 1)",
    )
    group.add_argument(
        "--shard",
        action="store_true",
        help="divide parameters, gradients and optimizer state among the replicas, by rows",
    )
    add_program(group)
    add_compile(group)
    group.add_argument(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help="run the plan N times per step, each time on other microbatches, before the optimizer's step "
        "(default 1)",
    )
    group.add_argument(
        "--clip-norm",
        type=positive_number,
        metavar="X",
        help="clip the gradient of the whole model to this norm. Makes ranks wait for each other, so plan "
        "with objective makespan",
    )
    group.add_argument(
        "--non-finite",
        choices=("fail", "skip", "continue"),
        default="fail",
        help="what to do if a step's loss or gradients are infinite or NaN: end the run with an error "
        "(default); skip the update on all ranks, which makes them wait for each other once per step; or "
        "continue",
    )
    group.add_argument(
        "--evaluate-every", type=positive, metavar="N", help="evaluate (forward only) every N steps"
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        type=Path,
        help="save checkpoints in this directory, which all ranks must share, and resume from its newest "
        "complete one",
    )
    group.add_argument(
        "--checkpoint-every",
        type=positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (default 100)",
    )
    group.add_argument(
        "--checkpoints-kept",
        type=positive,
        default=3,
        metavar="K",
        help="number of newest checkpoints to keep (default 3)",
    )
    group.add_argument(
        "--checkpoint-timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="longest wait for the slowest rank's file (default 600)",
    )
    group.add_argument(
        "--checkpoint-sync",
        action="store_true",
        help="wait until each checkpoint is written (default: write it in the background, from a copy of the "
        "state in host memory)",
    )
    group.add_argument(
        "--next-plan",
        metavar="FILE",
        type=Path,
        help="watch this file for a plan, and change to it between two steps; it must have the same number "
        "of ranks and microbatches, placement and layers per stage. Give it to all ranks; only rank 0 reads "
        "it",
    )
