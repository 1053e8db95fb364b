"""Checkpoints: runs resume from the newest undamaged one, also with other ranks and another plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpointed import STEPS, Alone, Runs, newest_step, saving, write_v
from support.plans import random_plan, unit_problem, write_plan
from support.trained import SPEC, train_in_threads
from zbv_solver.construct.baselines import baseline
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.checkpoints.checksums import CHECKSUMS, checksum_of
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run.options import TrainingOptions
from zbv_worker.stage.program import Precision

CLIPPING = ("--clip-norm", "0.5")
"""Shorter than every gradient here. The norm is that of all ranks, so it does not depend on their number."""


def test_another_plan_ranks_replicas_and_sharding_can_resume(tmp_path: Path) -> None:
    """A V on two ranks; two sharded replicas of one rank, in two parts; 1F1B."""
    runs, plan = Runs(tmp_path), write_v(tmp_path / "random.json", p=2, microbatches=4)
    undisturbed = runs.losses(plan, *CLIPPING)
    saved = tmp_path / "saved"
    always = (*saving(saved), *CLIPPING)
    found = runs.losses(plan, *always, steps=3)
    quarters = write_v(tmp_path / "one-rank.json", p=1, microbatches=1)
    divided = ("--data-parallel", "2", "--shard", "--accumulate", "2")
    found |= runs.losses(quarters, *always, *divided, ranks=2, steps=5)
    other = write_plan(tmp_path / "1f1b.json", *baseline("1f1b", unit_problem(2, 4)))
    found |= runs.losses(other, *always, steps=STEPS)
    assert found == pytest.approx(undisturbed, rel=2e-5)
    assert sorted(path.name for path in saved.glob("step-*")) == [
        f"step-{at:08d}.g{generation}" for at, generation in ((5, 2), (6, 3), (7, 3))
    ]


def train(saved: Path, steps: int, spec: ModelSpec = SPEC) -> dict[int, float]:
    """Train one plan, its two ranks as threads, with a checkpoint after every second step; losses by step."""
    options = TrainingOptions(checkpoint=CheckpointOptions(saved, every=2))
    found = train_in_threads(*random_plan(), options, steps, spec=spec)
    lines = [line for report in found.reports for line in report.lines]
    return {line.step: line.loss for line in lines if line.loss is not None}


def test_only_complete_checkpoints_count_and_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    assert list(train(tmp_path, 2)) == [0, 1]
    (tmp_path / "step-00000007.g1.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()  # without an index, so incomplete
    (tmp_path / "notes.txt").write_text("mine")
    assert newest_step(tmp_path) == 2
    assert train(tmp_path, 2) == {}
    assert list(train(tmp_path, 3)) == [2]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "step-00000007.g1.partial").exists()


def test_the_checkpoint_of_a_model_with_other_arguments_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with pytest.raises(InvalidRun, match="belongs to another model"):
        train(tmp_path, 2, ModelSpec("tests:model", {"learning_rate": 0.1}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit of a tensor": lambda folder: flip(folder / "rank-00001.safetensors"),
    "no tensors": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "half of the index": lambda folder: halve(folder / "index.json"),
    "no checksums": lambda folder: (folder / "checksums.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_resumed(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks agree on it, although each reads only a part of the files."""
    before = train(tmp_path, 4)
    DAMAGES[damage](tmp_path / "step-00000004.g1")
    assert train(tmp_path, 4) == {step: before[step] for step in (2, 3)}
    assert f"checkpoint {tmp_path}/step-00000004.g1 is damaged" in capsys.readouterr().err
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000002.g1", "step-00000004.g1.damaged", "step-00000004.g2"]


def test_a_run_without_an_undamaged_checkpoint_ends(tmp_path: Path) -> None:
    """It must not start again from step 0 unnoticed."""
    alone = Alone.of(tmp_path, seed=1)
    alone.save(1)
    alone.save(2)
    for folder in tmp_path.glob("step-*"):
        flip(folder / "rank-00000.safetensors")
    with pytest.raises(InvalidRun, match=r"every checkpoint is damaged.*rank-00000\.safetensors"):
        Alone.of(tmp_path, seed=2).checkpoints.load_newest()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"progress.model": None}, "it lacks the value 'progress.model'"),
        ({"progress.loss_scale": None}, "it lacks the value 'progress.loss_scale'"),
        ({"progress.loss_scale": {"dict": [["value", "large"]]}}, "the loss scale is 'large'"),
        ({"random.0": {"dict": [["torch", 5]]}}, "expected a torch.ByteTensor"),
    ],
)
def test_a_manipulated_checkpoint_is_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    Alone.of(tmp_path, seed=1).save(1)
    index = tmp_path / "step-00000001.g1" / "index.json"
    document = json.loads(index.read_text())
    changed = {k: v for k, v in (document["values"] | values).items() if v is not None or k not in values}
    index.write_text(json.dumps(document | {"values": changed}))
    sums = index.with_name(CHECKSUMS)
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {index.name: checksum_of(index)}))
    with pytest.raises(InvalidRun, match=re.escape(said)):
        Alone.of(tmp_path, seed=2).checkpoints.load_newest()


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [("float32", "float16", 65536.0), ("float16", "float32", 1.0), ("float16", "float16", 1024.0)],
)
def test_a_loss_scale_is_resumed_only_with_the_same_precision(
    before: Precision, after: Precision, value: float, tmp_path: Path
) -> None:
    """A float32 checkpoint must not turn off the scaling of a float16 run."""
    made = Alone.of(tmp_path, 1, before)
    if made.update.loss_scale.is_dynamic:
        made.update.loss_scale.value = 1024.0
    made.save(1)
    again = Alone.of(tmp_path, 2, after)
    again.checkpoints.load_newest()
    assert again.update.loss_scale == LossScale(value, after == "float16")
