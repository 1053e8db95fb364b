"""Where a model's module is searched, and the error if it is not found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zbv_worker.commands.cli import main
from zbv_worker.errors import InvalidRun
from zbv_worker.host.environment import environment_of_ranks, searched
from zbv_worker.model.spec import ModelSpec


def test_a_command_searches_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a console script, Python itself searches only the script's directory."""
    (tmp_path / "mymodel.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    assert main(["estimate", "mymodel:layers", "--pp-degree", "2"]) == 2
    assert sys.modules.pop("mymodel").__file__ == str(tmp_path / "mymodel.py")
    assert "has no function 'layers'" in capsys.readouterr().err


def test_a_missing_module_is_reported_with_the_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidRun) as found:
        ModelSpec("nowhere.at:all").build()
    said = str(found.value)
    assert f"found no module 'nowhere'; looked in {tmp_path}" in said
    assert f"the packages of {sys.prefix}" in said
    assert "PYTHONPATH (for an agent: --path DIR)" in said


def test_the_installation_is_named_once() -> None:
    assert searched().count(sys.prefix) == 1


def test_an_agents_ranks_search_its_directories_but_not_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "models").mkdir()
    for folder in ("cwd", "models"):
        (tmp_path / folder / f"in_{folder}.py").write_text("")
    environment = environment_of_ranks([tmp_path / "models"], {"PYTHONPATH": f"/a{os.pathsep}/b"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "models"), "/a", "/b"]
    for module, expected in (("in_models", 0), ("in_cwd", 1)):
        found = subprocess.run(
            [sys.executable, "-m", module],
            cwd=tmp_path / "cwd",
            env={**os.environ, **environment},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert found.returncode == expected, found.stderr
