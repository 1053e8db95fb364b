"""The ``zbv-worker`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbv_solver import __version__

from zbv_worker.agent_cli import add_agent
from zbv_worker.agent_cli import execute as be_an_agent
from zbv_worker.arguments import positive, positive_number
from zbv_worker.rehearse_cli import add_rehearse
from zbv_worker.rehearse_cli import execute as rehearse

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from zbv_worker.run import PlanSource, RunOptions

_EXIT_FAILED = 1
_EXIT_WRONG_INPUT = 2

_RUN_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 --no-python zbv-worker run --server http://planner:8000 --plan 1f3a… \\
      --model mypackage.model:build --steps 1000
  torchrun --nproc-per-node 2 --no-python zbv-worker run --plan-file plan.json \\
      --model zbv_worker.models.gpt:gpt --model-args '{"layers": 8}' --steps 20
"""
_PROFILE_EXAMPLES = """\
example:
  zbv-worker profile --model zbv_worker.models.gpt:gpt --pp 2 --microbatches 8 -o problem.json
  zbv plan problem.json -o plan.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 done, 1 failed, 2 the input is wrong."""
    parsed = _parser().parse_args(arguments)
    from zbv_worker.errors import Disagreement, InvalidRun, WorkerError

    try:
        if parsed.command == "agent":
            return be_an_agent(parsed)
        if parsed.command == "rehearse":
            return rehearse(parsed, sys.argv[1:] if arguments is None else arguments)
        return _run(parsed) if parsed.command == "run" else _profile(parsed)
    except (InvalidRun, Disagreement) as error:
        return _failed(error, _EXIT_WRONG_INPUT)
    except WorkerError as error:
        return _failed(error, _EXIT_FAILED)


def _failed(error: Exception, status: int) -> int:
    print(f"zbv-worker: {error}", file=sys.stderr, flush=True)
    return status


def _run(parsed: argparse.Namespace) -> int:
    from zbv_worker.distributed import World
    from zbv_worker.launch import pin_to_core
    from zbv_worker.run import run

    options = _run_options(parsed)
    world = World.from_environment()
    if parsed.pin:
        pin_to_core(world.local_rank)
    run(options, world)
    return 0


def _run_options(parsed: argparse.Namespace) -> RunOptions:
    from zbv_worker.model import ModelSpec
    from zbv_worker.run import RunOptions

    return RunOptions(
        sources=_sources(parsed),
        model=ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed),
        steps=parsed.steps,
        backend=parsed.backend,
        timeout=parsed.timeout,
        look_ahead=parsed.look_ahead,
        threads=parsed.threads,
        result_dir=parsed.result_dir,
        trace=parsed.trace,
        runtime=parsed.runtime,
    )


def _sources(parsed: argparse.Namespace) -> tuple[PlanSource, ...]:
    from zbv_worker.run import PlanSource

    fetched = [PlanSource(parsed.server, plan) for plan in parsed.plan]
    sources = (*fetched, *(PlanSource(file=file) for file in parsed.plan_file))
    return sources or (PlanSource(parsed.server),)


def _profile(parsed: argparse.Namespace) -> int:
    from zbv_worker.model import ModelSpec
    from zbv_worker.profile import ProfileOptions, profile, write_problem

    options = ProfileOptions(
        model=ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed),
        pp_degree=parsed.pp,
        microbatches=parsed.microbatches,
        repeats=parsed.repeats,
        backend=parsed.backend,
        memory_limit_fraction=parsed.memory_limit_fraction,
        timeout=parsed.timeout,
    )
    write_problem(profile(options), parsed.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zbv-worker",
        description="Runs pipeline plans on real ranks, and measures what they are made from.",
    )
    parser.add_argument("--version", action="version", version=f"zbv-worker {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_profile(commands)
    add_rehearse(commands)
    add_agent(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="train a model as one rank of a plan (under torchrun)",
        description="Train a model as one rank of a plan. Start one per rank, with torchrun.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = run.add_argument_group("the plan, from a service or a file")
    source.add_argument("--server", metavar="URL", help="address of the service")
    source.add_argument("--plan", metavar="ID", action="append", default=[], help="the plan's id there")
    source.add_argument(
        "--plan-file",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a plan file, with no service at all. Several plans take turns step by step, each training a "
        "copy of its own, so that their times can be compared",
    )
    _add_model(run)
    run.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
    run.add_argument(
        "--look-ahead", type=positive, default=3, help="receives posted ahead per channel (default 3)"
    )
    run.add_argument(
        "--runtime",
        choices=("zbv", "torch"),
        default="zbv",
        help="what walks the lists: zbv's own executor (default), or torch.distributed.pipelining's "
        "(which has no --look-ahead)",
    )
    run.add_argument("--threads", type=positive, help="compute threads per rank (default: torch's choice)")
    run.add_argument("--pin", action="store_true", help="bind every local rank to a CPU core of its own")
    run.add_argument(
        "--result-dir",
        metavar="DIR",
        type=Path,
        help="write losses, step times and traces here, one file per rank; of several plans, one "
        "folder per plan",
    )
    run.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write when every action happened on every rank, on one clock, for Perfetto",
    )


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure a model's stages on this machine and write a problem",
        description="Measure F, I, W, B, transfers and memory of a model's 2P stages, by P ranks at once.",
        epilog=_PROFILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(profile)
    profile.add_argument("--pp", type=positive, required=True, metavar="P", help="number of ranks")
    profile.add_argument(
        "--microbatches", type=positive, required=True, metavar="M", help="microbatches per step"
    )
    profile.add_argument("--repeats", type=positive, default=10, help="measurements per number (default 10)")
    profile.add_argument(
        "--memory-limit-fraction",
        type=positive_number,
        metavar="X",
        help="limit the memory of each rank to X of what 1F1B needs on its fullest rank (default: unlimited)",
    )
    profile.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the problem; - for standard output"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", required=True, metavar="MODULE:FACTORY", help="see zbv_worker.model for what it must offer"
    )
    command.add_argument("--model-args", metavar="JSON", help="keyword arguments of the factory")
    command.add_argument("--seed", type=int, default=0, help="passed to the factory (default 0)")
    command.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="gloo: CPU; nccl: CUDA")
    command.add_argument(
        "--timeout",
        type=positive_number,
        default=120.0,
        metavar="S",
        help="longest wait for a tensor (default 120)",
    )


if __name__ == "__main__":
    sys.exit(main())
