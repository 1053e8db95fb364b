"""``zbv-worker``, which forks its child processes: ``python -m support.forking_worker ARGUMENTS``.

An agent forks its launchers, which fork their ranks. The tree of processes is the usual one, but no process
imports torch if :mod:`support.fork_server` has forked the agent. A measurement forks its ranks. With
``torchrun`` as the first argument, it is a launcher itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from zbv_worker.agent import generation
from zbv_worker.commands.cli import main
from zbv_worker.host import local_ranks

from support.fork_server import run_program

_POLL_SECONDS = 0.02
_FIRST_DESCRIPTOR, _LAST_DESCRIPTOR = 3, 1024


class ForkedPopen:
    """What agents and torch elastic use of :class:`subprocess.Popen`, for ``[python -m] MODULE``."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | int | None,
        *,
        stdin: int = subprocess.DEVNULL,
        start_new_session: bool = False,
    ):
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                if start_new_session:
                    os.setsid()
                _redirect(stdout, stderr)
                at = args.index("-m") + 1 if "-m" in args else 0
                status = run_program(args[at].replace("-", "_"), args[at + 1 :], env)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with self._waiting:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it: as Popen, whose place this takes
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status, once it has ended."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the fork", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _redirect(stdout: IO[Any] | None, stderr: IO[Any] | int | None) -> None:
    """Redirect output, and drop what a new program would not inherit: signal handlers and open files."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if stdout is not None:
        os.dup2(stdout.fileno(), 1)
    if stderr is not None:
        os.dup2(1 if isinstance(stderr, int) else stderr.fileno(), 2)  # STDOUT is an int
    os.closerange(_FIRST_DESCRIPTOR, _LAST_DESCRIPTOR)


def fork_children() -> None:
    """Let agents, torch elastic and measurements fork, from now on."""
    forking = SimpleNamespace(Popen=ForkedPopen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    for module in (generation, local_ranks):
        module.subprocess = forking  # type: ignore[attr-defined]
    subprocess_handler.Popen = ForkedPopen  # type: ignore[attr-defined,assignment]


if __name__ == "__main__":
    fork_children()
    sys.exit(torchrun.main(sys.argv[2:]) if sys.argv[1] == "torchrun" else main(sys.argv[1:]))
