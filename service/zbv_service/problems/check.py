"""Checks a problem before a search: reports every broken rule, and derives facts from its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zbv_solver.errors import InvalidInput, InvalidPlan, Issue
from zbv_solver.frontiers import memory_fraction
from zbv_solver.partition.cut_space import CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.plans.reading import parse_orders, parse_plan_document
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem

from zbv_service.documents.parsing import parse_body
from zbv_service.documents.problems import Question, parse_request, require_size, summary_of
from zbv_service.plans.documents import ClaimDocument
from zbv_service.problems.documents import (
    CheckRequest,
    IssueDocument,
    LayersFacts,
    PlacementFacts,
    PlanCheck,
    ProblemCheck,
    ProblemFacts,
)
from zbv_service.records.shared import ProblemSummary
from zbv_service.settings import Settings


def check_text(settings: Settings, body: Any) -> bytes:
    """The result of :func:`check` as JSON text, which takes long to encode for many stages."""
    return check(settings, body).model_dump_json().encode()


def check(settings: Settings, body: Any) -> ProblemCheck:
    """Check the request for a search in a decoded body: its broken rules, or facts about a valid problem."""
    try:
        question = _question_of(body, settings)
    except InvalidInput as error:
        return refused(error)
    return ProblemCheck(
        is_valid=True,
        issues=[],
        problem_summary=ProblemSummary.model_validate(summary_of(question)),
        facts=facts_of(question) if isinstance(question, Problem) else None,
        layers=facts_of_layers(question) if isinstance(question, LayeredProblem) else None,
        plan=None if body.get("plan") is None else _check_plan(body["plan"], question, settings.max_cells),
    )


def refused(error: InvalidInput) -> ProblemCheck:
    """The broken rules of a body that is not a valid problem."""
    issues = _documents_of(error.issues)
    return ProblemCheck(is_valid=False, issues=issues, problem_summary=None, facts=None)


def _check_plan(document: Any, question: Question, max_cells: int) -> PlanCheck:
    """Check whether a plan solves the problem. Its bounds are not proven, which may take minutes."""
    from zbv_solver.search.claims import check_plan

    try:
        require_size(parse_orders(parse_plan_document(document))[0], max_cells)
        checked = check_plan(document, question)
    except InvalidInput as error:
        return PlanCheck(is_valid=False, issues=_documents_of(error.below("/plan").issues), claims=[])
    except InvalidPlan as error:
        return PlanCheck(is_valid=False, issues=_documents_of([Issue("/plan", str(error))]), claims=[])
    return PlanCheck(is_valid=True, issues=[], claims=[ClaimDocument.of(claim) for claim in checked.claims])


def _documents_of(issues: Iterable[Issue]) -> list[IssueDocument]:
    return [IssueDocument(pointer=issue.pointer, detail=issue.detail) for issue in issues]


def _question_of(body: Any, settings: Settings) -> Question:
    asked = body
    if isinstance(body, dict):
        asked = {key: value for key, value in body.items() if key not in ("limit_fraction", "plan")}
    try:
        question, _ = parse_request(asked, settings)
    except InvalidInput as error:
        issues = [*error.issues, *_wrong_fraction(body)]
        raise InvalidInput(issues, error.more, error.is_partial) from None
    request = parse_body(CheckRequest, body)
    if request.limit_fraction is None:
        return question
    if isinstance(question, LayeredProblem):
        raise InvalidInput.at(
            "/limit_fraction",
            "found a fraction of 1F1B's memory, and layers that are not cut into stages yet. 1F1B's memory "
            "depends on the cut, so give memory.limit.",
        )
    return _limited(question, request.limit_fraction)


def _wrong_fraction(body: Any) -> list[Issue]:
    """The broken rules of the limit's fraction, reported together with those of the rest."""
    try:
        parse_body(CheckRequest, body)
    except InvalidInput as error:
        return [issue for issue in error.issues if issue.pointer == "/limit_fraction"]
    return []


def _limited(problem: Problem, fraction: float) -> Problem:
    if problem.memory.limit is not None:
        raise InvalidInput.at(
            "/limit_fraction",
            "found both limit_fraction and memory.limit; give only one of them.",
        )
    try:
        memory_fraction.smallest(problem)  # raises if no stage holds memory
        return memory_fraction.at_fraction(problem, fraction)  # raises if the limit overflows
    except InvalidInput as error:
        raise InvalidInput([Issue("/limit_fraction", issue.detail) for issue in error.issues]) from None


def facts_of(problem: Problem) -> ProblemFacts:
    """The facts that follow from a problem without a search."""
    limits, smallest = problem.memory.limit, problem.smallest_limit
    whole = memory_fraction.one_f_one_b_memory(problem)
    return ProblemFacts(
        stages=problem.n_stages,
        actions=problem.max_actions,
        limit=None if limits is None else list(limits),
        limit_fraction=memory_fraction.of_limit(problem) if whole else None,
        smallest_limit=list(smallest),
        smallest_fraction=memory_fraction.smallest(problem) if whole else None,
        fits=limits is None or not any(map(exceeds, smallest, limits)),
        one_f_one_b_memory=whole,
        busy=[problem.busy_time(rank) for rank in range(problem.pp_degree)],
    )


def facts_of_layers(problem: LayeredProblem) -> LayersFacts:
    """Facts about layers that hold for every cut."""
    each, tables = problem.model.each, CutTables.of(problem)
    return LayersFacts(
        layers=problem.model.n_layers,
        parts=problem.n_atoms,
        placements=[
            PlacementFacts(placement=it.kind, chunks=it.chunks, stages=it.n_stages)
            for it in problem.placements
        ],
        work=float(tables.cheapest[-1]),
        least_busy=problem.microbatches * least_worst_load(problem, tables),
        static=float(sum(layer.costs.memory.static for layer in each)),
        held=float(sum(layer.costs.memory.forward for layer in each)),
        limit=None if problem.limit is None else list(problem.limit),
        can_recompute=problem.model.can_recompute,
    )
