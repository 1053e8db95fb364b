"""The end of a search of layers: its bound holds for all cuts, the bound of its plan for one cut."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.records.searches import NewPlan, NewSearch, PlanSummary

pytestmark = pytest.mark.anyio


async def test_the_bound_over_all_cuts_belongs_to_the_search_and_not_to_the_plan(
    any_database_url: str,
) -> None:
    database = Database(any_database_url)
    table, now = SearchTable(database), datetime.now(UTC)
    summary = {"pp_degree": 2, "microbatches": 4, "placement": "auto", "objective": "span", "layers": 8}
    await table.add(NewSearch("a", "a", b"problem", summary, {}, now))
    claim = await table.claim("me", 60)
    assert claim is not None
    found = PlanSummary("p", 2, 4, "loop", "span", 5.0, 4.5, 1 / 9, "feasible", 0.1, "fake", "us", now)
    assert await table.finished("a", claim.fence, NewPlan(found, b"document", "problem", cut_bound=4.0))
    record = await table.get("a")
    assert record is not None
    assert (record.objective, record.lower_bound, record.gap) == (5.0, 4.0, 0.25)
    assert record.summary["layers"] == 8
    (stored,) = await PlanTable(database).newest(1)
    assert (stored.placement, stored.lower_bound) == ("loop", 4.5)
    await database.close()
