"""``zbv-worker estimate``: options and execution."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import (
    MODEL_HELP,
    add_factory_arguments,
    add_program,
    json_output,
    positive,
    positive_number,
)

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from zbv_worker.measure.estimate.estimate import Estimate

_EXAMPLES = """\
example:
  zbv-worker estimate zbv_worker.models.gpt:gpt --model-args '{"layers": 48, "width": 4096, "heads": 32}' \\
      --pp-degree 8 --microbatches 64 --tflops 400 -o problem.json
  zbv plan problem.json -o plan.json
"""
_MICROBATCHES_PER_RANK = 4


def add_estimate(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    estimate = commands.add_parser(
        "estimate",
        help="find memory and operations of a model's stages and layers without running it",
        description="Find memory after F, I and W, workspace, parameters, output size and floating-point "
        "operations of a model's stages and layers without computing anything. If the model offers layers, "
        "the problem has layers, and the planner chooses the partition.",
        epilog=_EXAMPLES,
    )
    estimate.add_argument("model", metavar="MODULE:FUNCTION", help=MODEL_HELP)
    add_factory_arguments(estimate)
    count = estimate.add_mutually_exclusive_group()
    count.add_argument(
        "--pp-degree", type=positive, metavar="P", help="number of ranks; estimates the model's 2P stages too"
    )
    count.add_argument("--stages", type=positive, metavar="S", help="estimate the model's S stages too")
    add_program(estimate)
    _add_outputs(estimate.add_argument_group("output"))
    estimate.set_defaults(execute=execute)


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write a problem for `zbv plan` (- for standard output); needs --pp-degree",
    )
    group.add_argument(
        "--microbatches", type=positive, metavar="M", help="microbatches of the problem (default 4 per rank)"
    )
    group.add_argument(
        "--tflops",
        type=positive_number,
        metavar="X",
        help="speed of a device in 10^12 operations per second; the problem's times are then in us (default: "
        "times are in 10^9 operations)",
    )
    group.add_argument(
        "--latency", type=positive_number, metavar="US", help="latency of a transfer in us (default 0)"
    )
    group.add_argument(
        "--bandwidth",
        type=positive_number,
        metavar="GB/S",
        help="bandwidth of a link in 10^9 bytes per second",
    )
    group.add_argument("--report", metavar="FILE", type=Path, help="write all numbers as JSON")


def execute(parsed: argparse.Namespace) -> int:
    """Estimate, print and write; returns the exit status."""
    from rich.console import Console

    from zbv_worker.errors import InvalidRun
    from zbv_worker.host.process import say
    from zbv_worker.measure.estimate.document import estimate_json, flops_table, held_table
    from zbv_worker.measure.estimate.estimate import estimate_layers, estimate_stages
    from zbv_worker.measure.estimate.untrained_types import (
        untrained_config,
        untrained_document,
        untrained_layers,
    )
    from zbv_worker.model.checks import has_ties
    from zbv_worker.model.protocol import Layered
    from zbv_worker.model.spec import ModelSpec
    from zbv_worker.stage.program import Program

    _require_scale(parsed)
    spec = ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed)
    program = Program(parsed.precision, has_main_gradients=parsed.main_gradients)
    document = untrained_document(spec.factory)
    stages: list[Estimate] = []
    if document is not None:
        if parsed.stages:
            raise InvalidRun("--stages: the worker does not train this type, so it has no stages. Omit it.")
        config = untrained_config(document, spec.arguments, program)
        layers, is_tied = untrained_layers(config), config.model.tied_embeddings
        origin = "" if config.model.origin is None else config.model.origin.text
        say(f"zbv-worker: the worker does not train this type; formulas estimate it. {origin}".rstrip())
    else:
        model = spec.build()
        n_stages = 2 * parsed.pp_degree if parsed.pp_degree else parsed.stages
        if n_stages is None and not isinstance(model, Layered):
            raise InvalidRun(
                f"found a {type(model).__name__} without layers (zbv_worker.model.Layered), so only its "
                f"stages can be estimated. Pass --pp-degree or --stages."
            )
        layers = list(estimate_layers(model, program)) if isinstance(model, Layered) else []
        stages = list(estimate_stages(model, n_stages, program)) if n_stages else []
        is_tied = has_ties(model)
    to_pipe = parsed.output is not None and str(parsed.output) == "-"
    out = Console(stderr=to_pipe)
    if layers:
        out.print(flops_table("Layers", layers), held_table("Layers", layers))
        out.print(held_table("Layers, recomputed", layers, recomputed=True))
    if stages:
        title = "Stages, as the model cuts them"
        out.print(flops_table(title, stages), held_table(title, stages))
    with json_output("--report", parsed.report) as write:
        write(estimate_json(layers, stages))
    with json_output("--output", parsed.output) as write:
        if parsed.output is not None:
            write(_problem(parsed, layers, stages, is_tied=is_tied))
    return 0


def _require_scale(parsed: argparse.Namespace) -> None:
    """Check the options before estimating."""
    from zbv_worker.errors import InvalidRun

    if parsed.output is not None and parsed.pp_degree is None:
        raise InvalidRun("--output: a problem needs a number of ranks. Pass --pp-degree too.")
    timed = {"--latency": parsed.latency, "--bandwidth": parsed.bandwidth}
    found = [flag for flag, value in timed.items() if value is not None]
    if found and parsed.tflops is None:
        raise InvalidRun(
            f"{found[0]}: without --tflops the problem's times are operations, not us. Pass --tflops too."
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
