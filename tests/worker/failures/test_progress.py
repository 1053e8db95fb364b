"""A rank's progress, as other threads and readers of its file see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import wait_until
from zbv_solver.plans.orders import Action
from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.failures.liveness import Liveness
from zbv_worker.failures.progress import (
    CurrentProgress,
    Progress,
    ProgressFile,
    attach_progress,
    progress_of_error,
)
from zbv_worker.host.state_files import read_json

WAITING = Instruction(Action.parse("3F0"), None, None, split=True, completes_stage=False, peer=1)


def test_an_error_keeps_the_progress_of_its_cause() -> None:
    cause = TimeoutError()
    attach_progress(cause, Progress(7, "3F0", 1))
    with pytest.raises(ValueError) as found:  # noqa: PT011 - it is bare on purpose
        raise ValueError from cause
    assert progress_of_error(found.value) == Progress(7, "3F0", 1)
    assert progress_of_error(ValueError()) is None


def test_the_progress_closest_to_the_error_is_kept() -> None:
    error = ValueError()
    attach_progress(error, Progress(1, "0F0"))
    attach_progress(error, Progress(2, "0F1"))
    assert progress_of_error(error) == Progress(1, "0F0")


def test_errors_that_cause_each_other_in_a_circle_are_followed_once() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert progress_of_error(first) is None


def test_the_file_follows_the_progress(tmp_path: Path) -> None:
    path, progress, liveness = tmp_path / "progress.json", CurrentProgress(), Liveness(0.01)
    assert progress.read() == Progress()
    file = ProgressFile(path, 0, progress)
    file.write()
    assert read_json(path) == {"rank": 0, "step": None, "action": None}
    liveness.add(file.write)
    progress.now = (7, WAITING)
    wait_until(lambda: read_json(path) == {"rank": 0, "step": 7, "action": "3F0"}, "the file follows")
    liveness.stop()


def test_an_unwritable_file_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ProgressFile(tmp_path / "absent" / "progress.json", 3, CurrentProgress())
    assert file.write()
    assert file.write()
    assert capsys.readouterr().err.count("rank 3: its progress could not be written") == 1
    (tmp_path / "absent").mkdir()
    file.write()
    assert read_json(tmp_path / "absent" / "progress.json") == {"rank": 3, "step": None, "action": None}
