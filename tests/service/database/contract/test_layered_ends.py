"""The end of a search of layers: its bound holds for all cuts, the bound of its plan for one cut."""

from __future__ import annotations

from dataclasses import replace

from support.stored import a_plan, a_search
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.records.searches import SearchDocument


async def test_the_bound_over_all_cuts_belongs_to_the_search_and_not_to_the_plan(
    any_database_url: str,
) -> None:
    database = Database(any_database_url)
    table = SearchTable(database)
    await table.add(a_search("a", placement="auto", layers=8))
    claim = await table.claim("me", 60)
    assert claim is not None
    found = replace(a_plan("p", 5.0, placement="loop", lower_bound=4.5), cut_bound=4.0)
    assert await table.finished("a", claim.fence, found)
    record = await table.get("a")
    assert isinstance(record, SearchDocument)
    assert (record.objective, record.lower_bound, record.gap) == (5.0, 4.0, 0.25)
    assert record.summary.layers == 8
    (stored,) = await PlanTable(database).newest(1)
    assert (stored.placement, stored.lower_bound) == ("loop", 4.5)
    await database.close()
