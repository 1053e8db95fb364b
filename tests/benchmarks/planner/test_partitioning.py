"""The benchmark of cuts: its rows."""

from __future__ import annotations

from zbv_solver.search.options import SearchOptions

from benchmarks.planner.partitioning import cut_table


def test_a_row_compares_the_chosen_cut_with_the_others_and_with_the_bound_of_all() -> None:
    written: list[str] = []
    cut_table(SearchOptions("quick"), written.append, models=[(2, 8, 4096, 1)])
    header, row = "".join(written).splitlines()[1:3]
    values = row.split()
    assert header.split()[:3] == ["p", "blocks", "parts"]
    assert values[:3] == ["2", "8", "1"]
    even, histogram, own = map(float, values[5:8])
    assert own <= min(even, histogram) * 1.001
    assert float(values[10]) <= own
