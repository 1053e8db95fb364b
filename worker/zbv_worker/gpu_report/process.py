"""One process of a check: measures, writes its answer, and leaves without waiting for the device.

:func:`zbv_worker.gpu_report.gpu_report.run_check` starts it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import torch

from zbv_worker.gpu_report.check import OnRanks, Place, ReportOptions
from zbv_worker.gpu_report.checks import CHECKS
from zbv_worker.measure.ranks import answer, use_one_core
from zbv_worker.model.spec import ModelSpec
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.world import World, select_device


def request_of(name: str, options: ReportOptions) -> dict[str, Any]:
    """A check's request to its processes, as JSON."""
    return {"check": name, "options": asdict(options)}


def measure(request: dict[str, Any], world: World) -> Any:
    """Run a check's measurement; returns JSON."""
    given = request["options"]
    options = ReportOptions(**{**given, "model": ModelSpec(**given["model"])})
    run = CHECKS[request["check"]].run
    if not isinstance(run, OnRanks):
        raise TypeError(f"check {request['check']} does not measure in processes of this module")
    return run.measure(Place(options, world, _device(options, world)))


def _device(options: ReportOptions, world: World) -> torch.device:
    """The rank's GPU, which it may share with other ranks, or one core of the CPU."""
    if options.device == "cpu":
        use_one_core(world)
        return torch.device("cpu")
    nccl_environment.apply(os.environ)  # before CUDA starts
    return select_device("nccl", world.local_rank % torch.cuda.device_count())


if __name__ == "__main__":
    answer(measure)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of a process must not wait for kernels that a check left behind
