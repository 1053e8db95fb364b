"""A process that ends with the one that started it, however that ends.

Asking the kernel (Linux) also reaches a process that is stopped; elsewhere a thread looks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

PARENT_VARIABLE = "ZBV_PARENT"
"""Names the parent's process id to the child: by the time it looks, the parent may be gone."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
_ORPHANED = 70


def end_with_parent() -> None:
    """Have this process killed when its parent ends. Call it first; the parent's id is in the environment."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), name="zbv-orphan-watch", daemon=True).start()
    if os.getppid() != parent:
        os._exit(_ORPHANED)


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
