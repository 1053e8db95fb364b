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
from benchmarks.worker import overhead
from benchmarks.worker.cli import read_workload
from benchmarks.worker.nccl_model import NcclModelWorkload

SMALL: dict[str, dict[str, Any]] = {
    "overhead": {"pp_degrees": [2], "microbatches": 4, "in_a_row": 1, "rounds": 3, "warm_up": 1},
    "pipeline-step": {
        **{"pp_degrees": [2], "microbatches": 4, "rows": 4, "width": 8},
        **{"rounds": 3, "warm_up": 1},
    },
    "pairs": {"microbatches": 4, "layers": 1, "action_ms": 8, "steps": 1},
    "nccl-model": {"families": ["1F1B", "V, greedy"], "kernels": [1, 4], "sizes": [[4, 4]], "seeds": 1},
}


def bench(name: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    workload, output = folder / "workload.json", folder / "bench.json"
    workload.write_text(json.dumps(SMALL[name]))
    status = main(["worker", name, "--workload", str(workload), "-o", str(output)])
    findings: list[dict[str, Any]] = json.loads(output.read_text())[name]["findings"]
    return status, findings


@pytest.mark.parametrize("name", ["overhead", "pipeline-step", "pairs"])
def test_a_comparison_prints_verdicts_and_writes_findings(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, findings = bench(name, tmp_path)
    judged = [finding for finding in findings if finding["target"] is not None]
    assert judged
    late = [finding["what"] for finding in judged if finding["missed_by"] > 0]
    assert status == (1 if late else 0)
    printed = capsys.readouterr()
    assert all(f"benchmarks: {what}: target" in printed.err for what in late)
    assert "verdict" in printed.out


def test_the_table_of_nccl_has_a_row_per_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, findings = bench("nccl-model", tmp_path)
    assert [finding["missed_by"] for finding in findings] == [0, 0]
    assert status == 0
    printed = capsys.readouterr().out
    assert "| 1F1B | 4 | all hang | all end |" in printed
    assert "| V, greedy | 4 | all hang | all end |" in printed


def test_overhead_is_cpu_time_per_action_beyond_the_plain_loop() -> None:
    def samples(microseconds: int) -> list[tuple[int, int]]:
        return [(10 * 1000 * microseconds, 10 * 1000 * (microseconds + 5))] * 3

    answer = {"executor": samples(60), "plain loop with bare transfers": samples(45), "actions": 10}
    found = {finding.what: finding.value for finding in overhead.findings(2, [answer, answer])}
    assert found == pytest.approx(
        {
            "p=2: CPU per action beyond compute and bare transfers, executor's thread": 15,
            "p=2: CPU per action beyond compute and bare transfers, whole process": 15,
        }
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "worker").glob("*.json")), ids=lambda p: p.stem
)
def test_the_workloads_of_the_repository_are_valid(path: Path) -> None:
    assert read_workload(NcclModelWorkload, path) != NcclModelWorkload()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"widht": [3]}', "/widht: unknown key"),
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
    assert main(["worker", "pipeline-step", "--workload", str(path)]) == 2
    assert re.search(message, capsys.readouterr().err)
