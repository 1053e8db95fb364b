"""The benchmark of packings: its rows and its target."""

from __future__ import annotations

import pytest
from zbv_solver.search.options import SearchOptions

from benchmarks.planner.lengths import LAWS, PackingInstance
from benchmarks.planner.packing import HEADER, packing_table


def test_a_row_compares_the_step_with_all_other_methods() -> None:
    lines: list[str] = []
    batch = PackingInstance(LAWS["tail"], 2, 2, 8, 1.0, max_tokens=4096)
    (finding,) = packing_table([batch], SearchOptions("quick"), lines.append)
    header, row = lines
    assert header == HEADER
    values = row.split()
    assert len(values) == len(HEADER.split())
    assert values[0] == batch.name
    assert all(float(gain.rstrip("*")) >= 0 for gain in values[5:9])
    assert finding.target is not None
    assert finding.value == pytest.approx(float(values[9].rstrip("*")), abs=0.06)
