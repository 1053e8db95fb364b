"""``python -m benchmarks worker``: every comparison runs end to end on a small workload.

No test asserts a time, because times on a busy machine mean nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from benchmarks.cli import main
from benchmarks.worker.gpt import GptWorkload
from benchmarks.worker.layouts import LayoutsWorkload
from benchmarks.worker.memory import MemoryWorkload
from benchmarks.worker.nccl_model import NcclModelWorkload
from benchmarks.worker.rehearse import RehearseWorkload
from benchmarks.worker.split import SplitWorkload
from benchmarks.worker.workload import read_workload

FILES = ROOT / "benchmarks" / "worker"
GPT = {"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
SMALL: dict[str, dict[str, Any]] = {
    "overhead": {"pp_degrees": [2], "microbatches": 4, "in_a_row": 1, "rounds": 3, "warm_up": 1},
    "gpt": {"microbatches": [4], "model": GPT, "profile_repeats": 1, "rounds": 3},
    "split": {"widths": [32], "tokens": 16, "rounds": 3, "warm_up": 1},
    # Short sequences, because the number of messages that wait to be received varies from run to run.
    "memory": {
        "pp_degrees": [2],
        "microbatches": 4,
        "limits": [1.0],
        "model": GPT | {"length": 16, "sequences": 1},
        "steps": 1,
    },
    "rehearse": {
        "pp_degree": 2,
        "microbatches": 3,
        "forward": [2, 2],
        "backward_input": [2, 2],
        "backward_weight": [1, 1],
        "p2p": 0.1,
        "steps": 2,
    },
    "pipeline-step": {
        "pp_degrees": [2],
        "microbatches": 4,
        "rows": 4,
        "width": 8,
        "rounds": 3,
        "warm_up": 1,
    },
    "packing": {
        "replicas": 1,
        "sequences": 4,
        "scale": 1024,
        "max_tokens": 32,
        "blocks": 4,
        "width": 8,
        "effort": "quick",
        "profile_steps": 1,
        "rounds": 1,
    },
    "layouts": {
        "models": [{"blocks": 2, "width": 16, "heads": 2, "length": 8, "batch": 1}],
        "processes": 2,
        "repeats": 1,
        "steps": 1,
        "rounds": 1,
    },
    "nccl-model": {"families": ["1F1B", "V, greedy"], "kernels": [1, 4], "sizes": [[4, 4]], "seeds": 1},
}


def bench(name: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    workload, output = folder / "workload.json", folder / "bench.json"
    workload.write_text(json.dumps(SMALL[name]))
    status = main(["worker", name, "--workload", str(workload), "-o", str(output)])
    findings: list[dict[str, Any]] = json.loads(output.read_text())[name]["findings"]
    return status, findings


@pytest.mark.parametrize("name", ["overhead", "pipeline-step", "gpt", "split", "rehearse", "layouts"])
def test_a_comparison_prints_verdicts_and_writes_findings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, findings = bench(name, tmp_path)
    judged = [finding for finding in findings if finding["target"] is not None]
    assert judged
    late = [finding["what"] for finding in judged if finding["missed_by"] > 0]
    assert status == (1 if late else 0)
    said = capsys.readouterr()
    assert all(f"benchmarks: {what}: target" in said.err for what in late)
    assert "verdict" in said.out


def test_the_memory_of_real_steps_agrees_with_the_plan(tmp_path: Path) -> None:
    """No time is measured here, so the target itself is asserted."""
    status, findings = bench("memory", tmp_path)
    assert [finding["missed_by"] for finding in findings] == [0, 0]
    assert status == 0


def test_packing_measures_every_variant_on_real_ranks(tmp_path: Path) -> None:
    """So small a batch may have no planned gain, which then has no target."""
    status, findings = bench("packing", tmp_path)
    assert status == (1 if any(finding["missed_by"] > 0 for finding in findings) else 0)
    steps = [finding["value"] for finding in findings if "step as" in finding["what"]]
    assert len(steps) == 2 * 3
    assert min(steps) > 0


def test_the_table_of_the_model_of_nccl_has_a_row_per_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, findings = bench("nccl-model", tmp_path)
    assert [finding["missed_by"] for finding in findings] == [0, 0]
    assert status == 0
    said = capsys.readouterr().out
    assert "| 1F1B | 4 | all hang | all end |" in said
    assert "| V, greedy | 4 | all hang | all end |" in said


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_the_workloads_of_the_repository_are_valid(path: Path) -> None:
    kinds: dict[str, type[Any]] = {
        "gpt": GptWorkload,
        "layouts": LayoutsWorkload,
        "memory": MemoryWorkload,
        "nccl": NcclModelWorkload,
        "rehearse": RehearseWorkload,
        "split": SplitWorkload,
    }
    kind = kinds[path.stem.partition("-")[0]]
    assert read_workload(kind, path) != kind()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"widht": [3]}', r"widht: found \[3\]"),
        ('{"rounds": "many"}', "rounds: found 'many'"),
        ("{", "not JSON"),
        (None, "No such file"),
    ],
)
def test_a_wrong_workload_has_status_2(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "workload.json"
    if text is not None:
        path.write_text(text)
    assert main(["worker", "split", "--workload", str(path)]) == 2
    assert re.search(message, capsys.readouterr().err)
