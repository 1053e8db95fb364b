"""What the commands of all three parts have in common."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zbv_service.commands.cli
import zbv_solver.commands.cli
import zbv_worker.commands.cli
from support.paths import ROOT

Main = Callable[[Sequence[str]], int]
PLAN, SERVICE, WORKER = (part.commands.cli.main for part in (zbv_solver, zbv_service, zbv_worker))


@pytest.mark.parametrize(
    ("main", "command", "meant"),
    [
        (PLAN, "plna", "plan"),
        (PLAN, "plan x --efort a", "--effort"),
        (PLAN, "plan x --effort quik", "quick"),
        (PLAN, "estimate --layrs 3", "--layers"),
        (SERVICE, "submot x", "submit"),
        (SERVICE, "serve --prot 1", "--port"),
        (WORKER, "estimte", "estimate"),
        (WORKER, "check --divice=cpu", "--device"),
    ],
)
def test_misspelt_words_get_a_suggestion(
    capsys: pytest.CaptureFixture[str], main: Main, command: str, meant: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_a_flag_of_another_command_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PLAN(["check", "x", "--efort", "a"])
    said = capsys.readouterr().err
    assert "Did you mean" not in said
    assert said.startswith("usage: zbv check [-h]"), "the usage of the program does not show the flag"


@pytest.mark.parametrize(
    ("main", "command", "example"),
    [
        (PLAN, "plan", "  thorough  the same"),
        (SERVICE, "follow", ""),
        (
            WORKER,
            "agent",
            "  zbv-worker agent --server http://planner:8000 --allow-model zbv_worker.models.gpt --",
        ),
    ],
)
def test_help_fits_80_columns_except_examples(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    main: Main,
    command: str,
    example: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], [command]):
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80
    assert any(line.startswith(example) for line in lines)
    assert any(line.startswith("exit status: 0 done; ") for line in lines)


COMPLETE = """\
source "$1" && shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_${1//-/_}
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""A bash script that completes the last of its words, as a shell does when a user presses Tab."""


@pytest.mark.parametrize(
    ("main", "words", "completed"),
    [
        (PLAN, "zbv pla", "plan"),
        (PLAN, "zbv plan --effort ", "quick standard thorough"),
        (PLAN, "zbv plan examples/readm", "examples/readme.json"),
        (PLAN, "zbv export plan.json --format torchti", "torchtitan"),
        (PLAN, "zbv layout --tensor", "--tensor-parallel"),
        (PLAN, "zbv layout --preset mixtral", "mixtral-8x7b"),
        (PLAN, "zbv layout --preset h1", ""),  # a device
        (PLAN, "zbv layout --cluster examples/readm", "examples/readme.json"),
        (PLAN, "zbv estimate --attention ", "flash plain"),
        (PLAN, "zbv frontier problem.json -o exampl", "examples"),
        (SERVICE, "zbv-service token cr", "create"),
        (SERVICE, "zbv-service serve --keep-a", "--keep-alive-seconds"),
        (SERVICE, "zbv-service layout --executor torcht", "torchtitan"),
        (SERVICE, "zbv-service token revoke examp", ""),
        (WORKER, "zbv-worker run --backend ", "gloo nccl"),
        (WORKER, "zbv-worker estimate examp", ""),
    ],
)
def test_bash_completes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, main: Main, words: str, completed: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    command = ["bash", "-c", COMPLETE, "bash", str(script), *words.split(" ")]
    shell = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert shell.stdout.split() == completed.split()
    assert shell.stderr == ""
