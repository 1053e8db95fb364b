"""The public face of the library: ``import zbv_solver as zbv``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zbv_solver as zbv
from support.layered import LAYERED
from support.paths import ROOT
from support.problems import uniform_document

DOCUMENT = uniform_document(2, 4, limit=4)


def test_the_python_example_of_the_readme_prints_what_its_comments_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    stated = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(stated) == 2
    assert capsys.readouterr().out.splitlines() == stated
    assert (tmp_path / "plan.json").is_file()


@pytest.mark.parametrize("document", [DOCUMENT, LAYERED], ids=["stages", "layers"])
def test_a_plan_is_saved_loaded_and_checked(document: dict[str, object], tmp_path: Path) -> None:
    problem, path = zbv.parse(document), tmp_path / "plan.json"
    plan = zbv.plan(problem, "quick")
    plan.save(path)
    loaded, saved = zbv.load_plan(path), json.loads(path.read_text())
    assert loaded.plan_id == plan.plan_id
    assert loaded.metrics == plan.metrics
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
    with pytest.raises(zbv.InvalidPlan, match="another problem"):
        zbv.plan(zbv.parse(DOCUMENT), "quick", start_from=plan)
    with pytest.raises(zbv.InvalidInput, match="/workers: found 0"):
        zbv.plan(problem, workers=0)


def test_a_comparison_has_the_classical_schedules_and_a_frontier_falls_with_memory() -> None:
    problem = zbv.parse(DOCUMENT)
    assert isinstance(problem, zbv.Problem)
    assert [baseline.name for baseline in zbv.compare(problem)][:2] == ["gpipe", "1f1b"]
    values = [point.plan.objective for point in zbv.frontier(problem)]
    assert values == sorted(values, reverse=True)


def test_a_plan_shows_its_picture_and_its_metrics_in_a_notebook() -> None:
    html = zbv.plan(zbv.parse(DOCUMENT), "quick")._repr_html_() or ""
    assert "<svg" in html
    assert "<th>span</th><td>24 (proved optimal)</td>" in html
    assert "<script" not in html


def test_every_public_name_exists_and_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, zbv_solver as zbv\n"
        "print([name for name in ('numpy', 'pydantic', 'numba') if name in sys.modules])\n"
        "print([name for name in zbv.__all__ if not hasattr(zbv, name)], callable(zbv.plan))"
    )
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert made.stdout.splitlines() == ["[]", "[] True"]
