"""Runs a user's script as one rank under an agent, in the rank's own process.

The script has torchrun's environment, and variables from which :mod:`zbv_worker.pipeline.agent_run` finds the
run's plan, and the folder for reports.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from zbv_worker.errors import WorkerError, describe_error, status_of
from zbv_worker.failures.progress import Progress, failure_of
from zbv_worker.host.cores import threads_per_rank
from zbv_worker.host.process import say
from zbv_worker.host.script_environment import script_environment
from zbv_worker.host.state_files import failure_file, progress_file, write_json

_THREADS = "OMP_NUM_THREADS"
_WRONG_INPUT = 2


def run_script(spec: dict[str, Any], folder: Path) -> int:
    """Run the script of an agent's work; returns the exit status.

    If it fails, the reason is in the rank's log and in its file for the agent. Exit status 2, which argparse
    gives for wrong arguments, ends the run without a retry.
    """
    work, rank = spec["work"], int(os.environ["RANK"])
    path, arguments = work["script"]["path"], work["script"]["arguments"]
    os.environ.update(script_environment(spec["server"], work["plan_id"], folder))
    _share_cores(work["options"]["threads"])
    # Shows the agent that the script runs; a Pipeline replaces it with its own progress.
    write_json(progress_file(folder, rank), {"rank": rank, "step": None, "action": None})
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    name = Path(path).name
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = _status(end)
        if status:
            kind = "invalid" if status == _WRONG_INPUT else "error"
            detail = f"rank {rank}: {name} ended with exit status {status}. Its log may say why."
            _record(folder, {"kind": kind, "rank": rank, "detail": detail})
        return status
    except Exception as error:
        traceback.print_exception(error)
        detail = f"rank {rank}: {name}: {describe_error(error)}. Its log has the traceback."
        if isinstance(error, WorkerError):
            detail = str(error)  # names the rank, where that matters
        _record(folder, failure_of(rank, error, detail, Progress()))
        return status_of(error)
    return 0


def _share_cores(threads: int | None) -> None:
    """Set the compute threads, before torch is imported; by default the rank's share of the host's cores."""
    if threads is not None:
        os.environ[_THREADS] = str(threads)
    elif _THREADS not in os.environ:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.environ[_THREADS] = str(threads_per_rank(ranks, ranks))


def _status(end: SystemExit) -> int:
    """The exit status that Python gives a process that ends so."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    say(str(end.code))
    return 1


def _record(folder: Path, failure: dict[str, Any]) -> None:
    write_json(failure_file(folder, failure["rank"]), failure)
