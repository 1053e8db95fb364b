"""The benchmark of pairs: its problems, its rows and its targets."""

from __future__ import annotations

from zbv_solver.search.options import SearchOptions

from benchmarks.planner.pairs import instances, pairs_table


def test_a_row_compares_the_plan_with_dualpipe_the_best_order_without_pairs_and_the_bound() -> None:
    lines: list[str] = []
    chosen = instances()
    assert len({each.name for each in chosen}) == 30
    assert all(
        each.problem.memory.limit == (2.0 * each.problem.pp_degree + 1,) * each.problem.pp_degree
        for each in chosen
    )
    gain, worse, gap = pairs_table(chosen[:1], SearchOptions(effort="quick"), lines.append)
    name, _, printed_gap, dualpipe, *_ = lines[1].split()
    assert name == "4x8-0.15-equal"
    assert abs(gain.value - float(dualpipe.rstrip("%"))) < 0.01
    assert abs(gap.value - float(printed_gap.rstrip("%"))) < 0.01
    assert worse.value == 0
