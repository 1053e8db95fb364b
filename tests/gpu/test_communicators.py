"""torch's NCCL: what the transport and the tests' model of NCCL assume."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.on_devices import TIMEOUT, Bench, Run, is_filled
from zbv_worker.check import waiting_receives
from zbv_worker.transport.nccl_operations import CHANNEL_OPTIONS
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, CudaStream, NcclWork

DELAY = 50.0
STUCK = 60_000.0
"""Milliseconds of a kernel that an abort must not wait for."""
ABORT_SECONDS = 10.0
"""How long an abort may take while an operation hangs: torch waits at most the group's timeout."""
VERSIONS = "Report the versions of torch and NCCL; do not train over NCCL with them."


def methods(protocol: type) -> list[str]:
    """The public methods of a protocol."""
    return [name for name in vars(protocol) if not name.startswith("_")]


CALLED: list[tuple[object, Iterable[str]]] = [
    (torch.cuda.Stream, methods(CudaStream)),
    (torch.cuda.Event, methods(CudaEvent)),
    (torch.cuda, [*methods(CudaApi), "set_sync_debug_mode", "memory_allocated"]),
    (dist.Work, methods(NcclWork)),
    (dist.ProcessGroup, ["send", "recv", "allreduce", "abort", "set_timeout"]),
    (dist, ["new_group", "all_gather_single", "reduce_scatter_single"]),
]
"""What the worker calls (:mod:`zbv_worker.transport.torch_api`), by the object that must have it."""


def test_torch_has_everything_that_the_worker_calls() -> None:
    """The installed build of torch fits, with CUDA and without."""
    absent = [f"{owner}.{name}" for owner, names in CALLED for name in names if not hasattr(owner, name)]
    if dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        absent += [name for name in ("is_high_priority_stream", "config") if not hasattr(options, name)]
        absent += [name for name in ("min_ctas", "max_ctas") if not hasattr(options.config, name)]
    assert not absent, "install a version of torch that the project's tests run with"


def one_rank_alone(here: Bench) -> None:
    here.control  # noqa: B018 - creates the default process group
    cuda, device, clock = here.gpu.cuda, here.gpu.device, here.gpu.clock
    group: Any = here.nccl.new_group([0], timedelta(days=1), CHANNEL_OPTIONS, "tests")
    compute, number = cuda.current_stream(device), torch.ones(512, device=device)
    here.gpu.finish(group.all_reduce(number))
    here.delay(compute, DELAY)
    before = clock.now()
    work = group.all_reduce(number)
    work.wait()
    assert clock.now() - before < DELAY / 2e3, f"the host waited in wait(). {VERSIONS}"
    assert not work.is_completed(), f"is_completed() is True while the operation waits. {VERSIONS}"
    here.gpu.finish(work)
    assert work.is_completed(), f"is_completed() is False after the operation. {VERSIONS}"
    assert is_filled(number, 1.0), f"a sum over one rank is wrong. {VERSIONS}"

    here.delay(compute, STUCK)
    group.all_reduce(number)
    group.set_timeout(timedelta(seconds=ABORT_SECONDS / 2))
    before = clock.now()
    group.abort()
    seconds = clock.now() - before
    assert seconds <= ABORT_SECONDS, (
        f"abort() took {seconds:.1f} s while an operation could not run. {VERSIONS}"
    )


def test_works_timeouts_and_aborts_are_as_in_torchs_source(run: Run) -> None:
    """is_completed, wait, set_timeout and abort of a communicator of one rank."""
    run(one_rank_alone)


def receives_wait(here: Bench) -> None:
    wrong = waiting_receives(here.nccl, here.control, here.gpu, TIMEOUT)
    assert not wrong, " ".join(wrong)


def test_receives_that_wait_stop_nothing_and_can_be_aborted(run: Run) -> None:
    """Neither compute, nor the loading of kernels, nor communicators. ``zbv-worker check`` tests it too."""
    run(receives_wait, 2)
