"""The examples train on several ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command

EXAMPLES = ROOT / "examples"


def logs_of(example: str, ranks: int, folder: Path, *arguments: str) -> list[str]:
    command = python_command("support.run_script", str(EXAMPLES / example), *arguments)
    with LocalRanks([command] * ranks, folder) as started:
        started.wait(240)
        return [started.log(rank) for rank in range(ranks)]


def test_one_with_checkpoints_learns_and_resumes(tmp_path: Path) -> None:
    assert len((EXAMPLES / "train.py").read_text().splitlines()) <= 70
    saved = ["--checkpoints", str(tmp_path / "saved")]
    logs = logs_of("train.py", 2, tmp_path, "--steps", "4", *saved, "+", "--steps", "6", *saved)
    first, second = (float(loss) for log in logs for loss in re.findall(r"held-out text: (\S+)", log))
    assert second < first
    assert all("resumed after step 4" in log for log in logs)
    assert {path.name for path in (tmp_path / "saved").glob("step-*")} == {
        "step-00000004.g1",
        "step-00000006.g2",
    }


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(LaunchError, match="found 5 bytes of text"):
        logs_of("train.py", 1, tmp_path, "--text", str(tmp_path / "short.txt"))


@pytest.mark.parametrize(("example", "ranks", "steps"), [("llama.py", 1, 10), ("tensor_parallel.py", 4, 12)])
def test_the_loss_falls_where_the_last_layer_is(example: str, ranks: int, steps: int, tmp_path: Path) -> None:
    """On all processes of the V's first rank alike: with tensor parallelism, these are two."""
    logs = logs_of(example, ranks, tmp_path)
    first, *others = (re.findall(r"^loss (.*)$", log, re.MULTILINE) for log in logs)
    assert len(first) == steps
    assert float(first[-1]) < 0.8 * float(first[0])
    half = ranks // 2
    assert others == [first] * (half - 1) + [[]] * half
