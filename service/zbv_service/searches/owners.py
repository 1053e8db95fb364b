"""Who holds leases: one name per runner, from which others on the same machine can tell that it is dead."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path


def new_owner(process_id: int | None = None) -> str:
    """A name for this process, or for another one of this machine: ``machine:process id:at random``."""
    return f"{_machine()}:{os.getpid() if process_id is None else process_id}:{secrets.token_hex(8)}"


def is_dead(owner: str, mine: str) -> bool:
    """Whether an owner is a process of this machine that is no more; of other machines nothing is known."""
    machine, process_id = _parts(owner)
    if machine != _parts(mine)[0] or not process_id.isdigit() or owner == mine:
        return False
    if int(process_id) == os.getpid():
        return True  # an earlier process had our number: containers give the first one always the same
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """Names the space in which process ids mean something.

    Containers may share the name of their host, and machines that were cloned may share theirs.
    """
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space = boot = ""
    return f"{socket.gethostname()[:100]}/{boot}/{space}"


def _parts(owner: str) -> tuple[str, str]:
    machine, _, process_id = owner.rpartition(":")[0].rpartition(":")
    return machine, process_id
