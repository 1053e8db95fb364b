"""The example with text, evaluation and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command

EXAMPLE = ROOT / "examples" / "train.py"


def test_it_learns_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 70
    saved = ["--checkpoints", str(tmp_path / "saved")]
    arguments = ["--steps", "10", *saved, "+", "--steps", "13", *saved]
    with LocalRanks([python_command("support.run_script", str(EXAMPLE), *arguments)] * 2, tmp_path) as ranks:
        ranks.wait(240)
        logs = [ranks.log(rank) for rank in range(2)]
    assert re.findall(r"step (\d+): loss", "".join(logs)) == ["10"]
    first, second = (float(loss) for log in logs for loss in re.findall(r"held-out text: (\S+)", log))
    assert second < first
    assert all("resumed after step 10" in log for log in logs)
    assert {path.name for path in (tmp_path / "saved").glob("step-*")} == {
        "step-00000010.g1",
        "step-00000013.g2",
    }


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    command = python_command("support.run_script", str(EXAMPLE), "--text", str(tmp_path / "short.txt"))
    with pytest.raises(LaunchError, match="found 5 bytes of text"), LocalRanks([command], tmp_path) as ranks:
        ranks.wait(240)
