"""Runs the bodies of tests as ranks with real devices, each in another process.

The tests in tests/gpu run on GPUs. Where a CPU or a model of CUDA and NCCL has the subject, tests/worker runs
the same functions there. A process is started as ``python -m support.on_devices``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from zbv_worker.check import Gpu
from zbv_worker.measure.ranks import answer, measure_on_ranks
from zbv_worker.transport.connected import ControlPlane
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.gloo_ends import Staging
from zbv_worker.transport.torch_api import NcclApi, TorchNccl
from zbv_worker.transport.world import Backend, World, select_device

TIMEOUT = 60.0
_PROCESS_SECONDS = 240.0
_CYCLES = 10_000_000


class Bench(Protocol):
    """A GPU to test, or a model of one."""

    @property
    def gpu(self) -> Gpu:
        """The functions of CUDA, and the device."""

    @property
    def nccl(self) -> NcclApi:
        """Creates communicators."""

    @property
    def control(self) -> ControlPlane:
        """Messages between the ranks on their hosts."""

    def staging(self) -> Staging:
        """Copies between the device and the host."""

    def delay(self, stream: Any, milliseconds: float) -> None:
        """Queue a kernel that only takes time."""


Body = Callable[..., Any]


class Run(Protocol):
    """Runs a function on some ranks, each with its bench; returns what they return, by rank."""

    def __call__(self, body: Body, ranks: int = 1) -> list[Any]: ...


@dataclass(frozen=True)
class Here:
    """This process, as one rank of a test."""

    world: World
    device: torch.device
    backend: Backend

    @property
    def is_gpu(self) -> bool:
        """Whether the rank computes on a GPU; times of a CPU that other tests use mean nothing."""
        return self.device.type == "cuda"

    @cached_property
    def gpu(self) -> Gpu:
        return Gpu.real(self.device)

    @property
    def nccl(self) -> NcclApi:
        return TorchNccl()

    @cached_property
    def control(self) -> ControlPlane:
        return GlooControl(self.world, TIMEOUT)

    def staging(self) -> Staging:
        return Staging(self.device)

    def delay(self, stream: Any, milliseconds: float) -> None:
        with self.gpu.cuda.stream(stream):
            self._sleep(int(milliseconds * self._cycles_per_millisecond))

    @cached_property
    def _sleep(self) -> Callable[[int], None]:
        return cast(Any, torch.cuda)._sleep  # type: ignore[no-any-return]

    @cached_property
    def _cycles_per_millisecond(self) -> float:
        """The clock rate, because delays are counted in cycles."""
        self._sleep(1000)  # loads the kernel
        start, end = (self.gpu.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self.gpu.cuda.current_stream(self.device)
        start.record(stream)
        self._sleep(_CYCLES)
        end.record(stream)
        end.synchronize()
        return _CYCLES / start.elapsed_time(end)


@dataclass(frozen=True)
class Devices:
    """Where the ranks of a test compute, and how they transfer tensors."""

    device: Literal["cuda", "cpu"]
    backend: Backend
    ranks: int
    """The ranks of a pipeline."""

    def run(self, body: Body, ranks: int = 1, **arguments: Any) -> list[Any]:
        """Call a function of a module of tests/gpu with :class:`Here`; returns what the ranks return.

        Raises
        ------
        LaunchError
            If a rank fails, for example an assertion; includes the end of its log.
        """
        request = {
            "module": f"gpu.{body.__module__.rpartition('.')[2]}",  # whatever name pytest gave it
            "name": body.__name__,
            "device": self.device,
            "backend": self.backend,
            "arguments": arguments,
        }
        return measure_on_ranks([__name__], request, ranks, _PROCESS_SECONDS)


def host_waits(step: Callable[[], object], cuda: Any = torch.cuda) -> list[str]:
    """The calls in a step that make the host wait for the device, as torch's warnings name them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            cuda.set_sync_debug_mode("default")
    return [f"{warning.message} ({warning.filename}:{warning.lineno})" for warning in caught]


def is_filled(tensor: Tensor, value: float) -> bool:
    """Whether a 1-D tensor has one value everywhere; waits for the device."""
    return set(tensor.tolist()) == {value}


def _answer(request: dict[str, Any], world: World) -> Any:
    device = torch.device("cpu")
    if request["device"] == "cuda":
        # Also sets the variables of CUDA and NCCL. Ranks share GPUs if there are too few.
        device = select_device("nccl", world.local_rank % torch.cuda.device_count())
    body = getattr(import_module(request["module"]), request["name"])
    return body(Here(world, device, request["backend"]), **request["arguments"])


if __name__ == "__main__":
    answer(_answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of a process must not wait for kernels that a test left behind
