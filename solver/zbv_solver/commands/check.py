"""``zbv check``: verify a plan, or a schedule that another program wrote."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from zbv_solver.commands.interrupt import interruptible
from zbv_solver.commands.messages import print_json
from zbv_solver.documents.files import file_label, parse_json, plain, read_text, write
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.export import quantities
from zbv_solver.export.torch_csv import TorchSchedule, is_torch_csv, parse
from zbv_solver.plans.plan import Plan, Provenance, plan_json
from zbv_solver.plans.reading import PlanDocument, parse_plan_document
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import load_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.claims import CheckedPlan, Claim, check_plan


def check(arguments: argparse.Namespace) -> None:
    """Check every claim of a plan file, print its metrics, and list which claims are verified."""
    if arguments.problem is not None and arguments.of_problem is not None:
        raise InvalidInput.at("", "found two problems; give one, as the first file or with --problem.")
    path = arguments.problem if arguments.of_problem is None else arguments.of_problem
    asked = None if path is None else load_problem(path)
    text = read_text(arguments.plan)
    try:
        if is_torch_csv(arguments.plan, text):
            checked, method = (
                _checked_schedule(parse(text), asked, path),
                f"schedule {file_label(arguments.plan)}",
            )
        else:
            document = parse_plan_document(parse_json(text, arguments.plan))
            method = document.provenance.method
            checked = interruptible(
                lambda stop: check_plan(document, asked, prove=arguments.prove, cancelled=stop)
            )
    except InvalidInput as error:
        is_named = any(issue.source for issue in error.issues)
        raise (error if is_named else error.found_in(file_label(arguments.plan))) from None
    except InvalidPlan as error:
        raise InvalidPlan(f"{file_label(arguments.plan)}: {error}") from None
    if arguments.output is not None:
        _write(checked, method, arguments.output)
    if arguments.json:
        result = {
            "is_valid": True,
            "metrics": None if checked.metrics is None else plain(checked.metrics),
            "claims": [asdict(claim) for claim in checked.claims],
        }
        print_json(result)
    else:
        sys.stdout.write("\n".join(_summary(checked)) + "\n")


def _checked_schedule(schedule: TorchSchedule, asked: AnyProblem | None, path: str | None) -> CheckedPlan:
    """Check a schedule of PyTorch; layers get the best cut for its order."""
    if asked is None or path is None:
        raise InvalidInput.at("", "a schedule has no costs. Give its problem: --problem FILE.")
    if asked.microbatches != schedule.microbatches or asked.pp_degree != schedule.placement.pp_degree:
        raise InvalidInput.at(
            "",
            f"found {schedule.placement.pp_degree} ranks and {schedule.microbatches} microbatches, numbered "
            f"from 0; the problem has {asked.pp_degree} and {asked.microbatches}. Give the problem of the "
            f"schedule.",
        )
    problem = _best_cut(schedule, asked, path) if isinstance(asked, LayeredProblem) else asked
    if problem.placement.rank_of != schedule.placement.rank_of:
        raise InvalidInput.at(
            "",
            f"found {schedule.placement.n_stages} stages with placement {schedule.placement.kind}; the "
            f"problem has {problem.n_stages} with placement {problem.placement.kind}. Give the costs of the "
            f"schedule's stages, and its placement.",
        )
    orders = schedule.orders if problem.communication is not None else schedule.orders.without_pairs()
    document = PlanDocument(problem=problem_json(problem), ranks=orders.all_text())
    checked = check_plan(document, problem)
    return replace(checked, claims=(*checked.claims, *_schedule_claims(schedule, checked.problem)))


def _best_cut(schedule: TorchSchedule, asked: LayeredProblem, path: str) -> Problem:
    """The shortest cut that is found for a schedule; errors name the file of the layers."""
    from zbv_models.fixed_orders.best_cut import best_cut
    from zbv_models.fixed_orders.schedules import Schedule

    order = Schedule(
        "torch", "read", schedule.placement, schedule.microbatches, read=schedule.orders.without_pairs()
    )
    try:
        found = best_cut(asked, [order], recompute="uniform", allow_empty=bool(asked.rules.allow_empty))
    except InvalidInput as error:
        raise error.found_in(file_label(path)) from None
    return found.shortest


def _schedule_claims(schedule: TorchSchedule, problem: Problem) -> list[Claim]:
    """What a schedule says besides its orders."""
    from zbv_solver.verify.communication import verify_gradients, verify_transfers

    claims, alone = [], schedule.orders.without_pairs()
    if schedule.communication is not None:
        verify_transfers(problem, alone, schedule.communication)
        claims.append(Claim("", "every tensor is sent and received in order", True, "entry by entry"))
    runs_right, reason = True, "entry by entry"
    try:
        verify_gradients(problem, schedule.communication or alone.all_text())
    except InvalidPlan as error:
        runs_right, reason = False, str(error)
    claims.append(
        Claim("", "losses and reductions come in the order that PyTorch's runtime needs", runs_right, reason)
    )
    if schedule.renamed:
        reason = "older versions of PyTorch write it so"
        claims.append(Claim("", f"{schedule.renamed} B with a separate W are I", False, reason))
    if schedule.from_one:
        reason = "PyTorch's Schedule1F1B writes them so, and its runtime cannot execute such a file"
        claims.append(Claim("", "forwards 1, 2, … of the last rank are 0, 1, …", False, reason))
    if schedule.orders.paired is not None:
        is_known = problem.communication is not None
        reason = "as costs.communication says" if is_known else "the problem has no costs.communication"
        count = int(schedule.orders.paired.sum())
        claims.append(Claim("", f"{count} pairs of F and B overlap", is_known, reason))
    return claims


def _write(checked: CheckedPlan, method: str, path: str) -> None:
    if checked.metrics is None:
        raise InvalidPlan("the metrics are not known; install zbv[solver] to write the plan.")
    plan = Plan(checked.problem, checked.orders, checked.metrics, provenance=Provenance(method))
    write(path, json.dumps(plan_json(plan)) + "\n")


def _summary(checked: CheckedPlan) -> list[str]:
    lines = ["valid", *_metrics(checked)]
    for title, claims in (("verified:", checked.verified), ("not verified:", checked.unverified)):
        if claims:
            lines += [title, *(f"  {claim.text} ({claim.reason})" for claim in claims)]
    return lines


def _metrics(checked: CheckedPlan) -> list[str]:
    """Times, memory, and the cut of layers, one line each."""
    metrics, problem = checked.metrics, checked.problem
    if metrics is None:
        return []
    units = quantities.stated(problem.units)
    lines = [
        f"span {quantities.time(metrics.span, units)}, makespan {quantities.time(metrics.makespan, units)}, "
        f"bubble rate {quantities.percent(metrics.bubble_rate)}",
        f"lower bound of the {problem.objective} for these stages: "
        f"{quantities.time(metrics.lower_bound, units)}",
    ]
    peak, limit = max(metrics.peak_memory), problem.memory.limit
    if peak > 0:
        rank = metrics.peak_memory.index(peak)
        of = "" if limit is None else f" of {quantities.memory(limit[rank], units)}"
        lines.append(f"peak memory {quantities.memory(peak, units)}{of} on rank {rank}")
    if problem.model is not None:
        lines.append(f"layers per stage: {' '.join(str(len(stage)) for stage in problem.model.partition)}")
    return lines
