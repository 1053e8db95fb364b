"""Records as rows of the pages' lists."""

from __future__ import annotations

from collections import Counter

from zbv_service.pages.views.rows import AgentEntry, PlanEntry, RunEntry, SearchEntry
from zbv_service.records.runs import AgentRecord, RunRecord
from zbv_service.records.searches import PlanSummary, SearchRecord


def search_row(record: SearchRecord) -> SearchEntry:
    """A search as lists show it."""
    return SearchEntry(
        id=record.id,
        state=record.state,
        pp_degree=record.summary["pp_degree"],
        microbatches=record.summary["microbatches"],
        objective=record.summary["objective"],
        created_at=record.created_at,
        value=record.objective,
        gap=record.gap,
        plan_id=record.plan_id,
        error=None if record.error is None else record.error["detail"],
        time_unit=record.summary.get("time_unit"),
    )


def plan_row(summary: PlanSummary) -> PlanEntry:
    """A plan as lists show it."""
    return PlanEntry(
        plan_id=summary.plan_id,
        pp_degree=summary.pp_degree,
        microbatches=summary.microbatches,
        objective=summary.objective,
        value=summary.value,
        bubble_rate=summary.bubble_rate,
        gap=summary.gap,
        status=summary.status,
        created_at=summary.created_at,
        method=summary.method,
        time_unit=summary.time_unit,
    )


def run_row(record: RunRecord) -> RunEntry:
    """A run as lists show it."""
    places = [place for node in record.members for place in node.ranks]
    steps = [place.get("step") for place in places]
    reached = [step for step in steps if step is not None]
    return RunEntry(
        id=record.id,
        state=record.state,
        model=record.model["factory"],
        nodes=record.nodes,
        ranks=record.nodes * record.ranks_per_node,
        steps=record.steps,
        step=min(reached) if reached and len(reached) == len(steps) else None,
        generation=record.generation,
        created_at=record.created_at,
        plan_id=record.plan_id,
        search_id=record.search_id,
        error=None if record.error is None else record.error["detail"],
        has_offer=record.offer is not None,
    )


def agent_row(record: AgentRecord) -> AgentEntry:
    """An agent as lists show it."""
    counted = Counter(record.devices).items()
    return AgentEntry(
        id=record.id,
        name=record.name,
        state=record.state,
        address=f"{record.address}:{record.port}",
        slots=record.slots,
        devices=", ".join(name if count == 1 else f"{count} × {name}" for name, count in counted),
        allowed_models=tuple(record.allowed_models),
        created_at=record.created_at,
        seen_at=record.seen_at,
        run_id=record.run_id,
    )
