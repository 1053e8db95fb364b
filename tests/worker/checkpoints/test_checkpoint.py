"""Checkpoints: a killed run continues unchanged, also with other ranks and another plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.agents import DEADLINE, until
from support.checkpointed import (
    STEPS,
    Alone,
    Runs,
    contents,
    newest_step,
    saving,
    v_problem,
    write_plan,
    write_v,
)
from zbv_solver.construct.baselines import baseline
from zbv_worker.checkpoints.checkpoint import newest_checkpoint
from zbv_worker.checkpoints.checksums import CHECKSUMS, checksum_of
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.host.local_ranks import LaunchError
from zbv_worker.stage.program import Precision

CLIPPING = ("--clip-norm", "0.5")
"""Shorter than every gradient here. The norm is that of all ranks, so it does not depend on their number."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v(tmp_path_factory.mktemp("plan") / "random.json", p=2, microbatches=4)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_run_killed_during_a_step_resumes_with_the_same_losses(
    runs: Runs, plan: Path, tmp_path: Path
) -> None:
    """Dropout draws random numbers and Adam has a state, so the checkpoint must restore both."""
    undisturbed = runs.losses(plan, dropout=0.2)
    saved = tmp_path / "saved"
    with runs.start(plan, *saving(saved), steps=1_000_000, dropout=0.2) as started:
        until(lambda: "step 5:" in started.log(0) or "step 5:" in started.log(1))
        os.kill(started.processes[1].pid, signal.SIGKILL)
        with pytest.raises(LaunchError):
            started.wait(timeout=DEADLINE)
    begun = newest_step(saved)
    steps = begun + 3
    again = runs.losses(plan, *saving(saved), dropout=0.2, steps=steps)
    assert list(again) == [begun, begun + 1, begun + 2]
    same = {step: loss for step, loss in undisturbed.items() if step in again}
    assert same or begun >= STEPS
    assert {step: again[step] for step in same} == same


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("check", [1, 2])
def test_a_generation_stopped_after_its_check_harms_no_checkpoint_of_its_successor(
    runs: Runs, plan: Path, tmp_path: Path, check: int
) -> None:
    """It stops before it renames (1) or prunes (2), and resumes after its successor has finished."""
    saved = tmp_path / "saved"
    always = (*saving(saved, every=1), "--checkpoints-kept", "2")
    # Rank 1 goes on, and waits for rank 0 in the next step.
    patient = (*always, "--timeout", "120")
    stop = {"ZBV_TEST_STOP": f"4:{check}"}
    with runs.start(
        plan, *patient, module="support.stopping_rank", environment=stop, steps=1_000_000
    ) as given_up:
        until(lambda: is_stopped(given_up.processes[0].pid))
        newest = 4 if check == 2 else 3
        assert newest_step(saved) == newest
        undisturbed = runs.losses(plan, *always, steps=newest + 2)
        assert list(undisturbed) == [newest, newest + 1]
        before, found = contents(saved), newest_checkpoint(saved)
        assert found is not None
        assert found.name == f"step-{newest + 2:08d}.g2"

        os.kill(given_up.processes[0].pid, signal.SIGCONT)
        with pytest.raises(LaunchError, match="generation 2 has taken over"):
            given_up.wait(timeout=DEADLINE)
        assert contents(saved) == before
        assert newest_checkpoint(saved) == found
        assert "Traceback" not in given_up.log(0) + given_up.log(1)
    assert list(runs.losses(plan, *always, steps=newest + 3)) == [newest + 2]


def test_another_plan_ranks_replicas_and_sharding_can_resume(runs: Runs, plan: Path, tmp_path: Path) -> None:
    """A V on two ranks; two sharded replicas of one rank, in two parts; two replicas of two ranks; 1F1B."""
    undisturbed = runs.losses(plan, *CLIPPING)
    saved = tmp_path / "saved"
    always = (*saving(saved), *CLIPPING)
    found = runs.losses(plan, *always, steps=3)
    quarters = write_v(tmp_path / "one-rank.json", p=1, microbatches=1)
    divided = ("--data-parallel", "2", "--shard", "--accumulate", "2")
    found |= runs.losses(quarters, *always, *divided, ranks=2, steps=5)
    halves = write_v(tmp_path / "two-ranks.json", p=2, microbatches=2)
    found |= runs.losses(halves, *always, "--data-parallel", "2", ranks=4, steps=7)
    other = write_plan(tmp_path / "1f1b.json", *baseline("1f1b", v_problem()))
    found |= runs.losses(other, *always, steps=STEPS)
    assert found == pytest.approx(undisturbed, rel=2e-5)
    assert sorted(path.name for path in saved.glob("step-*")) == [
        f"step-{at:08d}.g{generation}" for at, generation in ((7, 3), (8, 4), (9, 4))
    ]


def test_only_complete_checkpoints_count_and_a_finished_run_trains_no_more(
    runs: Runs, plan: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    assert list(runs.losses(plan, *saving(saved), steps=2)) == [0, 1]
    (saved / "step-00000007.g1.partial").mkdir()
    (saved / "step-00000008").mkdir()  # without an index, so incomplete
    (saved / "notes.txt").write_text("mine")
    assert newest_step(saved) == 2
    assert runs.losses(plan, *saving(saved), steps=2) == {}
    assert list(runs.losses(plan, *saving(saved), steps=3)) == [2]
    assert (saved / "notes.txt").read_text() == "mine"
    assert not (saved / "step-00000007.g1.partial").exists()


def test_the_checkpoint_of_another_model_is_refused(runs: Runs, plan: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    runs.losses(plan, *saving(saved), steps=1)
    for model in ({"layers": 5}, {"learning_rate": 0.1}):
        with runs.start(plan, *saving(saved), **model) as started:
            with pytest.raises(LaunchError):
                started.wait(timeout=DEADLINE)
            # One rank may have lost its peer before it read the checkpoint.
            until(lambda: any("belongs to another model" in started.log(rank) for rank in range(2)))
        assert "Traceback" not in started.log(0)


def test_a_directory_that_cannot_be_written_is_named(runs: Runs, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(LaunchError, match=r"(?s)status 2.*checkpoints in "),
        runs.start(plan, *saving(tmp_path / "file" / "below"), steps=2) as started,
    ):
        started.wait(timeout=DEADLINE)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit of a tensor": lambda folder: flip(folder / "rank-00001.safetensors"),
    "half of the tensors": lambda folder: os.truncate(folder / "rank-00000.safetensors", 5_000),
    "no tensors": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "one bit of the index": lambda folder: flip(folder / "index.json"),
    "half of the index": lambda folder: os.truncate(folder / "index.json", 100),
    "no checksums": lambda folder: (folder / "checksums.json").write_bytes(b""),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_resumed(
    runs: Runs, plan: Path, tmp_path: Path, damage: str
) -> None:
    """All ranks agree on it, although each reads only a part of the files."""
    saved = tmp_path / "saved"
    before = runs.losses(plan, *saving(saved), steps=4)
    DAMAGES[damage](saved / "step-00000004.g1")
    with runs.start(plan, *saving(saved), steps=4) as started:
        started.wait(timeout=DEADLINE)
        log = started.log(0)
    assert f"checkpoint {saved}/step-00000004.g1 is damaged" in log
    assert runs.found() == {step: before[step] for step in (2, 3)}
    names = sorted(path.name for path in saved.glob("step-*"))
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


def test_data_whose_state_is_an_object_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    alone = Alone.of(tmp_path, seed=1)
    alone.checkpoints._state._data = BadData()
    with pytest.raises(InvalidRun, match=r"data\.0\.iterator is a list_iterator, which a checkpoint cannot"):
        alone.checkpoints.save(1)
    assert newest_checkpoint(tmp_path) is None


class BadData:
    def data_state(self) -> dict[str, Any]:
        return {"iterator": iter([1])}

    def load_data_state(self, state: dict[str, Any]) -> None: ...


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
