"""A node's devices, versions and address, found without torch and without a CUDA context."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from importlib import metadata
from urllib.parse import urlsplit

from zbv_solver import __version__

from zbv_worker.host.process import usable_cores

_QUERY_SECONDS = 20.0


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs, from ``nvidia-smi``; empty without any."""
    return _query("name")


def driver_version() -> str:
    """The version of the NVIDIA driver."""
    return next(iter(_query("driver_version")), "unknown")


def _query(field: str) -> list[str]:
    """A field of every GPU; empty without any."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def devices() -> tuple[list[str], int]:
    """Descriptions of this node's devices, and how many ranks it can run: one per GPU, else one per core."""
    gpus = gpu_names()
    if gpus:
        return gpus, len(gpus)
    cores = len(usable_cores())
    return [f"{cores} CPU cores ({platform.machine()})"], cores


def versions() -> dict[str, str]:
    """The versions of the software that runs depend on."""
    found = {"zbv": __version__, "python": platform.python_version()}
    try:
        found["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found["torch"] = "absent"
    return found


def address_towards(server: str) -> str:
    """This host's address on the route to a server, where other hosts of that network can reach it.

    Falls back to the host's name. Sends nothing.
    """
    parts = urlsplit(server)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            parts.hostname or "127.0.0.1", parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
