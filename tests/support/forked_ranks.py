"""Forks ranks and services from a process that has imported their modules.

In a new interpreter, a rank spends seconds of CPU time on importing torch, and a service on its modules.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from zbv_worker.host.local_ranks import Process, rank_environment, start_process

from support.paths import TESTS

RANKS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # torch imports it when it makes the first optimizer
    "zbv_worker.commands.cli",
    "zbv_worker.models.gpt",
    "zbv_worker.measure.rehearse.rehearse",
    "zbv_worker.pipeline.pipeline",
    "zbv_worker.run.run",
)
SERVICES = ("zbv_service.commands.serving", "support.patient_searches")
_START_SECONDS = 240.0
_POLL_SECONDS = 0.02


def fork_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Like ``start_process``, but fork for ``[env -u NAME] python -m MODULE``."""
    if tuple(command[:2]) == ("env", "-u"):
        environment = {name: value for name, value in environment.items() if name != command[2]}
        command = command[3:]
    if tuple(command[:2]) != (sys.executable, "-m"):
        return start_process(command, environment, log)
    return fork_module(command[2], command[3:], environment, log)


def fork_module(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    modules: tuple[str, ...] = RANKS,
) -> ForkedProcess:
    """Run ``python -m MODULE`` in a fork of the process that has imported ``modules``."""
    log.write_bytes(b"")  # exists from the start, even before the process opens it
    order = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "folder": os.getcwd(),
        "log": str(log.absolute()),
    }
    return server(modules).start(order)


class ForkedProcess:
    """A process that the server forked."""

    def __init__(self, server: ForkServer, number: int):
        self._server = server
        self._number = number
        self.pid = server.pid_of(number)

    @property
    def returncode(self) -> int | None:
        """The exit status, or None if it is not known yet."""
        return self._server.statuses.get(self._number)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        self._server.read(timeout=0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Signal the process unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the server's message is on its way
                os.kill(self.pid, sig)

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the fork", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client of :mod:`support.fork_server`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.statuses: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._numbers = count()
        self._received = b""
        self._socket, theirs = socket.socketpair()
        search_path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        # OpenMP and gloo read their variables when torch is imported.
        environment = {**os.environ, **rank_environment(0, 1, 0), "PYTHONPATH": search_path}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def start(self, order: dict[str, Any]) -> ForkedProcess:
        """Fork a process."""
        number = next(self._numbers)
        self._socket.sendall(json.dumps({"id": number, **order}).encode() + b"\n")
        return ForkedProcess(self, number)

    def pid_of(self, number: int) -> int:
        """The process id of a requested process."""
        while number not in self._pids:
            self.read(timeout=_START_SECONDS)
        return self._pids[number]

    def read(self, timeout: float) -> None:
        """Read the messages of the server; wait for one if the timeout is above 0."""
        self._socket.settimeout(timeout)
        try:
            received = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not received:
            raise RuntimeError("the fork server ended; its error is above")
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            said = json.loads(line)
            known = self._pids if "pid" in said else self.statuses
            known[said["id"]] = said["pid" if "pid" in said else "status"]

    @property
    def running(self) -> set[int]:
        """The process ids of the forks that have not ended."""
        self.read(timeout=0)
        return {pid for number, pid in self._pids.items() if number not in self.statuses}

    def stop(self) -> None:
        """End the server and all its processes."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=10)


@cache
def server(modules: tuple[str, ...] = RANKS) -> ForkServer:
    """The server of this test process that has imported these modules."""
    started = ForkServer(modules)
    atexit.register(started.stop)
    return started
