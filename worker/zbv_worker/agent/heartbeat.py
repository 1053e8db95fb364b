"""Files that show that the agent is running.

One file is for health checks of containers (``zbv-worker agent --check``). Another, the pulse, is for the
ranks: a service gives the run of a silent agent to others, so ranks end if their agent is stopped or hangs.
Both reflect only the agent, not the service: while the service is away, ranks continue to train. The third is
a lock for other agents.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zbv_worker.errors import InvalidRun, WorkerError
from zbv_worker.host.state_files import PULSE, read_json, write_json

FILE = "agent.json"
STALE_SECONDS = 60.0
"""The agent's cycle takes 30 seconds: up to 20 of waiting for work, 5 for an answer, 5 after none."""
LOCK = "agent.lock"

_PULSE_SECONDS = 0.5
_WIDTH = 24
"""Bytes of a pulse. The size is constant, so that overwriting it needs no space on a full disk."""

logger = logging.getLogger(__name__)


class AgentNotRunning(WorkerError):
    """The agent's file shows no running agent."""


@contextmanager
def alone_in(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory within the block.

    Two agents of a run would replace each other's specification there, and the ranks would wait for a peer
    that nobody starts. The lock ends with the process. If it cannot be taken, for instance on a file system
    without locks, the agent runs without it.

    Raises
    ------
    InvalidRun
        If another agent holds the lock.
    """
    file = -1
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        file = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise InvalidRun(
            f"--state-dir: another agent uses {state_dir}. Give every agent its own directory, also on "
            "a file system that nodes share: --state-dir DIR."
        ) from None
    except OSError as error:
        logger.warning("cannot lock %s: %s", state_dir / LOCK, error)
    try:
        yield
    finally:
        if file != -1:
            os.close(file)


class Heartbeat:
    """Writes the file for health checks, in an agent's state directory."""

    def __init__(self, state_dir: Path, name: str, server: str):
        self._path = state_dir / FILE
        self._document: dict[str, Any] = {"name": name, "server": server, "answered_at": None}

    def write(self, *, answered: bool) -> None:
        """Record that the agent is running; ``answered`` if the service has answered."""
        now = time.time()
        if answered:
            self._document["answered_at"] = now
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {**self._document, "at": now})
        except OSError as error:
            # A full disk must not end a run that may not need it.
            logger.warning("cannot write %s: %s", self._path, error)


class Pulse:
    """Shows a generation's ranks that their agent is running, from a thread.

    Parameters
    ----------
    folder
        The generation's folder.
    patience
        Seconds of silence after which the service gives the run to other agents.
    on_silence
        Called once, from the thread, if the agent finds that it was silent for longer than that; the pulse
        stops then.
    """

    def __init__(self, folder: Path, patience: float, on_silence: Callable[[float], None]):
        self._path = folder / PULSE
        self._patience = patience
        self._on_silence = on_silence
        self._ended = threading.Event()
        self._at = 0.0
        self._thread = threading.Thread(target=self._go_on, name="zbv-pulse", daemon=True)

    def start(self) -> None:
        """Write the file and start the thread."""
        self._at = time.monotonic()
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; idempotent."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _go_on(self) -> None:
        while not self._ended.wait(_PULSE_SECONDS):
            now = time.monotonic()
            silent, self._at = now - self._at, now
            if silent > self._patience:
                self._on_silence(silent)
                return
            self._write()

    def _write(self) -> None:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, f"{self._at:.3f}".ljust(_WIDTH).encode(), 0)
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._path, error)


def check(state_dir: Path, now: float) -> str:
    """Describe the agent of a state directory in a sentence.

    Raises
    ------
    AgentNotRunning
        If it has written nothing for :data:`STALE_SECONDS`, or never.
    """
    path = state_dir / FILE
    found = read_json(path)
    if not (isinstance(found, dict) and {"name", "server", "answered_at", "at"} <= found.keys()):
        raise AgentNotRunning(
            f"found no trace of an agent in {path}. Give the --state-dir that the agent was started with."
        )
    silent = now - found["at"]
    if silent > STALE_SECONDS:
        raise AgentNotRunning(
            f"agent {found['name']} has been silent for {silent:.0f} s; it should report every "
            f"{STALE_SECONDS:g} s. Check its log; restart it if it hangs."
        )
    return f"agent {found['name']} is running; {found['server']} {_answered(found['answered_at'], now)}"


def _answered(at: float | None, now: float) -> str:
    return "has not answered yet" if at is None else f"answered {max(0.0, now - at):.0f} s ago"
