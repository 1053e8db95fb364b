"""The agent's side of one generation on this node: start its launcher, follow its ranks, say how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbv_service.client import NodeWork

from zbv_worker.agent.heartbeat import Pulse
from zbv_worker.agent.orphans import PARENT_VARIABLE
from zbv_worker.host.local_ranks import python_command, rank_environment
from zbv_worker.host.search_path import environment_of_ranks
from zbv_worker.host.state_files import OUTCOME, SPEC, failure_file, progress_file, read_json, write_json

_STORY_SECONDS = 2.0
"""For a launcher whose own ranks have failed to say so, when the run is stopped for a failure elsewhere."""
_GRACE_SECONDS = 8.0
"""For ranks that are asked to end, before they are killed."""
_GRACE_AFTER_FAILURE_SECONDS = 0.5
"""The same after a failure elsewhere: a rank that does not end at once hangs, and a retry waits for it."""
_KILL_SECONDS = 8.0
_TAIL_LINES = 12
_MAX_DETAIL = 4000
"""Characters of a failure that the service takes."""


@dataclass(frozen=True)
class GenerationEnd:
    """How it ended: ``succeeded``, ``failed`` or ``stopped``, and the failures as the service takes them."""

    outcome: str
    failures: tuple[dict[str, Any], ...] = ()


class Generation:
    """A launcher process and its ranks; none outlives this process.

    Parameters
    ----------
    server
        Where the ranks fetch their lists.
    address
        Of this node, as the others know it.
    folder
        Of this generation alone: specification, logs, places, failures, results.
    patience
        Seconds after which the service gives up an agent that is silent, and with it these ranks: ranks end
        by themselves a little earlier, and this agent ends them when it finds that it was silent.
    path
        Directories in which ranks look for the model's module.
    allowed_models
        The patterns that the model must match; the ranks check what it really is.

    Attributes
    ----------
    silent
        For how many seconds this agent was silent, when that was too long; None otherwise.
    """

    def __init__(
        self,
        work: NodeWork,
        server: str,
        address: str,
        folder: Path,
        patience: float,
        path: Sequence[Path] = (),
        allowed_models: Sequence[str] = (),
    ):
        self.work = work
        self.silent: float | None = None
        self._folder = folder
        self._patience = patience
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._grace = _GRACE_SECONDS
        folder.mkdir(parents=True, exist_ok=True)
        spec = {"server": server, "address": address, "work": work.document, "patience": patience}
        write_json(folder / SPEC, {**spec, "allowed_models": list(allowed_models)})
        self._pulse = Pulse(folder, patience, self._on_silence)
        self._pulse.start()
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                python_command("zbv_worker.agent.launcher", str(folder)),
                env={
                    **os.environ,
                    **environment_of_ranks(path, os.environ),
                    **self._environment(),
                    PARENT_VARIABLE: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> bool:
        """Carry a stop further when its time has come; returns whether launcher and ranks are gone."""
        if self._launcher.poll() is not None:
            return True
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._launcher.kill()  # and the kernel kills its ranks, also those that hang
        elif self._kill_at is None and self._stop_at is not None and now >= self._stop_at:
            self._kill_at = now + self._grace
            self._launcher.send_signal(signal.SIGTERM)
        return False

    def stop(self, *, failed_elsewhere: bool) -> None:
        """Have launcher and ranks end soon: asked first, then killed, as :meth:`poll` goes on."""
        if self._stop_at is None:
            self._grace = _GRACE_AFTER_FAILURE_SECONDS if failed_elsewhere else _GRACE_SECONDS
            self._stop_at = time.monotonic() + (_STORY_SECONDS if failed_elsewhere else 0.0)

    def kill(self) -> None:
        """End launcher and ranks now."""
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait(timeout=_KILL_SECONDS)
        self._pulse.stop()

    def _on_silence(self, seconds: float) -> None:
        """End the ranks: the service may have given the run to others by now."""
        self.silent = seconds
        self._launcher.kill()  # and the kernel kills its ranks

    def places(self) -> list[dict[str, Any]]:
        """Where this node's ranks are, as far as they said."""
        found = (read_json(progress_file(self._folder, rank)) for rank in self.ranks)
        return [progress for progress in found if isinstance(progress, dict)]

    def end(self) -> GenerationEnd:
        """How it ended; call when it has."""
        status = self._launcher.returncode
        if status == 0:
            return GenerationEnd("succeeded")
        if self.silent is not None:
            return GenerationEnd("failed", (self._silence_failure(self.silent),))
        failures = self._failures(read_json(self._folder / OUTCOME))
        if failures:
            return GenerationEnd("failed", tuple(failures))
        if self._kill_at is not None:
            return GenerationEnd("stopped")
        return GenerationEnd("failed", (self._launch_failure(status),))

    @property
    def folder(self) -> Path:
        """Where everything of it is kept."""
        return self._folder

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.work.node_rank * self.work.ranks_per_node
        return range(first, first + self.work.ranks_per_node)

    @property
    def _log(self) -> Path:
        return self._folder / "launcher.log"

    def _environment(self) -> Mapping[str, str]:
        if self._host not in ("127.0.0.1", "::1", "localhost"):
            return {}
        # All nodes are on this host: gloo must not ask for its name, which may resolve slowly or not at all.
        return {"GLOO_SOCKET_IFNAME": rank_environment(0, 1, 0)["GLOO_SOCKET_IFNAME"]}

    @property
    def _host(self) -> str:
        return self.work.rendezvous.rpartition(":")[0].strip("[]")

    def _failures(self, outcome: Any) -> list[dict[str, Any]]:
        """What the ranks said, and what the launcher saw of those that could not say anything."""
        failures = []
        failed = outcome["failed"] if isinstance(outcome, dict) else {}
        for rank in self.ranks:
            told = read_json(failure_file(self._folder, rank))
            if isinstance(told, dict):
                failures.append({**told, "detail": str(told["detail"]).replace("\0", "")[:_MAX_DETAIL]})
            elif str(rank) in failed:
                failures.append(self._silent_failure(rank, int(failed[str(rank)])))
        return failures

    def _silent_failure(self, rank: int, status: int) -> dict[str, Any]:
        progress = read_json(progress_file(self._folder, rank)) or {}
        step, action = progress.get("step"), progress.get("action")
        where = "it reported no step" if step is None else f"it last reported step {step} at {action or '…'}"
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        detail = (
            f"rank {rank} {how}; {where}. Look at this host's kernel log (out of memory?) and at the rank's "
            f"log in {self._folder / 'logs'}."
        )
        kind = "killed" if status < 0 else "error"
        return {"kind": kind, "rank": rank, "step": step, "action": action, "peer": None, "detail": detail}

    def _silence_failure(self, seconds: float) -> dict[str, Any]:
        detail = (
            f"this agent was stopped, or its host hung, for {seconds:.0f} s; the service gives a run to "
            f"others after {self._patience:g} s. It has ended its ranks."
        )
        return {"kind": "agent-lost", "rank": None, "detail": detail}

    def _launch_failure(self, status: int | None) -> dict[str, Any]:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        detail = f"the ranks could not be launched (status {status}). The launcher's log ends:\n"
        return {
            "kind": "launch",
            "rank": None,
            "detail": (detail + "\n".join(lines)).replace("\0", "")[:_MAX_DETAIL],
        }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
