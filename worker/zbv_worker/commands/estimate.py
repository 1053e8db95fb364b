"""``zbv-worker estimate``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.commands.arguments import json_output, positive, positive_number

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from zbv_worker.measure.estimate.estimate import Estimate

_EXAMPLES = """\
example:
  zbv-worker estimate zbv_worker.models.gpt:gpt --model-args '{"layers": 48, "width": 4096, "heads": 32}' \\
      --pp-degree 8 --microbatches 64 --tflops 400 -o problem.json
  zbv plan problem.json -o plan.json
"""
_MICROBATCHES_PER_RANK = 4


def add_estimate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    estimate = commands.add_parser(
        "estimate",
        help="find what a model's stages and layers hold and compute, on no device and in no memory",
        description="Walk a model through F, I and W without computing anything: memory after each, "
        "workspace, parameters, output size, floating-point operations. Layers are walked one by one where "
        "the model offers them, and the planner may choose the cut then.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    estimate.add_argument(
        "model", metavar="MODULE:FACTORY", help="see zbv_worker.model for what it must offer"
    )
    estimate.add_argument("--model-args", metavar="JSON", help="keyword arguments of the factory")
    estimate.add_argument("--seed", type=int, default=0, help="passed to the factory (default 0)")
    count = estimate.add_mutually_exclusive_group()
    count.add_argument(
        "--pp-degree", type=positive, metavar="P", help="number of ranks; the model is cut into 2P stages"
    )
    count.add_argument("--stages", type=positive, metavar="S", help="cut the model into S stages")
    estimate.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what autocast computes in (default float32: no autocast)",
    )
    _add_outputs(estimate.add_argument_group("what is written"))


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the problem for `zbv plan`; - for standard output. Needs --pp-degree",
    )
    group.add_argument(
        "--microbatches", type=positive, metavar="M", help="of the problem (default: four per rank)"
    )
    group.add_argument(
        "--tflops",
        type=positive_number,
        metavar="X",
        help="10^12 operations per second that a device achieves: the problem's times are us then. Without "
        "it they are 10^9 operations",
    )
    group.add_argument(
        "--latency", type=positive_number, metavar="US", help="of a transfer between ranks, in us (default 0)"
    )
    group.add_argument(
        "--bandwidth", type=positive_number, metavar="GB/S", help="of a transfer, in 10^9 bytes per second"
    )
    group.add_argument("--report", metavar="FILE", type=Path, help="write everything that was found, as JSON")


def execute(parsed: argparse.Namespace) -> int:
    """Estimate, print and write; returns the exit status."""
    from rich.console import Console

    from zbv_worker.errors import InvalidRun
    from zbv_worker.measure.estimate.estimate import estimate_layers, estimate_stages
    from zbv_worker.measure.estimate.report import estimate_json, flops_table, held_table
    from zbv_worker.model.checks import has_ties
    from zbv_worker.model.protocol import Layered
    from zbv_worker.model.spec import ModelSpec

    _require_scale(parsed)
    model = ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed).build()
    n_stages = 2 * parsed.pp_degree if parsed.pp_degree else parsed.stages
    if n_stages is None and not isinstance(model, Layered):
        raise InvalidRun(
            f"found a {type(model).__name__} without layers (zbv_worker.model.Layered): its stages are what "
            f"can be estimated. Give --pp-degree or --stages."
        )
    layers = list(estimate_layers(model, parsed.precision)) if isinstance(model, Layered) else []
    stages = list(estimate_stages(model, n_stages, parsed.precision)) if n_stages else []
    to_pipe = parsed.output is not None and str(parsed.output) == "-"
    out = Console(stderr=to_pipe)
    if layers:
        out.print(flops_table("Layers", layers), held_table("Layers", layers))
        out.print(held_table("Layers, recomputed", layers, recomputed=True))
    if stages:
        title = "Stages as the model cuts them"
        out.print(flops_table(title, stages), held_table(title, stages))
    with json_output("--report", parsed.report) as write:
        write(estimate_json(layers, stages))
    with json_output("--output", parsed.output) as write:
        if parsed.output is not None:
            write(_problem(parsed, layers, stages, is_tied=has_ties(model)))
    return 0


def _require_scale(parsed: argparse.Namespace) -> None:
    """What can be wrong before anything is estimated."""
    from zbv_worker.errors import InvalidRun

    if parsed.output is not None and parsed.pp_degree is None:
        raise InvalidRun("--output: found no --pp-degree; a problem is for a number of ranks. Give it.")
    timed = {"--latency": parsed.latency, "--bandwidth": parsed.bandwidth}
    found = [flag for flag, value in timed.items() if value is not None]
    if found and parsed.tflops is None:
        raise InvalidRun(
            f"{found[0]}: found no --tflops; without it a problem's times are operations, not us. Give it."
        )


def _problem(
    parsed: argparse.Namespace, layers: list[Estimate], stages: list[Estimate], *, is_tied: bool
) -> dict[str, Any]:
    from zbv_solver.problem.writing import problem_json

    from zbv_worker.measure.estimate.document import Scale, estimated_document, stage_problem

    scale = Scale(parsed.tflops, parsed.latency or 0.0, parsed.bandwidth)
    microbatches = parsed.microbatches or _MICROBATCHES_PER_RANK * parsed.pp_degree
    if layers:
        return estimated_document(layers, parsed.pp_degree, microbatches, scale, is_tied=is_tied)
    return problem_json(stage_problem(stages, microbatches, scale))
