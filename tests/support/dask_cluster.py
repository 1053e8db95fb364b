"""A real Dask cluster on this machine: a scheduler and workers, as processes that a test may kill."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from zbv_worker.host.local_ranks import free_port

from support.forked_ranks import SERVICES, ForkedProcess, fork_module
from support.processes import DEADLINE, wait_for_line

SCHEDULER, WORKER = "distributed.cli.dask_scheduler", "distributed.cli.dask_worker"
MODULES = (*SERVICES, SCHEDULER, WORKER, "zbv_service.searches.executors.cluster.executor")
"""What services with such a cluster, schedulers and workers import: the same process forks all of them."""


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

    def start_scheduler(self) -> ForkedProcess:
        """Start a scheduler on a free port; later schedulers use the same port."""
        port = self.address.rpartition(":")[2] or str(free_port())
        address = ("--host", "127.0.0.1", "--port", port)
        process, log = self._start(SCHEDULER, *address, "--no-dashboard", "--no-show")
        self.address = wait_for_line(process, log, r"Scheduler at:\s+(tcp://\S+)")
        return process

    def start_worker(self) -> ForkedProcess:
        """Start a worker for one search at a time, without waiting for it."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", str(DEADLINE))
        return self._start(WORKER, self.address, *options, "--local-directory", str(self._folder))[0]

    def close(self) -> None:
        """Kill everything."""
        self._stack.close()

    def _start(self, module: str, *arguments: str) -> tuple[ForkedProcess, Path]:
        self._count += 1
        log = self._folder / f"{module}-{self._count}.log"
        process = fork_module(module, arguments, self._environment, log, MODULES)
        self._stack.callback(process.wait, DEADLINE)
        self._stack.callback(process.kill)
        return process, log
