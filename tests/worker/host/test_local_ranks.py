"""A rank that crashes or is killed is reported, whether it was forked or started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command


def test_a_crash_in_native_code_is_reported_with_the_python_code_that_led_there(tmp_path: Path) -> None:
    command = python_command("timeit", "-n1", "-r1", "import ctypes; ctypes.string_at(0)")
    with LocalRanks([command], tmp_path) as ranks, pytest.raises(LaunchError) as raised:
        ranks.wait(timeout=240)
    assert "rank 0 ended with status -11" in str(raised.value)
    assert "Fatal Python error: Segmentation fault" in str(raised.value)
    assert "in string_at" in str(raised.value)


def test_a_forked_rank_can_be_killed_and_does_not_outlive_its_block(tmp_path: Path) -> None:
    command = python_command("timeit", "-n1", "-r1", "import time; time.sleep(60)")
    with LocalRanks([command] * 2, tmp_path) as ranks:
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match="rank 1 ended with status -9"):
            ranks.wait(timeout=240)
        os.kill(ranks.processes[0].pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(ranks.processes[0].pid, 0)
