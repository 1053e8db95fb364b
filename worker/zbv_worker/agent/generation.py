"""The agent's side of one generation on this node: its launcher, its ranks, its outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbv_service.client import NodeWork

from zbv_worker.agent.folder_sync import log_end
from zbv_worker.agent.heartbeat import Pulse
from zbv_worker.agent.policy import AgentOptions
from zbv_worker.host.environment import environment_of_ranks
from zbv_worker.host.local_ranks import python_command, rank_environment
from zbv_worker.host.process import PARENT_VARIABLE
from zbv_worker.host.state_files import (
    OUTCOME,
    SPEC,
    failure_file,
    log_files,
    progress_file,
    read_json,
    write_json,
)

_REPORT_SECONDS = 2.0
"""Time for the own ranks to report a failure, when the run is stopped because of a failure elsewhere."""
_GRACE_SECONDS = 8.0
"""Time between asking ranks to end and killing them."""
_GRACE_AFTER_FAILURE_SECONDS = 0.5
"""The same after a failure elsewhere: a rank that does not end at once hangs, and a retry waits for it."""
_KILL_SECONDS = 8.0
_TAIL_LINES = 12
_TAIL_BYTES = 2000
_MAX_DETAIL = 4000
"""The most characters of a failure that the service accepts."""


@dataclass(frozen=True)
class GenerationEnd:
    """The outcome ``succeeded``, ``failed`` or ``stopped``, and the failures in the service's format."""

    outcome: str
    failures: tuple[dict[str, Any], ...] = ()


def failure(kind: str, detail: str) -> dict[str, Any]:
    """A failure of no particular rank, in the service's format."""
    return {"kind": kind, "rank": None, "detail": detail.replace("\0", "")[:_MAX_DETAIL]}


class Generation:
    """A launcher process and its ranks; none outlives this process.

    Parameters
    ----------
    patience
        Seconds after which the service gives up a silent agent and its ranks. Ranks end a little earlier by
        themselves; this agent ends them if it finds that it was silent.

    Attributes
    ----------
    folder
        The folder of this generation: specification, logs, progress, failures, results.
    silent
        For how many seconds this agent was silent, if that was too long; None otherwise.
    """

    def __init__(self, work: NodeWork, options: AgentOptions, patience: float):
        self.work = work
        self.silent: float | None = None
        self.folder = options.state_dir / work.run_id / str(work.generation)
        self._patience = patience
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._grace = _GRACE_SECONDS
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "server": options.server,
            "address": options.address,
            "work": work.document,
            "patience": patience,
            "allowed_models": list(options.allowed_models),
        }
        write_json(self.folder / SPEC, spec)
        self._pulse = Pulse(self.folder, patience, self._on_silence)
        self._pulse.start()
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                python_command("zbv_worker.agent.launcher", str(self.folder)),
                env={
                    **os.environ,
                    **environment_of_ranks(options.path, os.environ),
                    **self._environment(),
                    PARENT_VARIABLE: str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> bool:
        """Continue a requested stop; returns whether the launcher and the ranks have ended."""
        if self._launcher.poll() is not None:
            return True
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._launcher.kill()  # the kernel then kills its ranks, including those that hang
        elif self._kill_at is None and self._stop_at is not None and now >= self._stop_at:
            self._kill_at = now + self._grace
            self._launcher.send_signal(signal.SIGTERM)
        return False

    def stop(self, *, failed_elsewhere: bool) -> None:
        """Ask the launcher and the ranks to end; :meth:`poll` kills them later if necessary."""
        if self._stop_at is None:
            self._grace = _GRACE_AFTER_FAILURE_SECONDS if failed_elsewhere else _GRACE_SECONDS
            self._stop_at = time.monotonic() + (_REPORT_SECONDS if failed_elsewhere else 0.0)

    def kill(self) -> None:
        """Kill the launcher and the ranks now."""
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait(timeout=_KILL_SECONDS)
        self._pulse.stop()

    def _on_silence(self, seconds: float) -> None:
        """Kill the ranks: the service may have given the run to other agents by now."""
        self.silent = seconds
        self._launcher.kill()  # the kernel then kills its ranks

    def progress(self) -> list[dict[str, Any]]:
        """The progress of this node's ranks, as far as they reported it."""
        found = (read_json(progress_file(self.folder, rank)) for rank in self.ranks)
        return [progress for progress in found if isinstance(progress, dict)]

    def end(self) -> GenerationEnd:
        """How the generation ended; call it after :meth:`poll` has returned True."""
        status = self._launcher.returncode
        if status == 0:
            return GenerationEnd("succeeded")
        if self.silent is not None:
            return GenerationEnd("failed", (self._silence_failure(self.silent),))
        failures = self._failures(read_json(self.folder / OUTCOME))
        if failures:
            return GenerationEnd("failed", tuple(failures))
        if self._kill_at is not None:
            return GenerationEnd("stopped")
        return GenerationEnd("failed", (self._launch_failure(status),))

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.work.node_rank * self.work.ranks_per_node
        return range(first, first + self.work.ranks_per_node)

    @property
    def _log(self) -> Path:
        return self.folder / "launcher.log"

    def _environment(self) -> Mapping[str, str]:
        local = rank_environment(0, 1, 0)
        crashes = {"PYTHONFAULTHANDLER": local["PYTHONFAULTHANDLER"]}
        host = self.work.rendezvous.rpartition(":")[0].strip("[]")
        if host not in ("127.0.0.1", "::1", "localhost"):
            return crashes
        # All nodes are on this host: gloo must not look up its name, which may be slow or impossible.
        return crashes | {"GLOO_SOCKET_IFNAME": local["GLOO_SOCKET_IFNAME"]}

    def _failures(self, outcome: Any) -> list[dict[str, Any]]:
        """The failures that ranks reported, or that the launcher saw if a rank could not report."""
        failures: list[dict[str, Any]] = []
        ended: list[dict[str, Any]] = []
        failed = outcome["failed"] if isinstance(outcome, dict) else {}
        for rank in self.ranks:
            reported = read_json(failure_file(self.folder, rank))
            if isinstance(reported, dict):
                detail = str(reported["detail"])
                if reported.pop("is_in_log", False):
                    end = self._end_of_log(rank)
                    detail += f": {end.splitlines()[-1]}{end}" if end else ". Its log is empty."
                failures.append({**reported, "detail": detail.replace("\0", "")[:_MAX_DETAIL]})
            elif str(rank) in failed:
                status = int(failed[str(rank)])
                found = self._silent_failure(rank, status)
                (ended if status == -signal.SIGTERM else failures).append(found)
        # The launcher ends the other ranks so after a failure; they are no cause of it.
        return failures or ended

    def _silent_failure(self, rank: int, status: int) -> dict[str, Any]:
        progress = read_json(progress_file(self.folder, rank)) or {}
        step, action = progress.get("step"), progress.get("action")
        where = "it reported no step" if step is None else f"it last reported step {step} at {action or '…'}"
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        detail = (
            f"rank {rank} {how}; {where}. Check this host's kernel log (out of memory?) and the rank's log "
            f"in {self.folder / 'logs'}."
        ) + self._end_of_log(rank)
        kind = "killed" if status < 0 else "error"
        return {"kind": kind, "rank": rank, "step": step, "action": action, "peer": None, "detail": detail}

    def _end_of_log(self, rank: int) -> str:
        """The last lines of a rank's log, to append to the description of a failure; empty if it has none."""
        files = log_files(self.folder, rank - self.ranks[0])
        text = b"".join(log_end(path, _TAIL_BYTES) for path in files).decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        return "\n".join(["\nIts log ends:", *lines]) if lines else ""

    def _silence_failure(self, seconds: float) -> dict[str, Any]:
        return failure(
            "agent-lost",
            f"this agent was stopped, or its host hung, for {seconds:.0f} s; the service gives a run to "
            f"other agents after {self._patience:g} s. The agent has ended its ranks.",
        )

    def _launch_failure(self, status: int | None) -> dict[str, Any]:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        detail = f"the ranks could not be launched (status {status}). The launcher's log ends:\n"
        return failure("launch", detail + "\n".join(lines))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
