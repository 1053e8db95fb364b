"""This process's share of the host: cores, compute threads, memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

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
