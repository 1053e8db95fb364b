"""The example of the README, and tables and picture of the documentation, are what is printed today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_solver.commands.cli import EFFORTS, main

EXAMPLE = str(ROOT / "examples/readme.json")


def test_the_tutorial_has_the_tables_of_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    for command in ("compare", "frontier"):
        assert main([command, EXAMPLE]) == 0
        printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
        block = re.search(rf"zbv {command} examples/readme\.json.*?```text\n(.*?)```", text, re.DOTALL)
        assert block is not None
        assert [line for line in block[1].splitlines() if line.strip() not in map(str.strip, printed)] == []


def test_the_guide_and_the_help_state_the_same_times(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/plan-a-file.md").read_text(encoding="utf-8")
    times = dict(re.findall(r"^  (quick|standard|thorough) .*   (.+)$", EFFORTS, re.MULTILINE))
    shown = dict(re.findall(r"^\| `(quick|standard|thorough)` \|.*\| (.+) \|$", text, re.MULTILINE))
    assert times == shown == dict.fromkeys(("quick", "standard", "thorough")) | times
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "about four times as long" in help_text
    assert "about four times as long" in text


def test_the_readmes_example_prints_what_it_says_and_the_picture_is_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make picture` draws it again."""
    code = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    stated = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(stated) == 2
    assert capsys.readouterr().out.splitlines() == stated
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main(["export", str(plan), "--format", "svg", "-o", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8") == (ROOT / "docs/plan.svg").read_text(encoding="utf-8")
