"""Problems in requests: stages, layers that are already cut into stages, or layers still to be cut."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Discriminator, Tag
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.documents import LayeredProblemDocument, ProblemDocument
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import MAX_CELLS
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import to_cut_problem, to_layered, to_problem
from zbv_solver.problem.writing import layered_json, problem_json

Question = Problem | LayeredProblem

MAX_STAGES = 16_384
"""Largest number of stages for bounds and schedules. Their time is quadratic: more stages take minutes."""

OTHER_PLACEMENT = re.compile(r"v|single|loop-\d+")
"""Names of the baselines that only a search of several placements has."""


def _kind(document: Any) -> str:
    has_layers = isinstance(document, LayeredProblemDocument) or (
        isinstance(document, dict) and "layers" in document
    )
    return "by layers" if has_layers else "by stages"


# The tags have a space because they appear in the places of errors, where they must not look like keys.
QuestionDocument = Annotated[
    Annotated[ProblemDocument, Tag("by stages")] | Annotated[LayeredProblemDocument, Tag("by layers")],
    Discriminator(_kind),
]
"""A problem document by stages or, with the key ``layers``, by layers; ``partition`` cuts them."""


def read_question(document: QuestionDocument, max_cells: int) -> Question:
    """The question in a request body; raises :class:`InvalidInput`, also when it is too large."""
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
    """As :func:`read_question`, but refuses layers that are not cut yet."""
    question = read_question(document, max_cells)
    if isinstance(question, LayeredProblem):
        raise InvalidInput.at(
            "/problem/partition",
            "this key is absent: the layers are not cut into stages yet. POST /v1/searches cuts them, and "
            "the plan has the partition.",
        )
    return question


def answers(question: Question, problem: Problem) -> bool:
    """Whether every plan of the problem answers the question: they are equal, or it cuts the layers."""
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
    # The size of a plan. For layers, the planner may choose any of the placements.
    stages, most = largest_stages(question), 2 * min(max_cells, MAX_CELLS)
    if stages * m > most:
        raise InvalidInput.at(
            "/problem/microbatches",
            f"found {m} microbatches times {stages} stages, those of the finest placement; this service "
            f"takes at most {most}. Plan fewer microbatches: the steady state repeats.",
        )


def require_stages(problem: Problem) -> None:
    """Raise :class:`InvalidInput` for a problem with too many stages for a computation during a request."""
    if problem.n_stages > MAX_STAGES:
        raise InvalidInput.at(
            "/problem/chunks",
            f"found {problem.n_stages} stages; schedules and estimates are limited to {MAX_STAGES}. Submit a "
            f"search instead.",
        )


def largest_stages(question: Question) -> int:
    """Number of stages; for layers, the number of the finest placement."""
    if isinstance(question, Problem):
        return question.n_stages
    return max(placement.n_stages for placement in question.placements)


def asked_of(plan: Plan) -> LayeredProblem:
    """The layers that were searched for a plan, as far as the plan shows.

    The plan's problem has the placement of the cut, and not the placements that the search considered. If its
    baselines include another placement, the search considered all.

    Raises
    ------
    ValueError
        When the plan has no layers.
    """
    had_choice = any(OTHER_PLACEMENT.fullmatch(each.name) for each in plan.baselines)
    return uncut(plan.problem, placement="auto" if had_choice else None)


def question_json(question: Question) -> dict[str, Any]:
    """The normalised document; equal questions have equal documents."""
    return problem_json(question) if isinstance(question, Problem) else layered_json(question)


def summary_of(question: Question) -> dict[str, Any]:
    """The numbers of a problem that lists show."""
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
