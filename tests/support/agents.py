"""A service and agents, each in its own process, for tests of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbv_service.client import Client, Run
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.search.assemble import make_plan

from examples.demo.local_service import LocalService
from support.forked_ranks import ForkedProcess, fork_module
from support.paths import TESTS
from support.plans import random_plan
from support.processes import DEADLINE as DEADLINE

FACTORY = "support.unhurried_gpt:gpt"
MODEL = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}
ENDLESS = 1_000_000
AGENT_TIMEOUT = 12.0
"""Seconds after which the service considers an agent lost: more than a busy machine withholds from one."""


def a_plan() -> Plan:
    """A valid V plan of two ranks in random order."""
    return make_plan(*random_plan(2, 4, seed=3), method="random")


@dataclass
class AgentProcess:
    """``zbv-worker agent``, forked with torch already imported."""

    name: str
    folder: Path
    process: ForkedProcess

    @property
    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    def results(self, run_id: str) -> Path:
        """Where its ranks wrote their reports."""
        return self.folder / "state" / run_id / "0" / "results"

    def step(self, run_id: str) -> int:
        """The step that its rank reports in its file, which works without the service."""
        (path,) = (self.folder / "state" / run_id / "0").glob("progress-*.json")
        return int(json.loads(path.read_text())["step"] or 0)

    def descendants(self) -> list[int]:
        """The process ids of its launcher and ranks."""
        return [*self._launchers(), *self.ranks()]

    def ranks(self) -> list[int]:
        """The process ids of its ranks: children of its launchers."""
        launchers = self._launchers()
        return [pid for pid, parent in _parents() if parent in launchers]

    def _launchers(self) -> list[int]:
        return [pid for pid, parent in _parents() if parent == self.process.pid]

    def rank(self) -> int:
        """The process id of its one rank."""
        (found,) = self.ranks()
        return found


@dataclass
class Cluster:
    """A service and the agents that were started for it."""

    folder: Path
    address: str
    client: Client
    service: int
    stack: ExitStack
    agents: list[AgentProcess] = field(default_factory=list)

    def start(self, name: str, *more: str, allow: str | None = "support.*") -> AgentProcess:
        """Start an agent for one rank."""
        folder = self.folder / name
        folder.mkdir()
        arguments = ["agent", "--server", self.address, "--name", name, "--slots", "1"]
        arguments += ["--state-dir", str(folder / "state")]
        # An agent that is drained ends its ranks if its run takes longer than a minute.
        arguments += ["--drain-seconds", str(DEADLINE)]
        arguments += ["--allow-checkpoint-dir", tempfile.gettempdir(), *more]
        arguments += [] if allow is None else ["--allow-model", allow]
        process = fork_module("support.forking_worker", arguments, os.environ, folder / "agent.log")
        agent = AgentProcess(name, folder, process)
        self.stack.callback(_end, process)
        self.agents.append(agent)
        return agent

    def names(self) -> set[str]:
        return {str(found["name"]) for found in self.client.agents()}

    def submit(
        self, *, steps: int = ENDLESS, nodes: int = 2, model: Mapping[str, Any] | None = None, **options: Any
    ) -> Run:
        """Submit a run of :func:`a_plan`; ``model`` has additional arguments of the model."""
        plan = a_plan()
        self.client.import_plan(plan_json(plan))
        what = {"factory": FACTORY, "arguments": MODEL | dict(model or {})}
        chosen = {"threads": 1, "timeout": DEADLINE, "retries": 0, **options}
        return self.client.submit_run(plan.plan_id, what, nodes=nodes, steps=steps, options=chosen)

    def until_step(self, run: Run, step: int) -> None:
        """Wait until every rank is past a step."""

        def holds() -> bool:
            found = self.client.run(run.id)
            assert not found.is_finished, found.document
            ranks = [rank for node in found.document["members"] for rank in node["ranks"]]
            return len(ranks) == 2 and all((rank["step"] or 0) > step for rank in ranks)

        until(holds, self.story)

    @contextmanager
    def service_away(self) -> Iterator[None]:
        """Stop the service, for longer than its agents' timeout."""
        os.kill(self.service, signal.SIGSTOP)
        until = time.monotonic() + 1.2 * AGENT_TIMEOUT
        try:
            yield
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            os.kill(self.service, signal.SIGCONT)

    def story(self) -> str:
        """All agents' logs, for a test that fails."""
        return "\n".join(f"--- {agent.name}\n{agent.log}" for agent in self.agents)


@contextmanager
def cluster(folder: Path, **settings: float) -> Iterator[Cluster]:
    """A service with other settings than the default, above all a short timeout of agents."""
    chosen = {"agent_heartbeat_seconds": 1.0, "agent_timeout_seconds": AGENT_TIMEOUT, **settings}
    changed = {f"ZBV_{name.upper()}": str(value) for name, value in chosen.items()}
    # For the ranks, so that they find their model.
    changed["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        with ExitStack() as stack:
            service = stack.enter_context(LocalService(folder / "service", port=0))
            client = Client(service.address)
            stack.callback(client.close)
            yield Cluster(folder, service.address, client, _service(), stack)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def until(holds: Callable[[], object], story: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"did not happen in time\n{story()}"
        time.sleep(0.5)  # a request costs the service as much CPU time as a step costs a rank


def read_losses(folder: Path) -> list[float] | None:
    """The losses of the rank with the last stage; None for another rank."""
    (path,) = folder.glob("rank-*.json")
    losses = [step["loss"] for step in json.loads(path.read_text())["steps"]]
    return None if losses[0] is None else losses


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), int(fields[1])


def _service() -> int:
    """The process id of the service that this process started last."""
    mine = (pid for pid, parent in _parents() if parent == os.getpid())
    return max(pid for pid in mine if "zbv-service" in _command(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _end(process: ForkedProcess) -> None:
    for sign in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue
