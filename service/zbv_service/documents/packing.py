"""Documents and plans as they are stored and sent between processes: canonical JSON, compressed."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from zbv_solver.documents.text import canonical_json
from zbv_solver.errors import ContradictedBound
from zbv_solver.plans.certificate import gap_of, verdict
from zbv_solver.plans.plan import Plan, plan_json

from zbv_service.documents.problems import Question, question_json, summary_of
from zbv_service.records.searches import NewPlan, PlanSummary, Update


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
    """Hash of a normalised problem document: equal ones ask for the same plans."""
    return hashlib.sha256(canonical_json(problem).encode()).hexdigest()


@dataclass(frozen=True)
class PackedQuestion:
    """A question as it travels between processes: few objects, whatever its size.

    Attributes
    ----------
    packed
        Its normalised document.
    key
        The document's :func:`problem_key`.
    summary
        As :func:`zbv_service.documents.problems.summary_of`.
    """

    packed: bytes
    key: str
    summary: dict[str, Any]

    @classmethod
    def of(cls, question: Question) -> PackedQuestion:
        """Normalise, pack and hash a question."""
        text = canonical_json(question_json(question)).encode()
        return cls(zlib.compress(text), hashlib.sha256(text).hexdigest(), summary_of(question))


def pack_plan(plan: Plan) -> NewPlan:
    """A verified plan, ready to be stored."""
    problem, metrics = plan.problem, plan.metrics
    summary = PlanSummary(
        plan_id=plan.plan_id,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        placement=problem.placement.kind,
        objective=problem.objective,
        value=plan.objective,
        lower_bound=metrics.lower_bound,
        gap=finite(metrics.gap),
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
    return NewPlan(summary, pack(document), problem_key(document["problem"]), bound)


def incumbent_of(plan: NewPlan) -> Update:
    """A packed plan as something to go on from."""
    summary, document = plan.summary, unpack(plan.document)
    return Update(
        objective=summary.value,
        lower_bound=plan.search_bound,
        gap=finite(gap_of(summary.value, plan.search_bound)),
        method=summary.method,
        incumbent=pack_incumbent(document["ranks"], document["problem"] if "partition" in document else None),
        refusal=plan.refusal,
    )


def pack_incumbent(ranks: list[list[str]], cut: dict[str, Any] | None) -> bytes:
    """The ranks of a plan to go on from, with its problem's document where layers were cut for it."""
    return pack(ranks if cut is None else {"problem": cut, "ranks": ranks})


def contradicts(objective: float, bound: float) -> bool:
    """Whether a verified plan undercuts a lower bound by more than rounding: one of the two is wrong."""
    return verdict(objective, bound) == "contradicted"


def supported_bound(
    objective: float, bound: float, source: str, problem: Callable[[], Mapping[str, Any]]
) -> float:
    """A lower bound, at most the objective: the two may differ by rounding.

    Parameters
    ----------
    source
        Where the bound comes from.
    problem
        Returns the problem's document, for the error.

    Raises
    ------
    ContradictedBound
        When the objective undercuts the bound by more than rounding.
    """
    if contradicts(objective, bound):
        raise ContradictedBound(problem(), objective, bound, source)
    return min(bound, objective)


def finite(value: float) -> float | None:
    """The number, or None where JSON and databases have none: an infinite gap."""
    return value if math.isfinite(value) else None
