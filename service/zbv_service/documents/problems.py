"""What a search is asked: a problem given by stages, or layers that are still to be cut into stages."""

from __future__ import annotations

from statistics import fmean
from typing import Annotated, Any

from pydantic import Discriminator, Tag
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.documents import LayeredProblemDocument, ProblemDocument
from zbv_solver.problem.layered_problem import LayeredProblem, PlacementChoice
from zbv_solver.problem.limits import MAX_CELLS
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem as parse_question
from zbv_solver.problem.reading import to_cut_problem, to_layered, to_problem
from zbv_solver.problem.writing import layered_json, problem_json

__all__ = [
    "Question",
    "QuestionDocument",
    "answers",
    "asked_of",
    "largest_stages",
    "parse_question",
    "question_json",
    "read_problem",
    "read_question",
    "require_size",
    "require_stages",
    "summary_of",
    "uncut",
]

Question = Problem | LayeredProblem

MAX_STAGES = 16_384
"""Bounds and schedules take time in the square of the stages: of more than so many, minutes."""

OTHER_PLACEMENTS = ("v", "single", "loop-")
"""How the baselines begin that only a search of several placements has."""


def _kind(document: Any) -> str:
    has_layers = isinstance(document, LayeredProblemDocument) or (
        isinstance(document, dict) and "layers" in document
    )
    return "by layers" if has_layers else "by stages"


# No key has a space: the tags stand in the places of errors, and must not be taken for parts of a document.
QuestionDocument = Annotated[
    Annotated[ProblemDocument, Tag("by stages")] | Annotated[LayeredProblemDocument, Tag("by layers")],
    Discriminator(_kind),
]
"""A problem document: with ``layers`` it is one of layers, with ``partition`` beside them they are cut."""


def read_question(document: QuestionDocument, max_cells: int) -> Question:
    """What a request body asks, not larger than is accepted; raises :class:`InvalidInput`."""
    try:
        question: Question
        if isinstance(document, ProblemDocument):
            question = to_problem(document)
        elif document.partition is None:
            question = to_layered(document)
        else:
            question = to_cut_problem(document)
    except InvalidInput as error:
        raise error.below("/problem") from None
    require_size(question, max_cells)
    return question


def read_problem(document: QuestionDocument, max_cells: int) -> Problem:
    """As :func:`read_question`, of stages that are known; raises :class:`InvalidInput`."""
    question = read_question(document, max_cells)
    if isinstance(question, LayeredProblem):
        raise InvalidInput.at(
            "/problem/partition",
            "this key is absent: the layers are not cut into stages yet. POST /v1/searches cuts them, and "
            "the plan has the partition.",
        )
    return question


def answers(question: Question, problem: Problem) -> bool:
    """Whether plans of a problem are plans of the question: it is the same, or a cut of its layers."""
    if isinstance(question, Problem):
        return problem == question
    try:
        return question.as_cut_in(problem) == problem
    except InvalidInput:
        return False


def require_size(question: Question, max_cells: int) -> None:
    """Raise :class:`InvalidInput` for a problem that is larger than the service accepts."""
    p, m = question.pp_degree, question.microbatches
    if p * m > max_cells:
        raise InvalidInput.at(
            "/problem/microbatches",
            f"found {p} ranks times {m} microbatches; this service takes at most {max_cells}. Plan fewer "
            f"microbatches: the steady state repeats.",
        )
    # The cost of a plan. Of layers the planner may choose the placement, and every one must be possible.
    stages, most = largest_stages(question), 2 * min(max_cells, MAX_CELLS)
    if stages * m > most:
        raise InvalidInput.at(
            "/problem/microbatches",
            f"found {m} microbatches times {stages} stages, those of the finest placement; this service "
            f"takes at most {most}. Plan fewer microbatches: the steady state repeats.",
        )


def require_stages(problem: Problem) -> None:
    """Raise :class:`InvalidInput` for a problem with too many stages to be computed beside a request."""
    if problem.n_stages > MAX_STAGES:
        raise InvalidInput.at(
            "/problem/chunks",
            f"found {problem.n_stages} stages; schedules and estimates are made of at most {MAX_STAGES}. "
            f"Have it searched instead.",
        )


def largest_stages(question: Question) -> int:
    """Number of stages; of layers, that of the finest placement that is planned."""
    if isinstance(question, Problem):
        return question.n_stages
    return max(placement.n_stages for placement in question.placements)


def uncut(problem: Problem, placement: PlacementChoice | None = None) -> LayeredProblem:
    """The question whose answer a cut is; transfers that follow from no link are their mean at every place.

    Parameters
    ----------
    placement
        What to ask for in place of the cut's own.

    Raises
    ------
    ValueError
        Of a problem without layers.
    """
    if problem.model is None:
        raise ValueError("found a problem without layers; there is no cut to forget.")
    cut, p2p = problem.model, problem.costs.p2p
    asked = placement or problem.placement.kind
    return LayeredProblem(
        model=cut.model,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        static=cut.static,
        limit=problem.memory.limit,
        placement=asked,
        chunks=problem.placement.chunks if asked == "loop" else None,
        objective=problem.objective,
        p2p=fmean(p2p) if p2p and cut.link is None else 0.0,
        link=cut.link,
        rules=cut.rules,
        units=problem.units,
    )


def asked_of(plan: Plan) -> LayeredProblem:
    """The question of layers that a plan answers, as far as a plan tells.

    Its problem says on which placement its cut is, and not which others were asked for: where the best of
    another stands beside it, the planner had the choice.

    Raises
    ------
    ValueError
        Of a plan without layers.
    """
    had_choice = any(each.name.startswith(OTHER_PLACEMENTS) for each in plan.baselines)
    return uncut(plan.problem, placement="auto" if had_choice else None)


def question_json(question: Question) -> dict[str, Any]:
    """The normalised document: equal ones ask the same."""
    return problem_json(question) if isinstance(question, Problem) else layered_json(question)


def summary_of(question: Question) -> dict[str, Any]:
    """The few numbers of a problem that a list shows."""
    if isinstance(question, Problem):
        placement: str = question.placement.kind
        model = None if question.model is None else question.model.model
    else:
        placement, model = question.placement, question.model
    return {
        "pp_degree": question.pp_degree,
        "microbatches": question.microbatches,
        "placement": placement,
        "objective": question.objective,
        "time_unit": question.units.time,
        "layers": None if model is None else model.n_layers,
    }
