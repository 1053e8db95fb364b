"""The public face of the library: ``import zbv_solver as zbv``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zbv_solver as zbv
from support.layered import LAYERED
from support.problems import uniform_document

DOCUMENT = uniform_document(2, 4, limit=4)


def test_stages_and_layers_are_planned_saved_loaded_and_checked(tmp_path: Path) -> None:
    for document in (DOCUMENT, LAYERED):
        problem = zbv.parse(document)
        plan = zbv.plan(problem, "quick")
        plan.save(tmp_path / "plan.json")
        loaded = zbv.load_plan(tmp_path / "plan.json")
        assert loaded.plan_id == plan.plan_id
        assert loaded.metrics == plan.metrics
        assert loaded.rank(1) == plan.orders.text(1)
        checked = zbv.check(json.loads((tmp_path / "plan.json").read_text()), problem)
        assert checked.problem == plan.problem


def test_a_loaded_plan_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    zbv.plan(zbv.parse(DOCUMENT), "quick").save(path)
    document = json.loads(path.read_text())
    document["metrics"]["span"] -= 1
    path.write_text(json.dumps(document))
    with pytest.raises(zbv.InvalidPlan, match=r"plan\.json: the stated span"):
        zbv.load_plan(path)


def test_progress_is_reported_and_a_search_starts_from_a_plan() -> None:
    problem, seen = zbv.parse(uniform_document(4, 8, limit=8)), list[zbv.Progress]()
    plan = zbv.plan(problem, "quick", on_progress=seen.append)
    assert isinstance(seen[0], zbv.Progress)
    assert min(found.objective for found in seen) == pytest.approx(plan.objective)
    better = zbv.plan(problem, "standard", start_from=plan, cancelled=lambda: True)
    assert better.objective <= plan.objective
    with pytest.raises(zbv.InvalidPlan, match="another problem"):
        zbv.plan(zbv.parse(DOCUMENT), "quick", start_from=plan)


def test_a_comparison_has_the_classical_schedules_and_a_frontier_falls_with_memory() -> None:
    problem = zbv.parse(DOCUMENT)
    assert isinstance(problem, zbv.Problem)
    assert [baseline.name for baseline in zbv.compare(problem)][:2] == ["gpipe", "1f1b"]
    values = [point.plan.objective for point in zbv.frontier(problem)]
    assert values == sorted(values, reverse=True)


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(zbv.InvalidInput, match="/workers: found 0"):
        zbv.plan(zbv.parse(DOCUMENT), workers=0)


def test_a_plan_shows_its_picture_and_its_metrics_in_a_notebook() -> None:
    plan = zbv.plan(zbv.parse(DOCUMENT), "quick")
    html = plan._repr_html_()
    assert html is not None
    assert "<svg" in html
    assert "<th>span</th><td>24 (proved optimal)</td>" in html
    assert "<script" not in html


def test_every_public_name_exists_and_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, zbv_solver as zbv\n"
        "print([name for name in ('numpy', 'pydantic', 'numba') if name in sys.modules])\n"
        "print([name for name in zbv.__all__ if not hasattr(zbv, name)], callable(zbv.plan))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert made.stdout.splitlines() == ["[]", "[] True"]
