"""The public face of the library: ``import zbv_solver as zbv``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zbv_solver as zbv
from support.layered import LAYERED
from support.problems import uniform_document

DOCUMENT = uniform_document(2, 4, limit=4)


@pytest.mark.parametrize("document", [DOCUMENT, LAYERED], ids=["stages", "layers"])
def test_a_plan_is_saved_loaded_and_checked(document: dict[str, object], tmp_path: Path) -> None:
    problem, path = zbv.parse(document), tmp_path / "plan.json"
    plan = zbv.plan(problem, "quick")
    plan.save(path)
    html = plan._repr_html_() or ""
    assert ("<svg" in html, "<script" in html) == (True, False)
    assert f"<th>span</th><td>{plan.metrics.span:g} " in html
    loaded, saved = zbv.load_plan(path), json.loads(path.read_text())
    assert (loaded.plan_id, loaded.metrics) == (plan.plan_id, plan.metrics)
    assert loaded.rank(1) == plan.orders.text(1)
    assert zbv.check(saved, problem).problem == plan.problem
    saved["metrics"]["span"] -= 1
    path.write_text(json.dumps(saved))
    with pytest.raises(zbv.InvalidPlan, match=r"plan\.json: the stated span"):
        zbv.load_plan(path)


def test_progress_is_reported_and_a_search_starts_from_a_plan() -> None:
    problem, seen = zbv.parse(uniform_document(4, 8, limit=8)), list[zbv.Progress]()
    plan = zbv.plan(problem, "quick", on_progress=seen.append)
    assert min(progress.objective for progress in seen) == pytest.approx(plan.objective)
    better = zbv.plan(problem, "standard", start_from=plan, cancelled=lambda: True)
    assert better.objective <= plan.objective


def test_every_public_name_exists_and_frontiers_fall_with_memory() -> None:
    values = [point.plan.objective for point in zbv.frontier(zbv.parse(DOCUMENT))]
    assert values == sorted(values, reverse=True)
    assert [name for name in zbv.__all__ if not hasattr(zbv, name)] == []
    assert callable(zbv.plan)
