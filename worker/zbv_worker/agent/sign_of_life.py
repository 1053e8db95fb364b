"""How others on the node see that the agent is at work: a file that it writes anew as it goes round.

For health checks of containers (``zbv-worker agent --check``). It says that the agent is alive, and not that
the service is: an agent that waits for its service is healthy, and its ranks may be training.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from zbv_worker.errors import WorkerError
from zbv_worker.state_files import read_json, write_json

FILE = "agent.json"
STALE_SECONDS = 60.0
"""An agent goes round in 30 seconds: it waits up to 20 for work, 5 for the answer, 5 more after none."""

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
