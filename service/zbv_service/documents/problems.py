"""Problems, searches for their plans, and plans: in requests, and as they are stored and sent to processes.

A problem has stages, layers that are already cut into stages, or layers still to be cut.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Discriminator, Tag
from zbv_solver import __version__
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import ContradictedBound, InvalidInput
from zbv_solver.plans.plan import Plan, plan_json, verdict
from zbv_solver.problem.documents import LayeredProblemDocument, ProblemDocument
from zbv_solver.problem.jitter import check_quantile, parse_jitter
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.problem.numeric import MAX_CELLS
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import to_cut_problem, to_layered, to_problem
from zbv_solver.problem.writing import layered_json, problem_json
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.documents.parsing import parse_body
from zbv_service.records.plans import NewPlan, PlanSummaryDocument
from zbv_service.records.searches import NewSearch, OptionsDocument, Outcome, Update
from zbv_service.records.shared import Name, RequestDocument
from zbv_service.settings import Settings

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


class SearchRequest(RequestDocument):
    """A problem to search a plan for."""

    name: Name = None
    problem: QuestionDocument
    options: OptionsDocument = OptionsDocument()


def new_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a decoded request body; raises :class:`InvalidInput`."""
    question, request = parse_request(body, settings)
    document, chosen = question_json(question), request.options.stored()
    key, jitter = request_key(document, chosen), chosen.pop("jitter", None)
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=key,
        problem=pack(document),
        summary=summary_of(question),
        options=chosen,
        jitter=None if jitter is None else pack(jitter),
        name=request.name,
    )


def parse_request(body: Any, settings: Settings) -> tuple[Question, SearchRequest]:
    """The problem in a request body, and the request; raises :class:`InvalidInput`."""
    request = parse_body(SearchRequest, body)
    question = read_question(request.problem, settings.max_cells)
    options = request.options
    require_allowed(options.effort, options.time_limit, settings)
    try:
        if options.jitter is None:
            check_quantile(options.quantile, None)
        else:
            parse_jitter(options.jitter).require_ranks(question.pp_degree)
    except InvalidInput as error:
        raise error.below("/options" if options.jitter is None else "/options/jitter") from None
    return question, request


def require_allowed(effort: Effort | None, time_limit: float | None, settings: Settings) -> None:
    """Raise :class:`InvalidInput` for options beyond the limits of the service."""
    if time_limit is not None and time_limit > settings.max_time_limit:
        raise InvalidInput.at(
            "/options/time_limit",
            f"found {time_limit:.15g}; this service takes at most {settings.max_time_limit:.15g} seconds.",
        )
    highest = settings.max_effort
    if effort is not None and EFFORTS.index(effort) > EFFORTS.index(highest):
        raise InvalidInput.at("/options/effort", f"found {effort}; this service takes at most {highest}.")


def request_key(problem: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of the normalised problem, the options and the planner's version, which determine the result."""
    asked = {"problem": problem, "options": options, "version": __version__}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


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


def pack(document: Any) -> bytes:
    """The canonical JSON of a document, compressed."""
    return zlib.compress(canonical_json(document).encode())


def unpack_text(packed: bytes) -> bytes:
    """The canonical JSON text (UTF-8) of a packed document."""
    return zlib.decompress(packed)


def unpack(packed: bytes) -> Any:
    """A packed document."""
    return json.loads(unpack_text(packed))


def problem_key(problem: dict[str, Any]) -> str:
    """The hash of a normalised problem document."""
    return hashlib.sha256(canonical_json(problem).encode()).hexdigest()


@dataclass(frozen=True)
class PackedQuestion:
    """A question in the form in which it is sent to processes: a few objects, whatever its size."""

    packed: bytes
    """The normalised document."""
    key: str
    """The document's :func:`problem_key`."""
    summary: dict[str, Any]
    """As :func:`summary_of`."""

    @classmethod
    def of(cls, question: Question) -> PackedQuestion:
        """Normalise, pack and hash a question."""
        text = canonical_json(question_json(question)).encode()
        return cls(zlib.compress(text), hashlib.sha256(text).hexdigest(), summary_of(question))


def pack_plan(plan: Plan) -> NewPlan:
    """A verified plan in the form in which it is stored."""
    problem, metrics = plan.problem, plan.metrics
    summary = PlanSummaryDocument(
        plan_id=plan.plan_id,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        placement=problem.placement.kind,
        objective=problem.objective,
        value=plan.objective,
        lower_bound=metrics.lower_bound,
        gap=finite_or_none(metrics.gap),
        status=metrics.status,
        bubble_rate=metrics.bubble_rate,
        method=plan.provenance.method[:200],
        time_unit=problem.units.time,
        created_at=datetime.now(UTC),
    )
    document = plan_json(plan)
    bound = None if plan.cut is None else plan.cut.lower_bound
    for source, stated in (("the plan", metrics.lower_bound), ("the plan's cut", bound)):
        if stated is not None:
            supported_bound(plan.objective, stated, source, lambda: document["problem"])
    search_bound = summary.lower_bound if bound is None else bound
    return NewPlan(summary, pack(document), problem_key(document["problem"]), search_bound)


def incumbent_of(found: Outcome) -> Update:
    """The update that gives a search for a plan its outcome as its first incumbent."""
    (plan,) = found.plans
    document = unpack(plan.document)
    return Update(
        objective=found.objective,
        lower_bound=found.lower_bound,
        method=plan.summary.method,
        incumbent=pack_incumbent(document["ranks"], document["problem"] if "partition" in document else None),
        refusal=found.refusal,
    )


def pack_incumbent(ranks: list[list[str]], cut: dict[str, Any] | None) -> bytes:
    """The ranks of an incumbent, together with its problem's document if layers were cut for it."""
    return pack(ranks if cut is None else {"problem": cut, "ranks": ranks})


def supported_bound(
    objective: float, bound: float, source: str, problem: Callable[[], Mapping[str, Any]] = dict
) -> float:
    """The lower bound, or the objective if it is smaller because of rounding.

    Parameters
    ----------
    source
        The origin of the bound, for the error.
    problem
        Returns the problem's document, for the error.

    Raises
    ------
    ContradictedBound
        When the objective undercuts the bound by more than rounding, so that one of them is wrong.
    """
    if verdict(objective, bound) == "contradicted":
        raise ContradictedBound(problem(), objective, bound, source)
    return min(bound, objective)


def finite_or_none(value: float) -> float | None:
    """The number; None for an infinite one, such as a gap, which JSON and databases cannot hold."""
    return value if math.isfinite(value) else None
