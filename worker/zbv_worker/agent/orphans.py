"""Processes that end together with their parent, and ranks that end when their agent stops.

On Linux the kernel does it, which also reaches stopped processes; elsewhere a thread polls.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zbv_worker.agent.heartbeat import silence

PARENT_VARIABLE = "ZBV_PARENT"
"""The parent's process id, for the child: the parent may be gone before the child can ask."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
_ORPHANED = 70
ABANDONED = 71
"""Exit status of a rank whose agent was silent for too long."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends; call it first. The environment names the parent."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), name="zbv-orphan-watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def end_with_pulse(folder: Path, patience: float, report: Callable[[float], None]) -> None:
    """End this process when its agent has had no pulse for ``patience`` seconds.

    Parameters
    ----------
    folder
        The generation's folder.
    report
        Called before the end, with the seconds of silence.
    """

    def watch() -> None:
        while (silent := silence(folder)) <= patience:
            time.sleep(min(_POLL_SECONDS, patience / 4))
        try:
            report(silent)
        finally:
            os._exit(ABANDONED)

    threading.Thread(target=watch, name="zbv-pulse-watch", daemon=True).start()


def _ask_kernel() -> bool:
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return bool(prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(_ORPHANED)
