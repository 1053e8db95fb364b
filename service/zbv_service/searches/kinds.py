"""The kinds of searches: how a request of each is read, and what a search process runs for it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbv_solver import __version__
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.jitter import check_quantile, parse_jitter
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.documents.layouts import LayoutRequest, layouts_summary, read_layouts
from zbv_service.documents.packing import pack, unpack
from zbv_service.documents.parsing import parse_body
from zbv_service.documents.problems import (
    Question,
    QuestionDocument,
    question_json,
    read_question,
    summary_of,
)
from zbv_service.records.searches import NewSearch, SearchKind
from zbv_service.records.shared import OptionsDocument, RequestDocument
from zbv_service.searches.executors.layouts import rank_layouts
from zbv_service.searches.executors.task import Compute, search_plan
from zbv_service.settings import Settings


class SearchRequest(RequestDocument):
    """A problem to search a plan for."""

    problem: QuestionDocument
    options: OptionsDocument = OptionsDocument()


def parse_packed(packed: bytes) -> Question:
    """The problem of a packed document."""
    return parse_any_problem(unpack(packed))


def new_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a decoded request body; raises :class:`InvalidInput`."""
    question, options = parse_request(body, settings)
    document, chosen = question_json(question), options.stored()
    key, jitter = request_key(document, chosen), chosen.pop("jitter", None)
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=key,
        problem=pack(document),
        summary=summary_of(question),
        options=chosen,
        jitter=None if jitter is None else pack(jitter),
    )


def parse_request(body: Any, settings: Settings) -> tuple[Question, OptionsDocument]:
    """The problem and options of a request body; raises :class:`InvalidInput`."""
    request = parse_body(SearchRequest, body)
    question = read_question(request.problem, settings.max_cells)
    require_allowed(request.options.effort, request.options.time_limit, settings)
    try:
        _require_jitter(request.options, question.pp_degree)
    except InvalidInput as error:
        raise error.below("/options") from None
    return question, request.options


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


def _require_jitter(options: OptionsDocument, pp_degree: int) -> None:
    """Raise :class:`InvalidInput` when the jitter or the quantile is wrong."""
    if options.jitter is None:
        check_quantile(options.quantile, None)
        return
    try:
        parse_jitter(options.jitter).require_ranks(pp_degree)
    except InvalidInput as error:
        raise error.below("/jitter") from None


def request_key(problem: dict[str, Any], options: dict[str, Any]) -> str:
    """Hash of the normalised problem, the options and the planner's version, which determine the result."""
    asked = {"problem": problem, "options": options, "version": __version__}
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def new_layout_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a decoded request body; takes seconds for a large cluster, whose layouts it counts.

    Raises
    ------
    InvalidInput
        The body breaks a rule, or no layout divides the cluster.
    """
    asked = parse_body(LayoutRequest, body)
    require_allowed(asked.options.effort, asked.options.time_limit, settings)
    summary = layouts_summary(asked, read_layouts(asked))
    normal, options = asked.model_dump(mode="json"), asked.options.model_dump()
    key = canonical_json({"layouts": normal, "version": __version__})
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=hashlib.sha256(key.encode()).hexdigest(),
        problem=pack(normal),
        summary=summary,
        options=options,
        kind="layouts",
    )


@dataclass(frozen=True)
class Kind:
    """A kind of search."""

    read: Callable[[Settings, Any], NewSearch]
    """Makes the search of a decoded request body; raises :class:`InvalidInput`. Importable elsewhere."""
    compute: Compute
    """Computes a search in another process, where it must be importable."""


KINDS: Mapping[SearchKind, Kind] = {
    "plan": Kind(new_search, search_plan),
    "layouts": Kind(new_layout_search, rank_layouts),
}
