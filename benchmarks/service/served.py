"""A service for a benchmark, a real process on a free port in a temporary folder; and work for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbv_service.client import tokens
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan

from benchmarks.findings import BenchmarkError

START_SECONDS = 60.0
STOP_SECONDS = 30.0
COMMAND = (sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())")

SMALL: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "costs": {"forward": 1000, "backward_input": 1000, "backward_weight": 1000},
}
"""A problem that is planned faster than a process starts."""

LONG: dict[str, Any] = {
    "pp_degree": 8,
    "microbatches": 64,
    "costs": {
        "forward": [1000 + 37 * (s % 5) for s in range(16)],
        "backward_input": 1100,
        "backward_weight": 700,
        "p2p": 50,
    },
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 20},
}
"""A problem with an endless search."""

MANY_LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["deepseek-v3"]},
    "cluster": {"nodes": 5040, "gpus_per_node": 8, "device": "h100"},
    "global_batch": 55_440,
    "sequence_length": 4096,
}
"""A request of 300 bytes with 1,468,832 layouts."""


@dataclass
class Served:
    """A service process."""

    folder: Path
    options: tuple[str, ...]
    variables: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)
    address: str = field(init=False)

    def start(self) -> None:
        """Start or restart it; raises :class:`BenchmarkError` with the log."""
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
        raise BenchmarkError(f"the service did not start; its log:\n{(self.folder / 'log').read_text()}")

    @property
    def token(self) -> str | None:
        """The local token, as commands find it; None if the service needs no token."""
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
        self._wait()

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait(self) -> None:
        self.process.wait(STOP_SECONDS)
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


def plan_to_serve(pp_degree: int = 32, microbatches: int = 64) -> dict[str, Any]:
    """A plan of many ranks, as a large run fetches it at its start."""
    costs = {"forward": 1000, "backward_input": 1000, "backward_weight": 1000}
    problem = parse_problem({"pp_degree": pp_degree, "microbatches": microbatches, "costs": costs})
    return plan_json(baseline_plan("1f1b", problem))
