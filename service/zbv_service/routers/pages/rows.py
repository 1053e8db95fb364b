"""Records as rows of the pages' lists."""

from __future__ import annotations

from zbv_service.pages.rows import PlanRow, SearchRow
from zbv_service.records import PlanSummary, SearchRecord


def search_row(record: SearchRecord) -> SearchRow:
    """A search as lists show it."""
    return SearchRow(
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


def plan_row(summary: PlanSummary) -> PlanRow:
    """A plan as lists show it."""
    return PlanRow(
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
