"""A rank's progress, as other threads and readers of its file see it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from zbv_solver.plans.orders import Action
from zbv_worker.execution.progress import (
    CurrentProgress,
    Progress,
    ProgressWriter,
    attach_progress,
    progress_of_error,
)
from zbv_worker.execution.rank_plan import Instruction
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
    path, progress = tmp_path / "progress.json", CurrentProgress()
    assert progress.read() == Progress()
    with ProgressWriter(str(path), 0, progress, seconds=0.01):
        progress.now = (7, WAITING)
        deadline = time.monotonic() + 30
        while read_json(path) != {"rank": 0, "step": 7, "action": "3F0"} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_json(path) == {"rank": 0, "step": 7, "action": "3F0"}


def test_the_file_has_the_last_action_even_after_a_short_run(tmp_path: Path) -> None:
    path, progress = tmp_path / "progress.json", CurrentProgress()
    with ProgressWriter(str(path), 3, progress, seconds=60):
        assert read_json(path) == {"rank": 3, "step": None, "action": None}
        progress.now = (7, WAITING)
    assert read_json(path) == {"rank": 3, "step": 7, "action": "3F0"}
