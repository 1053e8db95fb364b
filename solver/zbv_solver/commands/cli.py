"""The ``zbv`` command: its arguments, exit statuses and error messages.

Exit status: 0 done; 2 wrong input; 3 no plan fits the memory limit; 70 a plan contradicts a lower bound (a
bug in zbv); 130 interrupted by Ctrl-C or SIGTERM (a search has then written or shown its best result so
far). Results go to standard output or to a file, progress and messages to standard error. The module of a
command is imported when the command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from zbv_solver.commands.messages import contradiction
from zbv_solver.commands.parser import Parser
from zbv_solver.errors import (
    ContradictedBound,
    InfeasibleMemory,
    InvalidInput,
    InvalidPlan,
    MissingDependency,
    NoLayoutFits,
)
from zbv_solver.export import FORMATS

EXIT_WRONG_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_CONTRADICTION = 70
EXIT_INTERRUPTED = 130
OPTIONAL_PACKAGES = ("numba", "ortools", "jinja2", "markupsafe")

MODULES = {
    "plan": "searches",
    "compare": "searches",
    "frontier": "searches",
    "cut": "cut",
    "pack": "searches",
    "check": "check",
    "simulate": "plan_files",
    "export": "plan_files",
    "refit": "plan_files",
    "estimate": "estimate",
    "layout": "layout",
}
"""The module of every command; it has a function with the command's name."""

EFFORTS = """\
efforts, and about how long they take for 4 to 8 ranks on two cores:
  quick     construct orders and improve the best one briefly   a second
  standard  also tune the constructors' parameters, improve     5 to 10 seconds
            for longer, and prove small problems optimal
  thorough  the same with about ten times the budget            up to 2 minutes
A search ends early when its plan is proved optimal. Only with --time-limit does the plan depend on the speed
of the machine; otherwise the same problem, effort and seed give the same plan everywhere.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        module = import_module(f"zbv_solver.commands.{MODULES[parsed.command]}")
        getattr(module, parsed.command)(parsed)
    except (InfeasibleMemory, NoLayoutFits) as error:
        return _failed(EXIT_INFEASIBLE, str(error))
    except ContradictedBound as error:
        return _failed(EXIT_CONTRADICTION, contradiction(error))
    except InvalidInput as error:
        return _failed(EXIT_WRONG_INPUT, *map(str, error.issues), error.rest)
    except (InvalidPlan, MissingDependency) as error:
        return _failed(EXIT_WRONG_INPUT, str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
            raise
        lost = f"this command needs {error.name}, which is not installed. Install zbv[solver]."
        return _failed(EXIT_WRONG_INPUT, lost)
    except OSError as error:
        lost = f"{error.filename or 'file'}: {error.strerror}. Check the path and its permissions."
        return _failed(EXIT_WRONG_INPUT, lost)
    except KeyboardInterrupt as interrupt:
        return _failed(EXIT_INTERRUPTED, f"interrupted: {interrupt}." if interrupt.args else "interrupted.")
    return 0


def _add_estimate(parser: Parser) -> None:
    from zbv_solver.commands.model_flags import add_estimate_flags

    add_estimate_flags(parser)


def _add_layout(parser: Parser) -> None:
    from zbv_solver.commands.model_flags import add_layout_flags

    add_layout_flags(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="layouts with their plans (JSON), or -")
    parser.add_argument(
        "--cut",
        metavar="LAYOUT",
        help="time the layout that the flags fix with this cut, as `zbv cut --layout` takes it, and say what "
        "the executor holds",
    )
    _add_workers(parser)


def _parser() -> Parser:
    parser = Parser(
        prog="zbv",
        description="Plan zero-bubble V schedules for pipeline-parallel training.",
        epilog="exit status: 0 done; 2 wrong input; 3 no plan fits the memory limit; 70 a bug in zbv; 130 "
        "interrupted. '-' is standard input or output.",
    )
    parser.add_common_flags()
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)

    def add(
        name: str,
        summary: str,
        description: str | None = None,
        *,
        reads: str | None = None,
        epilog: str | None = None,
    ) -> Parser:
        parser: Parser = commands.add_parser(
            name,
            help=summary,
            description=description or f"{summary[0].upper()}{summary[1:]}.",
            epilog=epilog,
        )
        if reads is not None:
            parser.add_argument(reads, help=f"{reads} file (JSON), or -")
        return parser

    plan = add("plan", "search a plan for a problem", reads="problem", epilog=EFFORTS)
    plan.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="plan file; without it, a summary is printed to a terminal and the plan to a pipe",
    )
    _add_search(plan)
    plan.add_argument(
        "--jitter",
        metavar="JITTER",
        help="choose the plan for durations that vary, by simulation: relative standard deviations, such as "
        "5%% or action=5%%,transfer=20%%, or a JSON file with a jitter document, as for `zbv simulate`; the "
        "search takes about four times as long",
    )
    plan.add_argument(
        "--quantile",
        type=float,
        metavar="Q",
        help="with --jitter, the quantile of the simulated times to choose for, from 0.5 to 0.99 (default: "
        "their mean)",
    )

    checked = add(
        "check",
        "verify a plan, or a schedule of PyTorch, against a problem",
        "Verify the orders of a plan and everything that it states about them, print its times and memory, "
        "and list which of its claims are verified. Lower bounds are verified only with --prove. A schedule "
        "is a CSV file of torch.distributed.pipelining, with or without communication.",
    )
    checked.add_argument("problem", nargs="?", help="problem file (JSON), or - (default: the plan's own)")
    checked.add_argument("plan", help="plan file (JSON), schedule file (CSV), or -")
    checked.add_argument(
        "--problem", dest="of_problem", metavar="FILE", help="the problem file, instead of the first argument"
    )
    checked.add_argument(
        "-o", "--output", metavar="FILE", help="write a plan file with the metrics, for the other commands"
    )
    checked.add_argument(
        "--prove",
        action="store_true",
        help="prove the stated lower bounds again, and reject those that zbv cannot prove",
    )
    _add_json(checked, "text")

    compared = add("compare", "compare a plan with the classical schedules", reads="problem", epilog=EFFORTS)
    _add_search(compared)
    _add_json(compared, "a table")

    frontier = add(
        "frontier",
        "search the best objective within every memory limit",
        "Search the problem at memory limits from the smallest feasible one to twice the memory of 1F1B,\n"
        "ignoring its own limit. Layers are cut again at every limit, and recomputed as needed to fit.",
        reads="problem",
        epilog=EFFORTS,
    )
    frontier.add_argument("-o", "--output", metavar="DIR", help="keep the plans and frontier.json here")
    _add_search(frontier, "quick", " of every limit")
    _add_json(frontier, "a table")

    cut = add(
        "cut",
        "cut layers for Megatron-LM, torchtitan, or PyTorch's schedules, which keep their own order",
        "Find the best cut of a model's layers for an executor that keeps its own order, with a proven bound "
        "over all cuts; print the executor's settings, and what any order could gain. With --layout, time a "
        "cut of your own instead.",
        reads="problem",
    )
    cut.add_argument(
        "--executor", required=True, choices=("megatron", "torch", "torchtitan"), help="whose order to use"
    )
    cut.add_argument(
        "--layout",
        metavar="TEXT",
        help="a cut of your own, to be timed and compared with the best one: a layout of Megatron-LM such as "
        "'Et*8|t*7|t*7|t*8L', transformer layers per stage such as 8,7,7,8 or 10,12x6,10, flags such as "
        "--layout='--decoder-first-pipeline-num-layers 11', or names such as "
        '\'[["tok_embeddings", "layers.0"], …]\' of torchtitan',
    )
    cut.add_argument(
        "--virtual-stages",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of stages per rank to try (default: 1 to 4)",
    )
    cut.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="Megatron-LM's microbatches per virtual stage in a row (default: try several)",
    )
    cut.add_argument(
        "--schedule",
        nargs="+",
        metavar="NAME",
        help="schedules of PyTorch to try (default: 1F1B and Interleaved1F1B)",
    )
    cut.add_argument(
        "--recompute",
        choices=("none", "all", "uniform", "per-stage"),
        help="stages to recompute: none, all, either of the two, or any choice, which no executor can "
        "express (default: what the executor offers, with megatron also first layers of every stage)",
    )
    cut.add_argument(
        "--recompute-layers",
        type=int,
        metavar="N",
        help="recompute the first N transformer layers of every stage (megatron)",
    )
    cut.add_argument("-o", "--output", metavar="FILE", help="plan file with the executor's order")
    cut.add_argument("--no-free-order", action="store_true", help="do not search what any order would gain")
    _add_effort(cut, "standard", best="cut and its proven bound")
    _add_json(cut, "a table")

    packed = add(
        "pack",
        "choose microbatches and replicas for the sequences of a batch, and plan them",
        "Choose the microbatches of a global batch, how many there are, which replica runs each, their\n"
        "order and the plans, so that the slowest replica ends as early as possible.\n"
        "docs/formats.md describes the batch and the packing.",
        reads="batch",
        epilog=EFFORTS,
    )
    packed.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="packing file; without it, a summary is printed to a terminal and the packing to a pipe",
    )
    packed.add_argument(
        "--compare", action="store_true", help="also plan the usual packing, with the same effort"
    )
    _add_search(packed, "quick", " of every replica")

    simulated = add(
        "simulate",
        "simulate a plan whose durations vary",
        "Simulate iterations of a plan and of the classical schedules in which actions and transfers take "
        "longer or shorter than planned. All schedules meet the same random scenarios.",
        reads="plan",
    )
    simulated.add_argument(
        "--jitter",
        metavar="JITTER",
        help="relative standard deviations, such as 5%% or action=5%%,transfer=20%% (keys: action, F, I, W, "
        "B, rank, transfer); or a JSON file with a jitter document; or the trace files of ranks that ran "
        "the plan, separated by commas (default: action=5%%,transfer=20%%)",
    )
    simulated.add_argument(
        "--scenarios", type=int, default=256, metavar="N", help="simulated iterations (default: 256)"
    )
    simulated.add_argument("--seed", type=int, default=0, help="seed of the scenarios (default: 0)")
    _add_json(simulated, "a table")

    exported = add("export", "convert a plan for another tool", reads="plan")
    formats = "; ".join(f"{name}: {form.description}" for name, form in FORMATS.items())
    exported.offered["--format"] = FORMATS.keys
    exported.add_argument("--format", required=True, metavar="FORMAT", help=formats.replace("%", "%%"))
    _add_output(exported, "output file")

    refit = add(
        "refit",
        "update a problem with the costs that ranks measured",
        "Write a plan's problem with the costs that some or all of its ranks measured (trace-R.json). Plan "
        "it to get a plan for the measured costs.",
    )
    refit.add_argument("plan", help="file of the plan that the ranks ran (JSON), or -")
    refit.add_argument("traces", nargs="+", metavar="trace", help="trace file of a rank (JSON)")
    _add_output(refit, "problem file")

    add(
        "estimate",
        "estimate a problem from a model's configuration and a device",
        "Estimate the layers of a transformer from its configuration: times, activations and static memory, "
        "as a problem for zbv plan. docs/estimates.md explains every key and formula.",
    ).on_use = _add_estimate
    add(
        "layout",
        "search the parallel layout that trains a model fastest on a cluster",
        "Enumerate every parallel layout of a model on a cluster, bound each from below, and plan the most "
        "promising until no other can be better. docs/layouts.md explains the model of costs.",
    ).on_use = _add_layout
    return parser


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help=f"{what} (default: -)")


def _add_json(parser: argparse.ArgumentParser, instead_of: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print JSON instead of {instead_of}")


def _add_search(parser: argparse.ArgumentParser, effort: str = "standard", of: str = "") -> None:
    """The options of a search."""
    _add_effort(parser, effort, of)
    _add_workers(parser)


def _add_effort(parser: argparse.ArgumentParser, effort: str, of: str = "", best: str = "plan") -> None:
    parser.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        default=effort,
        help=f"how hard to search (default: {effort})",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help=f"end the search{of} after this time with the best {best} so far (default: no limit)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the search's random choices; another seed may find another plan (default: 0)",
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=useful_workers(),
        metavar="N",
        help="threads; their number changes no result (default: %(default)s)",
    )


def useful_workers() -> int:
    """Number of threads that a search can use on this machine: it runs two chains."""
    return min(2, os.cpu_count() or 1)


def _failed(status: int, *messages: str) -> int:
    """Write messages, and return the exit status."""
    for message in filter(None, messages):
        sys.stderr.write(f"zbv: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
