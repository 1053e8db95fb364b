"""How others on the node see that the agent is at work: by files that it renews.

One file is for health checks of containers (``zbv-worker agent --check``). The other, the pulse, is for the
ranks: a service gives the run of a silent agent to others, so ranks end when their agent is stopped or hangs.
Both say that the agent is at work, and not that the service is: while the service is away, ranks train on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbv_worker.errors import WorkerError
from zbv_worker.host.state_files import PULSE, read_json, write_json

FILE = "agent.json"
STALE_SECONDS = 60.0
"""An agent goes round in 30 seconds: it waits up to 20 for work, 5 for the answer, 5 more after none."""

_PULSE_SECONDS = 0.5
_WIDTH = 24
"""Bytes of a pulse, always the same: it is overwritten in place, which needs no room on a full disk."""

logger = logging.getLogger(__name__)


class NoSignOfLife(WorkerError):
    """The agent is not at work, as far as its file says."""


class SignOfLife:
    """Writes the file in an agent's state directory."""

    def __init__(self, state_dir: Path, name: str, server: str):
        self._path = state_dir / FILE
        self._document: dict[str, Any] = {"name": name, "server": server, "answered_at": None}

    def give(self, *, answered: bool) -> None:
        """The agent has gone round; ``answered`` when the service was there."""
        now = time.time()
        if answered:
            self._document["answered_at"] = now
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {**self._document, "at": now})
        except OSError as error:
            # A full disk is no reason to end a run that may not need it.
            logger.warning("cannot write %s: %s", self._path, error)


class Pulse:
    """Says to a generation's ranks that their agent is at work, from a thread.

    Parameters
    ----------
    folder
        Of the generation.
    patience
        Seconds after which ranks hold a silent agent for stopped, and the service gives its run to others.
    on_silence
        Called, once and from the thread, when the agent finds that it was silent for longer than that. There
        is no pulse afterwards.
    """

    def __init__(self, folder: Path, patience: float, on_silence: Callable[[float], None]):
        self._path = folder / PULSE
        self._patience = patience
        self._on_silence = on_silence
        self._ended = threading.Event()
        self._at = 0.0
        self._thread = threading.Thread(target=self._go_on, name="zbv-pulse", daemon=True)

    def start(self) -> None:
        """Begin; the file is there afterwards."""
        self._at = time.monotonic()
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """End; a second time nothing happens."""
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


def silence(folder: Path) -> float:
    """For how many seconds a generation's agent has had no pulse; 0 when there is none to read."""
    try:
        return max(0.0, time.monotonic() - float((folder / PULSE).read_text()))
    except (OSError, ValueError):
        return 0.0


def check(state_dir: Path, now: float) -> str:
    """How the agent of a state directory is, in a sentence.

    Raises
    ------
    NoSignOfLife
        When it has given none for :data:`STALE_SECONDS`, or never.
    """
    path = state_dir / FILE
    found = read_json(path)
    if not (isinstance(found, dict) and {"name", "server", "answered_at", "at"} <= found.keys()):
        raise NoSignOfLife(
            f"found no sign of an agent in {path}. Give the --state-dir that it was started with."
        )
    silent = now - found["at"]
    if silent > STALE_SECONDS:
        raise NoSignOfLife(
            f"agent {found['name']} has given no sign of life for {silent:.0f} s, and should every "
            f"{STALE_SECONDS:g} s. Look at its log; start it again if it hangs."
        )
    return f"agent {found['name']} is at work; {found['server']} {_answered(found['answered_at'], now)}"


def _answered(at: float | None, now: float) -> str:
    return "has not answered yet" if at is None else f"answered {max(0.0, now - at):.0f} s ago"
