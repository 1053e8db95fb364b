"""``zbv layout --cut``: what a given cut holds under an executor, against torchtitan's own table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.commands.cli import main

Capture = pytest.CaptureFixture[str]
GIB = 2**30
H100_96 = {"nodes": 64, "gpus_per_node": 8, "device": "h100", "memory": 95.04 * GIB}
MODEL = {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 1024, "sequence": 512}


def files_of(folder: Path, model: dict[str, Any], cluster: dict[str, Any]) -> list[str]:
    for name, document in (("model", model), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(document))
    return [str(folder / "model.json"), "--cluster", str(folder / "cluster.json")]


@pytest.mark.parametrize(
    ("cut", "schedule", "published"),
    [("15,16x6,15", "1F1B", 82.5), ("7,8x14,7", "Interleaved1F1B", 72.7)],
)
def test_torchtitans_table_of_llama_405b_is_met_within_10_percent(
    cut: str, schedule: str, published: float, tmp_path: Path, capsys: Capture
) -> None:
    """Table 5 of benchmarks/llama3_h100_202412_torchtitan.md, with the cuts of commit 9dec370.

    ``train_configs/llama3_405b.toml`` gathers parameters in float8. The memory is what torchtitan's logger
    reads: the most that PyTorch reserved on any device.
    """
    model = {"presets": ["llama-3.1-405b"], "model": {"product_dtype": "fp8"}, "sequence_length": 8192}
    files, path = files_of(tmp_path, {**model, "global_batch": 256}, H100_96), tmp_path / "scored.json"
    parts = (
        "--tensor-parallel 8 --context-parallel 1 --data-parallel 8 --pipeline-parallel 8 --microbatch-size 4"
    )
    flags = f"--executor torchtitan {parts} --recompute full --precision float8-gather --time-limit 0.1"
    assert main(["layout", *files, *flags.split(), "--cut", cut, "-o", str(path)]) == 0
    scored = json.loads(path.read_text())
    assert scored["schedule"] == schedule
    assert scored["reserved_memory"] == pytest.approx(published * GIB, rel=0.1)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"PyTorch reserves {scored['reserved_memory'] / 1e9:.3g} of 102 GB" in printed
    assert f"tensors of {scored['peak_memory'] / 1e9:.3g} GB" in printed
    assert "enable_fsdp_float8_all_gather" in printed
    assert scored["settings"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--executor zbv", "Name an executor with a fixed order"),
        ("--executor megatron", "a cut is that of one. Fix --microbatch-size, --zero-stage"),
        ("--executor megatron --microbatch-size 1 --zero-stage 1", "the model has 8"),
        ("--executor torchtitan --precision float8-gather", "Set product_dtype fp8"),
    ],
)
def test_what_a_given_cut_lacks_is_said(flags: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    cluster = {"nodes": 1, "gpus_per_node": 4, "device": "h100"}
    files = files_of(tmp_path, {"model": MODEL, "global_batch": 8}, cluster)
    degrees = "--tensor-parallel 1 --context-parallel 1 --data-parallel 2 --pipeline-parallel 2"
    fixed = f"{degrees} --recompute none --placement tp-cp-dp-pp"
    assert main(["layout", *files, *fixed.split(), *flags.split(), "--cut", "4,5"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
