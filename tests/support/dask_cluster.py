"""A real Dask cluster on this machine: a scheduler and workers, as processes that a test may kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from support.processes import DEADLINE, wait_for_line


class DaskCluster:
    """Starts schedulers and workers, and kills those that still run at the end.

    Parameters
    ----------
    environment
        Environment of the processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self._folder = folder
        self._environment = environment
        self._stack = ExitStack()
        self._count = 0
        self.address = ""

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """Start a scheduler on a free port; later schedulers use the same port."""
        port = self.address.rpartition(":")[2] or "0"
        address = ("--host", "127.0.0.1", "--port", port)
        process, log = self._start("dask_scheduler", *address, "--no-dashboard", "--no-show")
        self.address = wait_for_line(process, log, r"Scheduler at:\s+(tcp://\S+)")
        return process

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker for one search at a time, without waiting for it."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", str(DEADLINE))
        return self._start("dask_worker", self.address, *options)[0]

    def close(self) -> None:
        """Kill everything."""
        self._stack.close()

    def _start(self, module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        self._count += 1
        path = self._folder / f"{module}-{self._count}.log"
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        with path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, stdout=log, stderr=log, env=self._environment
            )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process, path
