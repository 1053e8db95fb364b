"""``zbv pack`` as users meet it: statuses, streams, messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.batches import batch_document
from zbv_solver.commands.cli import main

Capture = pytest.CaptureFixture[str]


def written(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def said(capsys: Capture) -> str:
    return capsys.readouterr().err


def test_a_packing_is_written_and_its_quality_reported(tmp_path: Path, capsys: Capture) -> None:
    batch = written(tmp_path / "batch.json", batch_document([8] * 8, max_tokens=8))
    path = tmp_path / "packed.json"
    assert main(["pack", batch, "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "8 microbatches on 2 replicas" in err
    packed = json.loads(path.read_text())
    assert len(packed["replicas"]) == 2
    assert packed["baselines"][0]["step_time"] is None
    plan = written(tmp_path / "plan.json", packed["replicas"][0]["plan"])
    problem = written(tmp_path / "problem.json", packed["replicas"][0]["plan"]["problem"])
    assert main(["check", problem, plan]) == 0
    assert main(["export", str(path), "--format", "svg"]) == 2
    assert "this is a packing, not a plan. The plan of replica 0 is under /replicas/0/plan" in said(capsys)
    assert main(["plan", batch]) == 2
    assert "this is a batch, not a problem. `zbv pack` packs it." in said(capsys)
    assert main(["pack", problem]) == 2
    assert "this is a problem, not a batch." in said(capsys)


def test_one_microbatch_is_singular(tmp_path: Path, capsys: Capture) -> None:
    batch = written(tmp_path / "batch.json", batch_document([8], replicas=1))
    assert main(["pack", batch, "-o", str(tmp_path / "packed.json")]) == 0
    assert "1 microbatch on 1 replica," in said(capsys)


@pytest.mark.parametrize(
    ("document", "flags", "status", "message"),
    [
        (batch_document([8, 65]), [], 2, "/sequences/1: found 65 tokens, more than the largest microbatch"),
        (batch_document([64, 64], limit=100), [], 3, "smallest feasible limit"),
        (batch_document([8, 8]), ["--time-limit", "-1"], 2, "--time-limit: found -1"),
        ([1], [], 2, "must be a JSON object"),
    ],
)
def test_mistakes_are_named(
    document: object, flags: list[str], status: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["pack", written(tmp_path / "batch.json", document), *flags]) == status
    assert message in said(capsys)
