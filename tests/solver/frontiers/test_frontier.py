"""The frontier of a problem, searched: it falls with memory, and its bounds hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.problems import uniform, uniform_document
from zbv_solver.commands.cli import main
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.frontier import baseline_points, frontier_points
from zbv_solver.frontiers.limits import grid
from zbv_solver.search.claims import load_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


def test_more_memory_never_costs_time_and_bounds_hold() -> None:
    problem = uniform(3, 6, p2p=0.25)
    points = frontier_points(problem, lambda limited: search(limited, SearchOptions("quick")))
    assert [point.fraction for point in points] == list(grid(problem))
    values, bounds = [point.plan.objective for point in points], [point.lower_bound for point in points]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert all(bound <= value * (1 + 1e-9) for bound, value in zip(bounds, values, strict=True))
    for point in points:
        assert point.fraction is not None
        assert point.needs <= point.fraction * (1 + 1e-9)
        assert point.limit == pytest.approx(max(memory_fraction.limits(problem, point.fraction)))
    found = {each.name: each for each in baseline_points(points[0].plan)}
    assert found["1f1b"].needs == pytest.approx(1.0)


def test_the_command_prints_it_as_a_table_and_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(uniform_document(2, 4, limit=1)))  # a limit that nothing fits
    assert main(["frontier", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["objective"] == "span"
    assert [point["fraction"] for point in document["points"]] == list(grid(uniform(2, 4)))
    folder = tmp_path / "plans"
    assert main(["frontier", str(path), "-o", str(folder)]) == 0
    kept = json.loads((folder / "frontier.json").read_text())
    assert kept == document
    for point in kept["points"]:
        plan = load_plan(folder / f"{point['plan_id'][:12]}.json")
        assert (plan.plan_id, plan.objective) == (point["plan_id"], point["objective"])
    assert "1f1b" in capsys.readouterr().out
    bare = {name: value for name, value in uniform_document(2, 4).items() if name != "memory"}
    path.write_text(json.dumps(bare))
    assert main(["frontier", str(path)]) == 2
    assert "/memory" in capsys.readouterr().err
