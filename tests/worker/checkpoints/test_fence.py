"""An abandoned generation does not disturb its successor's checkpoints, wherever it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from zbv_worker.checkpoints.checkpoint_files import INDEX
from zbv_worker.checkpoints.fence import Claimant, Fence, checkpoints
from zbv_worker.errors import InvalidRun, Superseded

ALONE = Claimant("model")


def claim(folder: Path, claimant: Claimant = ALONE) -> Fence:
    return Fence.claim(folder, claimant)


def write(fence: Fence, step: int) -> None:
    partial = fence.partial(step)
    partial.mkdir(exist_ok=True)
    (partial / INDEX).write_text(str(fence.generation))


def save(fence: Fence, step: int, kept: int = 3) -> None:
    write(fence, step)
    fence.publish(step, kept)


def made_by(folder: Path) -> dict[int, int]:
    """The generation that wrote each checkpoint that counts, by step."""
    return {step: int((path / INDEX).read_text()) for step, path in checkpoints(folder).items()}


def stopped_after_check(fence: Fence, count: int, meanwhile: Callable[[], object]) -> None:
    """Stop a fence after a successful check, and let something else happen before it continues."""
    checks, check = 0, fence.check

    def checked() -> None:
        nonlocal checks
        check()
        checks += 1
        if checks == count:
            meanwhile()

    fence.check = checked  # type: ignore[method-assign]


def test_a_generation_counts_inherited_and_own_checkpoints(tmp_path: Path) -> None:
    first = claim(tmp_path)
    for step in (10, 20, 30, 40):
        save(first, step)
    second = claim(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    assert made_by(tmp_path) == {20: 1, 30: 1, 40: 1}
    save(second, 50)
    assert made_by(tmp_path) == {30: 1, 40: 1, 50: 2}


def test_an_abandoned_generation_writes_nothing_and_names_its_successor(tmp_path: Path) -> None:
    first = claim(tmp_path)
    for step in (10, 20, 30):
        save(first, step)
    second = claim(tmp_path, Claimant("model", run="r" * 32, attempt=1))
    save(second, 40)
    before = made_by(tmp_path)
    with pytest.raises(Superseded, match=r"generation 2 has taken over \(run r{32}, host .*generation 1"):
        save(first, 40, kept=1)
    assert made_by(tmp_path) == before == {20: 1, 30: 1, 40: 2}


def test_a_generation_stopped_before_renaming_does_no_harm(tmp_path: Path) -> None:
    first = claim(tmp_path)
    save(first, 10)

    def successor() -> None:
        save(claim(tmp_path), 15)
        write(first, 20)  # the stopped generation's other rank finishes its file

    stopped_after_check(first, 1, successor)
    with pytest.raises(Superseded):
        save(first, 20, kept=1)
    assert (tmp_path / "step-00000020.g1").is_dir(), "this test does not reach the rename"
    assert made_by(tmp_path) == {10: 1, 15: 2}
    claim(tmp_path)
    assert made_by(tmp_path) == {10: 1, 15: 2}
    assert not (tmp_path / "step-00000020.g1").exists()


def test_a_generation_stopped_before_pruning_removes_nothing_of_its_successor(tmp_path: Path) -> None:
    first = claim(tmp_path)
    save(first, 10)
    resumed: list[int] = []

    def successor() -> None:
        second = claim(tmp_path)
        resumed.append(max(made_by(tmp_path)))
        save(second, 25)

    stopped_after_check(first, 2, successor)
    save(first, 20, kept=1)
    assert resumed == [20]
    assert made_by(tmp_path) == {20: 1, 25: 2}


def test_an_abandoned_attempt_cannot_claim_after_its_successor(tmp_path: Path) -> None:
    run = "a" * 32
    claim(tmp_path, Claimant("model", run, attempt=1))
    with pytest.raises(Superseded, match=r"generation 1 of run a{32} uses it .*This is generation 0"):
        claim(tmp_path, Claimant("model", run, attempt=0))
    claim(tmp_path, Claimant("model", run, attempt=2))
    claim(tmp_path, Claimant("model", "b" * 32, attempt=0))
    with pytest.raises(Superseded):
        claim(tmp_path, Claimant("model", run, attempt=1))


def test_another_model_cannot_take_over_checkpoints(tmp_path: Path) -> None:
    first = claim(tmp_path)
    claim(tmp_path, Claimant("other"))  # allowed while there are no checkpoints
    first = claim(tmp_path)
    save(first, 10)
    with pytest.raises(InvalidRun, match="belongs to another model"):
        claim(tmp_path, Claimant("other"))
    first.check()


def test_checkpoints_without_a_generation_count(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000020.partial", "step-00000030"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010" / INDEX).write_text("0")
    assert made_by(tmp_path) == {10: 0}
    fence = claim(tmp_path)
    assert made_by(tmp_path) == {10: 0}
    save(fence, 20, kept=1)
    assert made_by(tmp_path) == {20: 1}
    assert (tmp_path / "step-00000030").is_dir(), "only complete checkpoints are pruned"


def test_a_manually_copied_checkpoint_counts(tmp_path: Path) -> None:
    claim(tmp_path / "new")
    for name in ("old/step-00000010.g7", "new/step-00000020"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / INDEX).write_text("7")
    assert made_by(tmp_path / "old") == {10: 7}, "a directory without claims"
    claim(tmp_path / "old")
    assert made_by(tmp_path / "old") == {10: 7}
    assert made_by(tmp_path / "new") == {20: 7}, "a name without a generation"


def test_simultaneous_claims_get_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, others = Path.rename, iter(range(3))
    numbers: list[int] = []

    def late(self: Path, target: Path) -> Path:
        """Let another generation take the number first."""
        if next(others, None) is not None:
            numbers.append(claim(tmp_path).generation)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    numbers.append(claim(tmp_path).generation)
    assert numbers == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_the_newest_checkpoint_belongs_to_the_newest_generation(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any successful check, the process may be stopped while successors run, are stopped, and end."""
    random, check, rename = Random(seed), Fence.check, Path.rename
    lives, newest, started = iter(range(6)), [0], [0]

    def checked(fence: Fence) -> None:
        check(fence)
        if random.random() < 0.3 and next(lives, None) is not None:
            written = [path.name for path in tmp_path.glob(f"*.g{fence.generation}.partial")]
            live()
            for name in written:  # the other ranks continue to write
                write(fence, int(name[5:13]))

    def renamed(self: Path, target: Path) -> Path:
        found = rename(self, target)
        step, _, generation = target.name.partition(".g")
        if generation == str(started[0]):
            newest[0] = int(step[5:])
        return found

    def live() -> None:
        fence = None
        try:
            fence = claim(tmp_path)
            if fence.generation > started[0]:
                started[0] = fence.generation
                assert max(made_by(tmp_path), default=0) == newest[0], "it resumes from another checkpoint"
            step = max(made_by(tmp_path), default=0)
            for _ in range(random.randint(1, 4)):
                step += random.randint(1, 9)
                save(fence, step, kept=random.randint(1, 3))
        except Superseded:
            assert fence is None or started[0] > fence.generation
        assert max(made_by(tmp_path), default=0) == newest[0]

    monkeypatch.setattr(Fence, "check", checked)
    monkeypatch.setattr(Path, "rename", renamed)
    live()
    monkeypatch.setattr(Fence, "check", check)
    claim(tmp_path)
    assert max(made_by(tmp_path), default=0) == newest[0]


@pytest.mark.parametrize("claimed", [{"model": 5, "run": [1], "attempt": "many", "at": "noon"}, [], "{"])
def test_forged_claims_count_only_as_numbers(claimed: object, tmp_path: Path) -> None:
    save(claim(tmp_path), 10)
    for name in ("7", "²", "x7"):
        folder = tmp_path / "generations" / name
        folder.mkdir()
        (folder / "claim.json").write_text(json.dumps(claimed))
    second = claim(tmp_path, Claimant("model", run="r", attempt=1))
    assert second.generation == 8
    assert made_by(tmp_path) == {10: 1}
    (tmp_path / "generations" / "9").mkdir()
    (tmp_path / "generations" / "9" / "claim.json").write_text(json.dumps(claimed))
    with pytest.raises(Superseded, match="generation 9 has taken over"):
        second.check()


def test_a_checkpoint_is_on_disk_before_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    monkeypatch.setattr("zbv_worker.checkpoints.fence._sync", lambda of: seen.append(set(made_by(of))))
    fence = claim(tmp_path)
    save(fence, 10, kept=1)
    save(fence, 20, kept=1)
    assert seen == [{10}, {10, 20}]
    assert set(made_by(tmp_path)) == {20}
