"""``zbv-worker check``: its findings, lines and exit status. Its receives are tested on the model of NCCL."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from support.paths import ROOT
from zbv_worker import check
from zbv_worker.check import Finding, environment_finding, step_finding
from zbv_worker.commands.cli import main


def verdicts(said: str) -> dict[str, str]:
    found = re.findall(r"^(pass|fail|not run) +(\w+):", said, re.MULTILINE)
    return {name: verdict for verdict, name in found}


def test_a_node_without_a_gpu_trains_a_step_on_its_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert verdicts(said) == {"devices": "pass", "variables": "pass", "receives": "not run", "step": "pass"}
    assert "the gradients of 2 ranks over gloo" in said


def test_a_node_without_a_gpu_cannot_train_on_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["check", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["passed"]
    verdicts = {each["name"]: each["verdict"] for each in document["checks"]}
    assert verdicts == {"devices": "fail", "variables": "pass", "receives": "not run", "step": "not run"}
    assert "Install the GPU's driver" in document["checks"][0]["text"]


def test_a_wrong_variable_fails_and_a_doubtful_one_is_shown() -> None:
    wrong = environment_finding({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})
    assert wrong.verdict == "fail"
    assert "CUDA_LAUNCH_BLOCKING: found '1'; must be 0" in wrong.text
    assert "TORCH_NCCL_BLOCKING_WAIT: found '1'; must be 0" in wrong.text
    doubtful = environment_finding({"NCCL_MAX_P2P_NCHANNELS": "32", "NCCL_DEBUG": "INFO"})
    assert doubtful.verdict == "pass"
    assert "NCCL_MAX_P2P_NCHANNELS: found 32; recommended 4" in doubtful.text
    assert "NCCL_DEBUG=INFO" in doubtful.text


def test_a_failed_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(check, "_measured", lambda name, *_: Finding(name, "pass", "fine"))
    assert main(["check", "--device", "cpu"]) == 1
    assert verdicts(capsys.readouterr().out)["variables"] == "fail"


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ({"a": 1e-2}, "the worst is that of a"),
        ({"a": None}, "the worst is that of a"),
        ({}, "lack a and 0 others"),
    ],
)
def test_a_wrong_or_absent_gradient_fails(errors: dict[str, Any], text: str) -> None:
    right = {"errors": {"b": 1e-6}, "all": ["a", "b"]}
    assert step_finding([{**right, "errors": {"a": 1e-6}}, right], "gloo").verdict == "pass"
    finding = step_finding([right, {**right, "errors": errors}], "gloo")
    assert finding.verdict == "fail"
    assert text in finding.text


def test_a_step_that_fails_or_hangs_shows_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PROCESS_SECONDS", 0.05)
    *_, finding = check.check_node("cpu", 2)
    assert finding.verdict == "fail"
    assert "did not end within 0.05 s" in finding.text


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--ranks", "1"]) == 2
    assert "must be at least 2" in capsys.readouterr().err


def test_the_page_of_what_is_unproved_names_every_file_of_gpu_tests_and_no_other() -> None:
    text = (ROOT / "docs/without-a-gpu.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\| `(test_\w+\.py)` \|$", text, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
