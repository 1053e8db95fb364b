"""A process's cores, the modules that it can import, and how its end is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from zbv_worker.commands.cli import main
from zbv_worker.errors import InvalidRun
from zbv_worker.host import process
from zbv_worker.host.environment import environment_of_ranks, searched
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command
from zbv_worker.model.spec import ModelSpec


@pytest.mark.parametrize(
    ("cores", "ranks", "quota", "local", "threads"),
    [
        (2, 2, None, 1, 1),  # two agents of one rank each on a host of two cores
        (16, 4, None, 4, 4),
        (16, 1, "max 100000", 1, 16),
        (16, 2, "400000 100000", 1, 4),  # two containers of four CPUs each
        (2, 8, None, 8, 1),
        (7, 2, None, 2, 3),
    ],
)
def test_ranks_share_cores_and_the_time_of_their_container(
    cores: int,
    ranks: int,
    quota: str | None,
    local: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: list(range(cores)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(process, "_CPU_QUOTA", file)
    assert process.threads_per_rank(ranks, local) == threads


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


def test_a_missing_module_is_reported_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_crash_in_native_code_is_reported_with_the_python_code_that_led_there(tmp_path: Path) -> None:
    command = python_command("timeit", "-n1", "-r1", "import ctypes; ctypes.string_at(0)")
    with LocalRanks([command], tmp_path) as ranks, pytest.raises(LaunchError) as raised:
        ranks.wait(timeout=240)
    assert "rank 0 ended with status -11" in str(raised.value)
    assert "Fatal Python error: Segmentation fault" in str(raised.value)
    assert "in string_at" in str(raised.value)


def test_a_forked_rank_can_be_killed_and_does_not_outlive_its_block(tmp_path: Path) -> None:
    command = python_command("timeit", "-n1", "-r1", "import time; time.sleep(60)")
    with LocalRanks([command] * 2, tmp_path) as ranks:
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match="rank 1 ended with status -9"):
            ranks.wait(timeout=240)
        os.kill(ranks.processes[0].pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(ranks.processes[0].pid, 0)
