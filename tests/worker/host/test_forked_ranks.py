"""To its test, a forked rank equals a started one: module, environment, log, status, signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.forked_ranks import fork_process
from zbv_worker.host.local_ranks import LaunchError, LocalRanks, python_command

SHOW = (
    "import os, sys, torch; print(sys.argv[1:], os.environ['RANK'], os.environ['OWN'], __name__, "
    "torch.get_num_threads())"
)


def test_a_forked_rank_runs_a_module_with_its_arguments_and_environment(tmp_path: Path) -> None:
    command = python_command("timeit", "-n1", "-r1", SHOW)
    with LocalRanks([command] * 2, tmp_path, {"OWN": "yes"}) as ranks:
        ranks.wait(timeout=240)
        for rank in range(2):
            shown = ranks.log(rank).splitlines()[0]
            assert shown == f"['-n1', '-r1', {SHOW!r}] {rank} yes __main__ 1"


def test_a_forked_ranks_status_and_last_output_are_reported(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("x")
    command = python_command("json.tool", str(tmp_path / "broken"))
    with (
        LocalRanks([command], tmp_path) as ranks,
        pytest.raises(LaunchError, match=r"rank 0 ended with status 1\.\n  rank 0: Expecting value: line 1"),
    ):
        ranks.wait(timeout=240)


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


def test_other_commands_start_as_usual_processes(tmp_path: Path) -> None:
    process = fork_process(["sh", "-c", "exit 3"], os.environ, tmp_path / "log")
    while process.poll() is None:
        time.sleep(0.01)
    assert process.returncode == 3
