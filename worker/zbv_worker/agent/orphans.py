"""A process that ends with the one that started it, however that ends; and a rank that ends when its agent is
stopped.

Asking the kernel (Linux) also reaches a process that is stopped; elsewhere a thread looks.
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
"""Names the parent's process id to the child: by the time it looks, the parent may be gone."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
_ORPHANED = 70
FORSAKEN = 71
"""Status of a rank whose agent was silent for too long."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends. Call it first; the parent's id is in the environment."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), name="zbv-orphan-watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def end_with_pulse(folder: Path, patience: float, say: Callable[[float], None]) -> None:
    """Have this process end when its agent has had no pulse for so long.

    Parameters
    ----------
    folder
        Of the generation.
    patience
        Seconds.
    say
        Called before the end, with the seconds of silence.
    """

    def watch() -> None:
        while (silent := silence(folder)) <= patience:
            time.sleep(min(_POLL_SECONDS, patience / 4))
        try:
            say(silent)
        finally:
            os._exit(FORSAKEN)

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
