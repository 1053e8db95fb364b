"""A planning service on this machine, as a child process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from zbv_worker.errors import WorkerError

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

    def __init__(self, folder: Path, port: int, start_timeout: float = 60.0):
        self._folder = folder
        self._port = port
        self._timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> LocalService:
        self._folder.mkdir(parents=True, exist_ok=True)
        database = f"sqlite:///{self._folder / 'zbv.db'}"
        command = [_executable(), "serve", "--port", str(self._port), "--database", database]
        self._log.unlink(missing_ok=True)
        # Readable only by its user, because it contains the sign-in link.
        with os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.address = self._await_address(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait until the service ends or this process is interrupted."""
        while self._process is not None and self._process.poll() is None:
            time.sleep(10 * _POLL_SECONDS)

    def stop(self) -> None:
        """End the service: terminate, then kill."""
        process = self._process
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            process.send_signal(sign)
            try:
                process.wait(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue

    @property
    def _log(self) -> Path:
        return self._folder / "service.log"

    def _await_address(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            found = _LISTENING.search(self._log.read_text(errors="replace"))
            if found is not None:
                return found[1].rstrip("/")
            if process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        tail = "\n".join(self._log.read_text(errors="replace").strip().splitlines()[-12:])
        raise ServiceStartError(
            f"the service did not start within {self._timeout:g} s; its log ends:\n{tail}"
        )


def _executable() -> str:
    beside = Path(sys.executable).with_name("zbv-service")
    found = str(beside) if beside.exists() else shutil.which("zbv-service")
    if found is None:
        raise ServiceStartError("the command zbv-service is not installed. Install zbv[service].")
    return found
