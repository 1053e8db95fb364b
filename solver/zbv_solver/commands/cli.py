"""The ``zbv`` command: plan, check, compare, frontier, export, refit, estimate.

Exit status: 0 done; 2 the input is wrong; 3 no plan fits the memory limit; 70 a plan contradicts a lower
bound, which is a bug in zbv; 130 interrupted by Ctrl-C or SIGTERM (``plan`` has then written the best plan so
far). Results go to standard output or the named file, progress and messages to standard error. Everything
heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from zbv_solver._version import __version__
from zbv_solver.commands import contradiction
from zbv_solver.commands.cut_summary import cut_summary
from zbv_solver.commands.estimate import add_arguments as add_estimate_arguments
from zbv_solver.commands.searching import useful_workers, watched_search
from zbv_solver.commands.tables import print_claims, print_comparison, print_frontier, print_layered_frontier
from zbv_solver.documents.files import file_label, output, read_json, write
from zbv_solver.errors import (
    ContradictedBound,
    InfeasibleMemory,
    InvalidInput,
    InvalidPlan,
    MissingDependency,
)
from zbv_solver.problem.reading import load_problem

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.layered_problem import LayeredProblem
    from zbv_solver.problem.problem import Problem

EXIT_WRONG_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_CONTRADICTION = 70
EXIT_INTERRUPTED = 130
OPTIONAL_PACKAGES = ("numba", "ortools", "jinja2", "markupsafe")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except InfeasibleMemory as error:
        _complain(f"{error}")
        return EXIT_INFEASIBLE
    except ContradictedBound as error:
        _complain(contradiction.report(error))
        return EXIT_CONTRADICTION
    except InvalidInput as error:
        for issue in error.issues:
            _complain(str(issue))
        if error.rest:
            _complain(error.rest)
        return EXIT_WRONG_INPUT
    except (InvalidPlan, MissingDependency) as error:
        _complain(str(error))
        return EXIT_WRONG_INPUT
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
            raise
        _complain(f"this command needs {error.name}, which is not installed. Install zbv[solver].")
        return EXIT_WRONG_INPUT
    except OSError as error:
        _complain(f"{error.filename or 'file'}: {error.strerror}. Check the path and its permissions.")
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt as interrupt:
        _complain(f"interrupted: {interrupt}." if interrupt.args else "interrupted.")
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zbv",
        description="Plan zero-bubble V schedules for pipeline-parallel training.",
        epilog="Exit status: 0 done, 2 wrong input, 3 no plan fits the memory limit, 70 a bug in zbv, 130 "
        "interrupted. '-' is standard input or output.",
    )
    parser.add_argument("--version", action="version", version=f"zbv {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="search a plan for a problem")
    plan.add_argument("problem", help="problem file (JSON), or -")
    plan.add_argument("-o", "--output", default="-", metavar="FILE", help="plan file (default: -)")
    plan.add_argument("--effort", choices=("quick", "standard", "thorough"), default="standard")
    plan.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop early (default: no limit)")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads (the plan is the same)"
    )
    plan.set_defaults(run=_plan)

    check = commands.add_parser(
        "check",
        help="verify a plan against a problem",
        description="Verify the orders of a plan and everything that it states about them, and list which of "
        "its claims are verified and which are not. Without --prove, lower bounds are not verified.",
    )
    check.add_argument("problem", help="problem file (JSON), or -")
    check.add_argument("plan", help="plan file (JSON), or -")
    check.add_argument(
        "--prove",
        action="store_true",
        help="prove the stated lower bounds again, and refuse those that zbv cannot prove",
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.set_defaults(run=_check)

    compare = commands.add_parser("compare", help="print a plan beside the classical schedules")
    compare.add_argument("problem", help="problem file (JSON), or -")
    compare.add_argument("--effort", choices=("quick", "standard", "thorough"), default="standard")
    compare.add_argument("--json", action="store_true", help="print JSON instead of a table")
    compare.set_defaults(run=_compare)

    frontier = commands.add_parser(
        "frontier",
        help="print the best objective within every memory limit",
        description="Search the problem at memory limits from the smallest feasible one to twice what 1F1B "
        "holds, whatever its own limit is. Layers are cut anew for every limit, and recomputed where that "
        "makes them fit.",
    )
    frontier.add_argument("problem", help="problem file (JSON), or -")
    frontier.add_argument("--effort", choices=("quick", "standard", "thorough"), default="quick")
    frontier.add_argument("--json", action="store_true", help="print JSON instead of a table")
    frontier.set_defaults(run=_frontier)

    export = commands.add_parser("export", help="convert a plan for another tool")
    export.add_argument("plan", help="plan file (JSON), or -")
    export.add_argument("--format", required=True, metavar="FORMAT", help="; ".join(_format_help()))
    export.add_argument("-o", "--output", default="-", metavar="FILE", help="output file (default: -)")
    export.set_defaults(run=_export)

    refit = commands.add_parser(
        "refit",
        help="make a problem of what ranks measured",
        description="Write a plan's problem with its costs as the ranks measured them (trace-R.json, of some "
        "or all ranks), so that a plan for the costs that are can be searched.",
    )
    refit.add_argument("plan", help="plan file (JSON) that the ranks ran, or -")
    refit.add_argument("traces", nargs="+", metavar="trace", help="trace file of a rank (JSON)")
    refit.add_argument("-o", "--output", default="-", metavar="FILE", help="problem file (default: -)")
    refit.set_defaults(run=_refit)

    estimate = commands.add_parser("estimate", help="make a problem of a model's configuration and a device")
    add_estimate_arguments(estimate)
    estimate.set_defaults(run=_estimate)
    return parser


def _format_help() -> list[str]:
    from zbv_solver.export import FORMATS

    return [f"{name}: {form.description}".replace("%", "%%") for name, form in FORMATS.items()]


def _plan(arguments: argparse.Namespace) -> None:
    from zbv_solver.commands.interrupt import terminated_like_interrupted
    from zbv_solver.plans.plan import plan_json

    problem = load_problem(arguments.problem)
    with output(arguments.output) as write_plan, terminated_like_interrupted():
        plan = watched_search(
            problem,
            arguments.effort,
            arguments.time_limit,
            seed=arguments.seed,
            workers=arguments.workers,
            keep=lambda found: write_plan(json.dumps(plan_json(found)) + "\n"),
        )
    if arguments.output != "-":
        _summarise(plan, arguments.output)
    if plan.provenance.extra.get("cut") == "cancelled":
        raise KeyboardInterrupt("the search ended early, and the plan written is the best that it had found")


def _check(arguments: argparse.Namespace) -> None:
    from zbv_solver.commands.interrupt import interruptible
    from zbv_solver.search.claims import check_plan

    asked = load_problem(arguments.problem)
    document = read_json(arguments.plan)
    try:
        checked = interruptible(
            lambda stop: check_plan(document, asked, prove=arguments.prove, cancelled=stop)
        )
    except InvalidInput as error:
        raise error.below(file_label(arguments.plan)) from None
    if arguments.json:
        document = {"is_valid": True, "claims": [asdict(claim) for claim in checked.claims]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        print_claims(checked)


def _compare(arguments: argparse.Namespace) -> None:
    from zbv_solver.plans.plan import baseline_json, plan_json

    plan = watched_search(load_problem(arguments.problem), arguments.effort, None)
    if arguments.json:
        document = {
            "plan_id": plan.plan_id,
            "metrics": plan_json(plan)["metrics"],
            "baselines": [baseline_json(baseline) for baseline in plan.baselines],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        print_comparison(plan)


def _frontier(arguments: argparse.Namespace) -> None:
    from zbv_solver.frontiers.by_stages import baseline_points, frontier_points, point_json
    from zbv_solver.problem.layered_problem import LayeredProblem

    problem = load_problem(arguments.problem)
    if isinstance(problem, LayeredProblem):
        _frontier_of_layers(problem, arguments)
        return
    plans: list[Plan] = []

    def search(limited: Problem) -> Plan:
        plans.append(watched_search(limited, arguments.effort, None))
        return plans[-1]

    points = frontier_points(problem, search)
    if arguments.json:
        document = {"objective": problem.objective, "points": [point_json(point) for point in points]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    print_frontier(problem.objective, points, baseline_points(plans[0]))


def _frontier_of_layers(problem: LayeredProblem, arguments: argparse.Namespace) -> None:
    from zbv_solver.frontiers.by_layers import layered_points, point_json

    points = layered_points(problem, lambda limited: watched_search(limited, arguments.effort, None))
    if arguments.json:
        document = {"objective": problem.objective, "points": [point_json(point) for point in points]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    print_layered_frontier(problem, points)


def _export(arguments: argparse.Namespace) -> None:
    from zbv_solver.export import export
    from zbv_solver.plans.reading import parse_orders, parse_plan, parse_plan_document
    from zbv_solver.search.search import make_plan
    from zbv_solver.verify.verifier import verify

    document = read_json(arguments.plan)
    parsed = parse_plan_document(document)
    if parsed.metrics is None:
        plan = make_plan(*parse_orders(parsed), method=parsed.provenance.method)
    else:
        plan = parse_plan(document)
        verify(plan)
    write(arguments.output, export(plan, arguments.format))


def _refit(arguments: argparse.Namespace) -> None:
    from zbv_solver.measure.rank_trace import parse_rank_trace
    from zbv_solver.measure.refit import largest_change, refit
    from zbv_solver.plans.plan import identity
    from zbv_solver.plans.reading import parse_orders, parse_plan_document
    from zbv_solver.problem.writing import problem_json

    problem, orders = parse_orders(parse_plan_document(read_json(arguments.plan)))
    plan_id = identity(problem_json(problem), orders.all_text())
    traces = []
    for path in arguments.traces:
        try:
            trace = parse_rank_trace(read_json(path))
        except InvalidInput as error:
            raise error.below(file_label(path)) from None
        if trace.plan_id != plan_id:
            raise InvalidInput.at(
                file_label(path), f"was measured with plan {trace.plan_id[:12]}, not with {plan_id[:12]}."
            )
        traces.append(trace)
    measured = refit(problem, traces)
    write(arguments.output, json.dumps(problem_json(measured)) + "\n")
    sys.stderr.write(
        f"measured by {len(traces)} ranks; of the stages' costs, the one furthest from its plan differs by "
        f"{largest_change(problem, measured):.1%}\n"
    )


def _estimate(arguments: argparse.Namespace) -> None:
    from zbv_solver.commands.estimate import run

    run(arguments)


def _summarise(plan: Plan, path: str) -> None:
    metrics = plan.metrics
    proved = "proved optimal" if metrics.status == "optimal" else f"at most {metrics.gap:.2%} above optimal"
    sys.stderr.write(
        f"{path}: {plan.problem.objective} {plan.objective:.6g} ({proved}), bubble rate "
        f"{metrics.bubble_rate:.2%}, {plan.provenance.seconds:.2f} s, plan {plan.plan_id[:12]}\n"
    )
    if plan.problem.model is not None:
        sys.stderr.write(cut_summary(plan))


def _complain(message: str) -> None:
    sys.stderr.write(f"zbv: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
