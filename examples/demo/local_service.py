"""A planning service on this machine, as a child process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

from zbv_worker.errors import WorkerError
from zbv_worker.host.local_ranks import start_process, stop_processes, tail

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_LISTENING = re.compile(r"listening on (http://\S+)")


class ServiceStartError(WorkerError):
    """The service did not start."""


def port_or_free(port: int) -> int:
    """The port if it is free, else 0, which means any free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


class LocalService:
    """``zbv-service serve`` on the loopback interface, with its state in a folder.

    Parameters
    ----------
    folder
        Folder of ``zbv.db`` and ``service.log``.
    port
        0 for any free port.
    """

    def __init__(self, folder: Path, port: int, start_timeout: float = 240.0):
        self.database = f"sqlite:///{folder / 'zbv.db'}"
        self._folder = folder
        self._port = port
        self._timeout = start_timeout
        self.address = ""

    def __enter__(self) -> LocalService:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [_executable(), "serve", "--port", str(self._port), "--database", self.database]
        log = self._folder / "service.log"
        log.unlink(missing_ok=True)
        log.touch(mode=0o600)  # it will contain the sign-in link
        self._process = start_process(command, os.environ, log)
        try:
            self.address = self._await_address(log)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait until the service ends or this process is interrupted."""
        self._process.wait()

    def stop(self) -> None:
        """End the service: terminate, then kill."""
        stop_processes([self._process], _GRACE_SECONDS)

    def _await_address(self, log: Path) -> str:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            found = _LISTENING.search(log.read_text(errors="replace"))
            if found is not None:
                return found[1].rstrip("/")
            if self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        end = "\n".join(tail(log.read_text(errors="replace")))
        raise ServiceStartError(f"the service did not start within {self._timeout:g} s; its log ends:\n{end}")


def _executable() -> str:
    beside = Path(sys.executable).with_name("zbv-service")
    found = str(beside) if beside.exists() else shutil.which("zbv-service")
    if found is None:
        raise ServiceStartError("the command zbv-service is not installed. Install zbv[service].")
    return found
