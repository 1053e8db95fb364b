"""The package ``benchmarks``: its command, and that it stays out of the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_solver.errors import ContradictedBound

from benchmarks.cli import main


def test_the_wheel_contains_the_parts_and_nothing_else() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = configuration["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = ["solver/zbv_solver", "solver/zbv_models", "service/zbv_service", "worker/zbv_worker"]
    assert wheel == {"packages": parts}


@pytest.mark.parametrize("part", ["solver", "service", "worker"])
def test_no_part_imports_the_benchmarks(part: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / part).rglob("*.py")
        if "from benchmarks" in path.read_text() or "import benchmarks" in path.read_text()
    ]
    assert wrong == []


def test_the_help_lists_every_benchmark_and_loads_none() -> None:
    code = (
        "import sys; from benchmarks.cli import _parser; print(_parser().format_help()); "
        "assert not {'torch', 'numba', 'ortools', 'fastapi', 'sqlalchemy', 'playwright'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for name in (
        "planner",
        "partitioning",
        *("jitter", "packing", "unequal", "per-step", "layouts"),
        *("published", "reserved", "soak"),
        "service",
        "worker",
    ):
        assert f"\n    {name}" in ran.stdout


def test_soak_prints_the_seed_that_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "0.001", "--seed", "7", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("seed 7\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["planner", "missing.json"], "benchmarks: missing.json: No such file"),
        (["service", "everything"], "found 'everything'; must be one of ranks, queue"),
        (["worker", "all", "--workload", "x.json"], "Name that."),
        (["worker", "pairs", "-o", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_wrong_input_has_status_2_and_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_contradicted_bound_has_status_70_and_keeps_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def contradicted(*_: object, **__: object) -> None:
        raise ContradictedBound({"pp_degree": 2}, 5.0, 6.0, "a test")

    monkeypatch.setattr("benchmarks.planner.run.bench", contradicted)
    monkeypatch.chdir(tmp_path)
    assert main(["planner", str(ROOT / "benchmarks" / "proofs.json")]) == 70
    (kept,) = tmp_path.glob("zbv-contradiction-*.json")
    assert json.loads(kept.read_text()) == {"pp_degree": 2}
    assert kept.name in capsys.readouterr().err
