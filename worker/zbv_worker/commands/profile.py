"""``zbv-worker profile``: options and execution."""

from __future__ import annotations

import argparse
from pathlib import Path

from zbv_solver.commands.interrupt import terminated_like_interrupted
from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import (
    WriteJson,
    add_compile,
    add_model,
    add_program,
    json_output,
    positive,
    positive_number,
)

_EXAMPLES = """\
example:
  zbv-worker profile --model zbv_worker.models.gpt:gpt --pp 2 --microbatches 8 -o problem.json
  zbv plan problem.json -o plan.json
"""


def add_profile(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        help="measure a model's layers or stages on this machine and write a problem",
        description="Measure F, I, W, B, transfers and memory on P ranks at the same time. If the model "
        "offers layers, measure each, so that the planner can choose the partition; otherwise, measure its "
        "2P stages.",
        epilog=_EXAMPLES,
    )
    add_model(profile)
    add_program(profile)
    add_compile(profile)
    profile.add_argument(
        "--pp-degree", "--pp", dest="pp", type=positive, required=True, metavar="P", help="number of ranks"
    )
    profile.add_argument(
        "--microbatches", type=positive, required=True, metavar="M", help="microbatches per step"
    )
    profile.add_argument(
        "--by-stage", action="store_true", help="measure the 2P stages as the model cuts them, not its layers"
    )
    profile.add_argument(
        "--recompute",
        action="store_true",
        help="measure every layer with recomputed activations as well, so that the planner can choose "
        "recomputation for stages",
    )
    profile.add_argument(
        "--copies",
        action="store_true",
        help="measure copies of what every stage keeps to the host and back as well, so that the planner can "
        "choose them; needs --by-stage",
    )
    profile.add_argument(
        "--pairs",
        action="store_true",
        help="measure as well what a forward and a backward that run together hide of each other, so that "
        "the planner can choose pairs; needs layers with collectives, such as an all-to-all of experts",
    )
    profile.add_argument(
        "--ranks-per-stage",
        type=positive,
        default=1,
        metavar="E",
        help="processes that hold the same stages, for expert or tensor parallelism: P × E ranks run, of "
        "which E neighbours hold the same stages. The model's function makes their groups. It is also "
        "called without RANK, in the command's own process (default 1)",
    )
    profile.add_argument("--repeats", type=positive, default=10, help="measurements per number (default 10)")
    profile.add_argument(
        "--memory-limit-fraction",
        type=positive_number,
        metavar="X",
        help="limit each rank's activations to X times what 1F1B needs on its fullest rank (default: no "
        "limit)",
    )
    profile.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write all measurements as JSON (medians and 90th percentiles, memory by kind, latency and "
        "bandwidth of each link), and print them as tables on stderr",
    )
    profile.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help="write the problem (- for standard output)",
    )
    profile.set_defaults(execute=execute)


@terminated_like_interrupted()  # otherwise the ranks would go on
def execute(parsed: argparse.Namespace) -> int:
    """Measure and write; returns the exit status."""
    if parsed.recompute and parsed.by_stage:
        from zbv_worker.errors import InvalidRun

        raise InvalidRun(
            "--recompute: cannot be combined with --by-stage, because the planner chooses recomputation only "
            "for layers. Omit one of them."
        )
    if parsed.copies and not parsed.by_stage:
        from zbv_worker.errors import InvalidRun

        raise InvalidRun(
            "--copies: needs --by-stage, because the planner chooses copies only for stages. Add it."
        )
    with (
        json_output("--output", parsed.output) as write_problem,
        json_output("--report", parsed.report) as write_report,
    ):
        _measure(parsed, write_problem, write_report)
    return 0


def _measure(parsed: argparse.Namespace, write_problem: WriteJson, write_report: WriteJson) -> None:
    from rich.console import Console
    from zbv_solver.problem.writing import problem_json

    from zbv_worker.execution.rank_plan import require_layered
    from zbv_worker.host.process import say
    from zbv_worker.measure.profile.layers import layers_of, to_layered_document
    from zbv_worker.measure.profile.profile import ProfileOptions, measure_ranks, stages_of, to_problem
    from zbv_worker.measure.profile.report import print_report, profile_json
    from zbv_worker.model.checks import has_ties
    from zbv_worker.model.protocol import Layered
    from zbv_worker.model.spec import ModelSpec
    from zbv_worker.stage.program import Program
    from zbv_worker.transport.world import default_backend

    spec = ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed)
    model = spec.build()
    by_layer = not parsed.by_stage and isinstance(model, Layered)
    if parsed.recompute and not by_layer:
        require_layered(model, "--recompute measures layers")
    options = ProfileOptions(
        model=spec,
        pp_degree=parsed.pp,
        microbatches=parsed.microbatches,
        repeats=parsed.repeats,
        by_layer=by_layer,
        recompute=parsed.recompute,
        copies=parsed.copies,
        pairs=parsed.pairs,
        ranks_per_stage=parsed.ranks_per_stage,
        backend=parsed.backend or default_backend(parsed.pp * parsed.ranks_per_stage),
        memory_limit_fraction=parsed.memory_limit_fraction,
        program=Program(parsed.precision, parsed.compile, parsed.main_gradients),
        timeout=parsed.timeout,
    )
    ranks = measure_ranks(options)
    measured = [*stages_of(ranks), *(layer.kept for layer in layers_of(ranks))]
    if parsed.pairs and not any(each.pairs for each in measured):
        say("--pairs: nothing starts collectives both in its F and in its backward, so there are no pairs")
    write_problem(
        to_layered_document(options, ranks, is_tied=has_ties(model))
        if by_layer
        else problem_json(to_problem(options, ranks))
    )
    write_report(profile_json(ranks))
    if parsed.report is not None:
        print_report(ranks, Console(stderr=True))
