"""Documents and plans in the form in which they are stored and sent to processes: compressed JSON."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import ContradictedBound
from zbv_solver.plans.plan import Plan, gap_of, plan_json, verdict

from zbv_service.documents.problems import Question, question_json, summary_of
from zbv_service.records.plans import NewPlan, PlanSummaryDocument
from zbv_service.records.searches import Update


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
    """As :func:`zbv_service.documents.problems.summary_of`."""

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


def incumbent_of(plan: NewPlan) -> Update:
    """The update that gives a search this plan as its first incumbent."""
    summary, document = plan.summary, unpack(plan.document)
    return Update(
        objective=summary.value,
        lower_bound=plan.search_bound,
        gap=finite_or_none(gap_of(summary.value, plan.search_bound)),
        method=summary.method,
        incumbent=pack_incumbent(document["ranks"], document["problem"] if "partition" in document else None),
        refusal=plan.refusal,
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
