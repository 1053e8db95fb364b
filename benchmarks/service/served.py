"""A service for a benchmark: a real process on a free port, in a temporary folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zbv_service.client import tokens

from benchmarks.findings import BenchmarkError

START_SECONDS = 60.0
STOP_SECONDS = 30.0
COMMAND = (sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())")


class NotStarted(BenchmarkError):
    """The service did not start; the message has its log."""


@dataclass
class Served:
    """A service process.

    Attributes
    ----------
    token
        Its local token; None if it needs no token.
    """

    folder: Path
    options: tuple[str, ...]
    variables: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)
    address: str = field(init=False)

    def start(self) -> None:
        """Start or restart it; raises :class:`NotStarted`."""
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--port", "0", *self.options],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "ZBV_LOG_LEVEL": "warning", **self.variables},
            )
        stdout = self.process.stdout
        for line in stdout or ():
            found = re.search(r"listening on (http://[^/\s]+)", line)
            if found:
                self.address = found[1]
                return
        raise NotStarted(f"the service did not start; its log:\n{(self.folder / 'log').read_text()}")

    @property
    def token(self) -> str | None:
        """The local token, as commands find it."""
        return tokens.find(self.address)

    def new_token(self, *scopes: str) -> str:
        """Another token of this service."""
        flags = [part for scope in scopes for part in ("--scope", scope)]
        command = [*COMMAND, "token", "create", "--name", "another", *flags]
        made = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True)
        return made.stdout.strip()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def memory(self) -> int:
        """Resident bytes of the service's process, without children."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the service's process so far, without children."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _without_our_variables() -> Iterator[None]:
    """Hide the caller's settings and token: they belong to another service, which must not be loaded."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("ZBV_")}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def serving(*options: str, **variables: str) -> Iterator[Served]:
    """Run a service during the block.

    Parameters
    ----------
    options, variables
        Flags of ``zbv-service serve``, and variables of its environment.
    """
    with (
        _without_our_variables(),
        tempfile.TemporaryDirectory(prefix="zbv-bench-", ignore_cleanup_errors=True) as folder,
    ):
        served = Served(Path(folder), options, variables)
        try:
            served.start()
            yield served
        finally:
            if hasattr(served, "process"):
                served.stop()
