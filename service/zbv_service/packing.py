"""Documents and plans as they are stored and sent between processes: canonical JSON, compressed."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from datetime import UTC, datetime
from typing import Any

from zbv_solver.plan import Plan, plan_json
from zbv_solver.schema import canonical_json

from zbv_service.records import NewPlan, PlanSummary, Update


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
    return NewPlan(summary, pack(document), problem_key(document["problem"]))


def incumbent_of(plan: NewPlan) -> Update:
    """A packed plan as something to go on from."""
    summary = plan.summary
    return Update(
        objective=summary.value,
        lower_bound=summary.lower_bound,
        gap=summary.gap,
        method=summary.method,
        incumbent=pack(unpack(plan.document)["ranks"]),
    )


def finite(value: float) -> float | None:
    """The number, or None where JSON and databases have none: an infinite gap."""
    return value if math.isfinite(value) else None
