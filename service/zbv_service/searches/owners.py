"""Names of lease owners, from which other runners on the same machine can tell whether an owner is dead."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path


def new_owner(process_id: int | None = None) -> str:
    """A name for a process of this machine, by default this one: ``machine:process id:random``."""
    return f"{_machine()}:{os.getpid() if process_id is None else process_id}:{secrets.token_hex(8)}"


def is_dead(owner: str, mine: str) -> bool:
    """Whether an owner is a dead process of this machine; False for owners on other machines."""
    machine, process_id = _parts(owner)
    if machine != _parts(mine)[0] or not process_id.isdigit() or owner == mine:
        return False
    if int(process_id) == os.getpid():
        return True  # an earlier process had our id, as the first process of every container does
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """The scope of a process id: boot and process namespace.

    The host name alone is not enough: containers may share their host's, and cloned machines have the same.
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
