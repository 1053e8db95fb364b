"""The Python example of the README runs, and its comments state what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_prints_what_its_comments_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = README.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    stated = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(stated) == 2
    assert capsys.readouterr().out.splitlines() == stated
    assert (tmp_path / "plan.json").is_file()
