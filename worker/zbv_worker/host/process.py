"""This process: its log, clock and parent, the way out of it, its garbage, and its share of the host's cores
and memory.

Imports nothing large: ranks watch their parent before they import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
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


_FULL_EVERY = 100
"""Steps between collections of the objects that have survived some; they grow with the report."""


class GarbageCollection:
    """Collects between steps, for the duration of a ``with`` block; afterwards everything is as before.

    The automatic collection runs when enough objects were created, wherever the program is, and a full one
    visits every object of torch. A rank that stops for it within a step delays every rank that needs its next
    tensor. So it is off during training. After the first step, everything that exists (modules, code, the
    plan) is excluded from collections; after every step the youngest objects are collected, and now and then
    all others.

    It concerns the whole process. If the automatic collection is off already, nothing changes.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._is_frozen = False
        self._steps = 0

    def __enter__(self) -> GarbageCollection:
        self._is_ours = gc.isenabled()
        if self._is_ours:
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_frozen:
            gc.unfreeze()
        if self._is_ours:
            gc.enable()

    def step_done(self) -> None:
        """Call between steps."""
        if not self._is_ours:
            return
        self._steps += 1
        if self._steps == 1:
            gc.collect()
            if gc.get_freeze_count() == 0:  # otherwise unfreezing would undo someone else's freeze
                gc.freeze()
                self._is_frozen = True
        elif self._steps % _FULL_EVERY == 0:
            gc.collect()
        else:
            gc.collect(1)


_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD.
_MALLOPT = ((-3, 1 << 30), (-1, 1 << 30), (-2, 64 << 20))


def usable_cores() -> list[int]:
    """The CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_per_rank(ranks_on_host: int, ranks_in_container: int) -> int:
    """Compute threads that a rank can use without competing with others for cores; at least 1.

    Parameters
    ----------
    ranks_on_host
        All ranks that share the host's cores, including those of other agents and containers.
    ranks_in_container
        The ranks that share the CPU time of this control group.
    """
    shares = [len(usable_cores()) / ranks_on_host]
    with contextlib.suppress(OSError, ValueError):
        quota, _, period = _CPU_QUOTA.read_text().partition(" ")
        # "max" is not a number and means no limit
        shares.append(int(quota) / int(period) / ranks_in_container)
    return max(1, int(min(shares)))


def pin_to_core(local_rank: int) -> None:
    """Bind this process to one core, in turns; does nothing if the system does not support it."""
    cores = usable_cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the system; returns whether it does.

    By default every large tensor is mapped and unmapped, and its first use costs a page fault per 4 KiB. That
    makes I, which allocates more than it frees, several percent slower.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return all(mallopt(option, value) == 1 for option, value in _MALLOPT)
