"""The check of facts: devices, versions, and that torch has every method and option that the worker uses."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zbv_worker.errors import InvalidRun, WorkerError
from zbv_worker.gpu_report.check import (
    Answers,
    Device,
    Line,
    Place,
    ReportOptions,
    informative,
    not_run,
    that,
)
from zbv_worker.host.inventory import versions
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, CudaStream, NcclWork


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


def _methods(protocol: type) -> tuple[str, ...]:
    """The public methods of a protocol."""
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


CALLED: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    ("torch.cuda.Stream", torch.cuda.Stream, _methods(CudaStream)),
    ("torch.cuda.Event", torch.cuda.Event, _methods(CudaEvent)),
    ("torch.cuda", torch.cuda, (*_methods(CudaApi), "set_sync_debug_mode", "memory_allocated")),
    ("torch.distributed.Work", dist.Work, _methods(NcclWork)),
    (
        "torch.distributed.ProcessGroup",
        dist.ProcessGroup,
        ("send", "recv", "allreduce", "abort", "set_timeout"),
    ),
    ("torch.distributed", dist, ("new_group", "all_gather_single", "reduce_scatter_single")),
)
"""What the worker calls (:mod:`zbv_worker.transport.torch_api`), by the object of torch that must have it."""

OPTIONS = ("is_high_priority_stream", "config.min_ctas", "config.max_ctas")
"""The fields of ``ProcessGroupNCCL.Options`` that the transport sets."""


def measure_facts(place: Place) -> Any:
    """Look for the methods and options that the worker uses."""
    return {
        "lacking": {name: lacking_fields(real, called) for name, real, called in CALLED},
        "options": _lacking_options(),
        **environment_of(os.environ),
    }


def _lacking_options() -> list[str] | None:
    """The absent fields of NCCL's options; None if torch was built without NCCL."""
    if not dist.is_nccl_available():
        return None
    return lacking_fields(dist.ProcessGroupNCCL.Options(), OPTIONS)


def lacking_fields(options: object, paths: Iterable[str]) -> list[str]:
    """The dotted names of fields that an object does not have."""

    def has(path: str) -> bool:
        value = options
        for name in path.split("."):
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True

    return [path for path in paths if not has(path)]


def environment_of(variables: Mapping[str, str]) -> dict[str, Any]:
    """The variables of CUDA and NCCL as the transport would use them, and what it says about them."""
    applied, refused, doubts = {**variables}, None, list[str]()
    try:
        doubts = nccl_environment.apply(applied)
    except InvalidRun as error:
        refused = str(error)
    return {"variables": nccl_environment.found(applied), "doubts": doubts, "refused": refused}


def judge_facts(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_facts`."""
    (found,) = answers
    for name, lacking in found["lacking"].items():
        yield that(
            f"{name} has everything that the worker calls", not lacking, f"it lacks {', '.join(lacking)}"
        )
    what, lacking = "NCCL's options have every field that the transport sets", found["options"]
    if lacking is None:
        yield not_run(what, "this build of torch has no NCCL")
    else:
        yield that(what, not lacking, f"absent: {', '.join(lacking)}", ", ".join(OPTIONS))
    refused = found["refused"]
    yield that("no variable of CUDA or NCCL prevents a run", refused is None, str(refused))
    yield informative("variables of CUDA and NCCL in a run", found["variables"])
    yield informative("doubtful variables", " ".join(found["doubts"]) or "none")
