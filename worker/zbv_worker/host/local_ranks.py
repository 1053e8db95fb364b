"""Starts ranks as local processes with torchrun's environment variables, watches them, and ends them.

For profiling, rehearsals, the demonstration and tests on one machine. No rank outlives the ``with`` block.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zbv_worker.errors import WorkerError

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0
_TAIL_LINES = 30
_PORTS = range(10_000, 32_768)
_PORT_ATTEMPTS = 20


class LaunchError(WorkerError):
    """A rank ended with an error, or the ranks did not end in time.

    Attributes
    ----------
    status
        The rank's exit status; None after a timeout.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def free_port(address: str = "127.0.0.1", wanted: int | None = None) -> int:
    """A free TCP port of this host: the wanted one if it is free, else any.

    Most systems choose the ports of connections above ``_PORTS``. A port from there could be taken before
    the process for which it is meant listens.
    """
    chosen = [random.SystemRandom().choice(_PORTS) for _ in range(_PORT_ATTEMPTS)]
    for port in (*([] if wanted is None else [wanted]), *chosen, 0):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no free TCP port on this host.")


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables for a rank, and one compute thread."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # A crash in native code says where Python was.
        "PYTHONFAULTHANDLER": "1",
        # Looking up the host's name is slow or impossible on some machines; ranks of one host need no name.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
    }


def python_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that is used."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """The exit status as of the last poll; negative for a signal."""

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Signal the process unless it has ended."""


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process with exactly this environment and its output in a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def stop_processes(processes: Iterable[Process], grace: float = _GRACE_SECONDS) -> None:
    """End processes: terminate, then kill those that still run after ``grace`` seconds."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(sign)
        deadline = time.monotonic() + grace
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def tail(text: str) -> list[str]:
    """The last lines of a log."""
    return text.strip().splitlines()[-_TAIL_LINES:]


class LocalRanks:
    """The processes of one pipeline on this machine.

    Parameters
    ----------
    commands
        One per rank.
    log_dir
        Folder of the ranks' output, ``rank-{rank}.log``.
    environment
        Additional variables for every rank.

    Attributes
    ----------
    processes
        By rank, once the block has begun.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], log_dir: Path, environment: Mapping[str, str] | None = None
    ):
        self._commands = commands
        self._log_dir = log_dir
        self._environment = dict(environment or {})
        self.processes: list[Process] = []

    def __enter__(self) -> LocalRanks:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        port = free_port()
        try:
            for rank, command in enumerate(self._commands):
                added = {**rank_environment(rank, len(self._commands), port), **self._environment}
                self.processes.append(start_process(command, {**os.environ, **added}, self._log_path(rank)))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, rank: int) -> str:
        """A rank's output."""
        return self._log_path(rank).read_text(errors="replace")

    def wait(self, timeout: float, on_poll: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have ended successfully.

        Raises
        ------
        LaunchError
            If a rank ended with an error (includes the end of its log), or after the timeout.
        """
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes):
            if any(process.returncode for process in self.processes):
                break
            if time.monotonic() > deadline:
                waiting = [rank for rank, process in enumerate(self.processes) if process.returncode is None]
                raise LaunchError(
                    f"ranks {waiting} did not end within {timeout:g} s.\n{self._tail(waiting[0])}"
                )
            if on_poll is not None:
                on_poll()
            time.sleep(_POLL_SECONDS)
        self._raise_failure()

    def stop(self) -> None:
        """End every rank."""
        stop_processes(self.processes)

    def _raise_failure(self) -> None:
        failed = next((rank for rank, process in enumerate(self.processes) if process.returncode), None)
        if failed is not None:
            code = self.processes[failed].returncode
            raise LaunchError(f"rank {failed} ended with status {code}.\n{self._tail(failed)}", code)

    def _tail(self, rank: int) -> str:
        return "\n".join(f"  rank {rank}: {line}" for line in tail(self.log(rank)))

    def _log_path(self, rank: int) -> Path:
        return self._log_dir / f"rank-{rank}.log"


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in ("lo", "lo0") if name in names), "lo")
