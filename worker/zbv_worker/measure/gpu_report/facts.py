"""The check of facts: devices, versions, and that torch has every method and option that the worker uses."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from zbv_worker.errors import WorkerError
from zbv_worker.host.inventory import versions
from zbv_worker.measure.gpu_report.check import (
    Device,
)


class NoGpu(WorkerError):
    """A report on CUDA was requested, but there is no CUDA GPU."""


def device_facts(device: Device) -> dict[str, Any]:
    """Versions and devices of this node; raises :class:`NoGpu`."""
    found: dict[str, Any] = {**versions(), "machine": platform.machine(), "device": device}
    if device == "cpu":
        return found
    if not torch.cuda.is_available():
        raise NoGpu(
            "found no CUDA GPU: the report needs at least one, its driver, and a torch built for CUDA. All "
            "other commands work without; `--device cpu` runs the checks that need no GPU."
        )
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **found,
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": _driver(),
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "multiprocessors": gpu.multi_processor_count,
            }
            for gpu in gpus
        ],
    }


def nccl_version() -> str | None:
    """NCCL's version; None if torch was built without it."""
    if not dist.is_nccl_available():
        return None
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's own
    return ".".join(map(str, found))


def _driver() -> str | None:
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0]
