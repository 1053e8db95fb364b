"""Searches and plans as the database takes them, with made-up content."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from zbv_service.records import NewPlan, NewSearch, PlanSummary


def a_search(name: str, key: str | None = None, **changes: Any) -> NewSearch:
    """A search of two ranks and four microbatches.

    ``changes`` are of its summary, or ``created_at`` or ``created_by``. It is created now by default, and
    with None when the database says.
    """
    created_at = changes.pop("created_at", datetime.now(UTC))
    created_by = changes.pop("created_by", None)
    summary = {"pp_degree": 2, "microbatches": 4, "placement": "v", "objective": "span", **changes}
    return NewSearch(name, key or name, b"problem", summary, {}, created_at, created_by)


def a_plan(name: str, value: float = 3.0, problem: str = "problem", **changes: Any) -> NewPlan:
    """A plan with an objective and a problem's key; ``changes`` are of its summary."""
    summary = PlanSummary(
        **{
            "plan_id": name,
            "pp_degree": 2,
            "microbatches": 4,
            "placement": "v",
            "objective": "span",
            "value": value,
            "lower_bound": 2.0,
            "gap": value / 2 - 1,
            "status": "feasible",
            "bubble_rate": 0.1,
            "method": "fake",
            "time_unit": "us",
            "created_at": datetime.now(UTC),
            **changes,
        }
    )
    return NewPlan(summary, b"document", problem)
