"""This process: its log, its clock, its parent, and the way out of it.

Imports nothing large: ranks watch their parent before they import torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn, Protocol

PARENT_VARIABLE = "ZBV_PARENT"
"""The parent's process id, for the child: the parent may be gone before the child can ask."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
_ORPHANED = 70


class Clock(Protocol):
    """The time of the host."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def pause(self, seconds: float) -> None:
        """Do nothing for that long."""


class HostClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """See :class:`Clock`."""
        time.sleep(seconds)


def say(text: str) -> None:
    """Write a line to this process's log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a rank's log


def leave(status: int) -> NoReturn:
    """End this process now, after writing what its streams and logs still hold.

    Python's cleanup would wait for a device that hangs.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def end_with_parent() -> None:
    """Have this process killed when its parent ends; call it first. The environment names the parent.

    On Linux the kernel does it, which also reaches stopped processes; elsewhere a thread polls.
    """
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
