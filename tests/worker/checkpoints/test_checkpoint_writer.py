"""Checkpoints written in the background are those that were saved, and an error does not go unnoticed."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from support.agents import DEADLINE, until
from support.checkpointed import Alone, Runs, contents, newest_step, saving, write_v
from support.fake_cuda import FakeCuda
from support.plans import random_plan
from support.trained import Trained, train_in_threads
from zbv_worker.checkpoints import checkpoint_files
from zbv_worker.checkpoints.checkpoint import CheckpointOptions, newest_checkpoint
from zbv_worker.checkpoints.checkpoint_files import RankFiles
from zbv_worker.checkpoints.checkpoint_writer import BackgroundWriter, HostCopies
from zbv_worker.checkpoints.fence import Fence
from zbv_worker.errors import ChannelTimeout, StorageFailed, Superseded, status_of
from zbv_worker.host.local_ranks import LaunchError
from zbv_worker.run.options import TrainingOptions


def test_a_run_killed_while_it_writes_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    """Training goes on while a thread writes, so the killed run had trained further.

    Dropout draws random numbers and Adam has a state, so the checkpoint must restore both.
    """
    runs, plan, saved = Runs(tmp_path), write_v(tmp_path / "plan.json", 2, 4), tmp_path / "saved"
    undisturbed = runs.losses(plan, steps=6, dropout=0.2)
    with runs.start(
        plan,
        *saving(saved, every=4),
        module="support.hindered_rank",
        environment={"ZBV_TEST_STUCK": "8"},
        steps=1_000_000,
        dropout=0.2,
    ) as started:
        until(lambda: "step 11:" in started.log(0) + started.log(1))
        half = saved / "step-00000008.g1.partial" / "rank-00000.safetensors"
        until(lambda: half.exists() and half.read_bytes() == b"half")
        for process in started.processes:
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LaunchError):
            started.wait(timeout=DEADLINE)
    assert newest_step(saved) == 4
    again = runs.losses(plan, *saving(saved, every=4), steps=6, dropout=0.2)
    assert again == {step: undisturbed[step] for step in (4, 5)}
    assert not list(saved.glob("*.partial"))


def train(saved: Path, steps: int = 6) -> Trained:
    """Train one plan, its two ranks as threads, with a checkpoint after every second step."""
    options = TrainingOptions(checkpoint=CheckpointOptions(saved, every=2))
    return train_in_threads(*random_plan(), options, steps)


def full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Rank 1 finds no space for the checkpoint before a step."""
    write = RankFiles.write

    def half(self: RankFiles, folder: Path) -> int:
        if self.rank == 1 and folder.name.startswith(f"step-{step:08d}"):
            (folder / "rank-00001.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, folder)

    monkeypatch.setattr(RankFiles, "write", half)


def test_a_rank_that_cannot_write_skips_the_checkpoint_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk(monkeypatch, 4)
    found = train(tmp_path)
    assert len(found.losses) == 6
    said = f"the checkpoint of step 4 is skipped: checkpoints in {tmp_path}: No space left on device."
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002.g1", "step-00000006.g1"]
    events = [(event["kind"], event["step"]) for event in found.reports[0].events]
    assert events == [("checkpoint_skipped", 4)]


def test_a_run_whose_last_checkpoint_cannot_be_written_fails_and_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result would be lost. Status 1, unlike 2, says that a restart may succeed."""
    with monkeypatch.context() as patch:
        full_disk(patch, 6)
        with pytest.raises(StorageFailed, match=f"{tmp_path}: No space left on device") as raised:
            train(tmp_path)
    assert status_of(raised.value) == 1
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002.g1", "step-00000004.g1"]
    assert len(train(tmp_path).losses) == 2


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """While this event is not set, nothing is written."""
    opened, write = Event(), RankFiles.write

    def wait_and_write(self: RankFiles, folder: Path) -> int:
        if not opened.wait(60.0):
            raise TimeoutError("the test never opened the gate")
        return write(self, folder)

    monkeypatch.setattr(RankFiles, "write", wait_and_write)
    yield opened
    opened.set()


def test_training_goes_on_and_the_files_are_those_of_a_synchronous_save(tmp_path: Path, gate: Event) -> None:
    """Byte for byte, although parameters and optimizer have changed before anything is written."""
    saved = {}
    for name, is_synchronous in (("synchronous", True), ("background", False)):
        alone = Alone.of(tmp_path / name, seed=1, is_synchronous=is_synchronous)
        alone.train(2)
        random.seed(3)
        (gate.set if is_synchronous else gate.clear)()
        alone.checkpoints.save(2)
        alone.train(3)
        assert (newest_checkpoint(tmp_path / name) is not None) == is_synchronous
        gate.set()
        alone.checkpoints.finish()
        saved[name] = contents(tmp_path / name)
    assert len(saved["background"]) == 3
    assert saved["background"] == saved["synchronous"]


def test_a_gpu_overwrites_parameters_only_after_their_copies() -> None:
    """The host does not wait: the compute stream waits for the copies, and these for earlier work."""
    cuda = FakeCuda()
    copies = HostCopies(torch.device("cuda"), cuda, pin=False)
    parameter, updated = torch.zeros(2), [torch.full((2,), float(step)) for step in range(3)]
    kept = []
    for step in (1, 2):
        for _ in range(3):
            cuda.compute.compute(1.0)
        with cuda.stream(cuda.compute):
            parameter.copy_(updated[step])
        with copies.copying() as copy:
            copied = copy("parameter", parameter)
        with cuda.stream(cuda.compute):
            parameter.copy_(updated[0])
        assert float(copied[0]) != step  # nothing has run yet
        copies.wait()
        assert torch.equal(copied, updated[step])
        cuda.settle()
        assert torch.equal(copied, updated[step])
        kept.append(copied)
    assert kept[0] is kept[1]  # its memory is used again


def test_the_next_save_waits_for_the_one_in_progress(tmp_path: Path, gate: Event) -> None:
    alone = Alone.of(tmp_path, seed=1)
    alone.checkpoints.save(1)
    order: list[str] = []
    wait = BackgroundWriter.wait

    def watched(self: BackgroundWriter) -> None:
        gate.set()
        wait(self)
        order.append(newest_checkpoint(tmp_path).name)  # type: ignore[union-attr]  # it exists by now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundWriter, "wait", watched)
        alone.checkpoints.save(2)
    assert order == ["step-00000001.g1"]
    alone.checkpoints.finish()
    assert newest_step(tmp_path) == 2


@pytest.mark.parametrize(
    ("number", "where"),
    [(errno.ENOSPC, "tensors"), (errno.EROFS, "folder"), (errno.EIO, "rename"), (errno.ESTALE, "rename")],
)
def test_a_file_system_that_fails_for_a_while_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    """It is reported before the next one, its files go, and the next one is written."""
    alone = Alone.of(tmp_path, seed=1)
    alone.save(1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(checkpoint_files, "save_file", fail)
        else:
            patch.setattr(Fence, "begin" if where == "folder" else "publish", fail)
        alone.checkpoints.save(2)
        until(lambda: is_reported(alone))
        assert alone.skipped == [(2, f"checkpoints in {tmp_path}: {os.strerror(number)}.")]
        until(lambda: not list(tmp_path.glob("*.partial")))
        with pytest.raises(StorageFailed, match=os.strerror(number)):
            alone.checkpoints.finish()  # as at the end of a run
    assert newest_step(tmp_path) == 1
    alone.save(3)
    assert newest_step(tmp_path) == 3
    assert len(alone.skipped) == 1


def is_reported(alone: Alone) -> bool:
    alone.checkpoints.check()  # as after every step
    return bool(alone.skipped)


def test_what_a_full_disk_left_of_a_checkpoint_goes_before_the_next_one(tmp_path: Path) -> None:
    alone = Alone.of(tmp_path, seed=1)
    alone.save(1)
    left = tmp_path / "step-00000002.g1.partial"
    left.mkdir()
    alone.save(3)
    assert not left.exists()


def test_a_superseded_run_completes_no_checkpoint(tmp_path: Path, gate: Event) -> None:
    gate.set()
    first = Alone.of(tmp_path, seed=1)
    first.save(1)
    gate.clear()
    first.checkpoints.save(2)
    successor = Alone.of(tmp_path, seed=1)
    assert successor.checkpoints.load_newest() == 1
    before = contents(tmp_path)
    gate.set()
    with pytest.raises(Superseded, match="generation 2 has taken over"):
        first.checkpoints.finish()
    assert contents(tmp_path) == before


def test_rank_0_completes_nothing_without_the_files_of_all_ranks() -> None:
    with pytest.raises(ChannelTimeout, match=r"rank 0, at a checkpoint: rank 1, 3 did not write its files"):
        BackgroundWriter(0, timeout=0.3).until_none(lambda: [1, 3])
    absent = [[3], [3], list[int]()]
    BackgroundWriter(0, timeout=60.0).until_none(lambda: absent.pop(0))
    assert not absent


def test_a_run_that_fails_waits_for_no_files() -> None:
    writer = BackgroundWriter(0, timeout=60.0)
    writer.start(lambda: writer.until_none(lambda: [1]))
    writer.close()
    with pytest.raises(ChannelTimeout):
        writer.wait()
