"""Checks of NCCL's communicators: the behaviour of torch's NCCL that the transport relies on.

The measurements use the protocols of :mod:`zbv_worker.transport.torch_api`, so that they also run on a model
of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zbv_worker.gpu_report.check import (
    Answers,
    Line,
    Place,
    ReportOptions,
    at_most,
    failed,
    informative,
    not_run,
    that,
)
from zbv_worker.gpu_report.streams import DELAY, Bench, GpuBench, is_filled
from zbv_worker.transport.communicators import CHANNEL_OPTIONS
from zbv_worker.transport.control import ControlPlane
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.torch_api import NcclApi, NcclGroup, NcclWork, TorchNccl
from zbv_worker.transport.torch_errors import first_line

ABORT_SECONDS = 10.0
"""How long an abort may take while the group's operation hangs: torch waits at most the group's timeout."""

KERNELS = 6
"""The most communication kernels that wait on a device at once: a middle rank of a V, with all sums
(:func:`zbv_worker.transport.communicators.kernels_at_once`)."""

_PATIENCE = timedelta(days=1)
_STUCK = 60_000.0
"""Milliseconds of a kernel that an abort must not wait for."""
_ARRIVAL_SECONDS = 15.0
_POLL_SECONDS = 0.001
_SIDE = 512


def measure_one_rank(place: Place) -> Any:
    """Measure a group of one rank on the process's GPU."""
    GlooControl(place.world, place.options.timeout)
    bench = GpuBench(place.device)
    torch.zeros(1, device=place.device)  # the memory of CUDA itself is not the communicator's
    return one_rank(TorchNccl(), bench)


def one_rank(api: NcclApi, bench: Bench) -> dict[str, Any]:
    """What a group of one rank does with sums, works, timeouts and an abort."""
    group = _created(api, [0], "gpu-report")
    number = torch.ones(_SIDE, device=bench.device)
    free = bench.cuda.mem_get_info(bench.device)[0]
    _finish(bench, group.all_reduce(number))
    taken = free - bench.cuda.mem_get_info(bench.device)[0]

    compute = bench.cuda.current_stream(bench.device)
    bench.delay(compute, DELAY)
    before = bench.clock.now()
    work = group.all_reduce(number)
    work.wait()
    host = 1e3 * (bench.clock.now() - before)
    early = work.is_completed()
    _synchronize(bench)
    late = work.is_completed()
    return {
        "version": api.version(),
        "right": is_filled(number, 1.0),
        "bytes": taken,
        "host_milliseconds": host,
        "early": early,
        "late": late,
        "is_success": _said(work),
        **_aborted(group, bench, number),
    }


def _aborted(group: NcclGroup, bench: Bench, number: Tensor) -> dict[str, Any]:
    """Abort a group with an operation that cannot run yet."""
    bench.delay(bench.cuda.current_stream(bench.device), _STUCK)
    work = group.all_reduce(number)
    seconds, said = _abort(group, bench)
    return {
        "abort_seconds": seconds,
        "abort_said": said,
        "completed_after_abort": work.is_completed(),
    }


def _abort(group: NcclGroup, bench: Bench) -> tuple[float, str]:
    """Abort a group as the transport does; returns the seconds, and the error if there was one."""
    group.set_timeout(timedelta(seconds=ABORT_SECONDS / 2))
    before, said = bench.clock.now(), ""
    try:
        group.abort()
    except RuntimeError as error:
        said = first_line(error)
    return bench.clock.now() - before, said


def judge_one_rank(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_one_rank`."""
    (found,) = answers
    yield informative("NCCL's version", str(found["version"]))
    yield that("a sum over one rank is its own numbers", found["right"], "other numbers")
    yield informative(
        "memory of the device that a communicator of one rank took", f"{found['bytes'] / 1e6:.0f} MB"
    )
    yield at_most(
        f"wait() behind a kernel of {DELAY:g} ms: the host goes on",
        found["host_milliseconds"],
        DELAY / 2,
        "ms",
    )
    yield that("is_completed() is False while the operation waits", not found["early"], "it is True")
    yield that("is_completed() is True after the operation", found["late"], "it is False")
    # Not used by the worker; a fake of NCCL that implements it would hide mistakes.
    yield informative("what is_success() says", found["is_success"])
    yield _abort_line("set_timeout(), then abort() while an operation cannot run", found)
    yield informative("is_completed() after an abort", str(found["completed_after_abort"]))


def _abort_line(what: str, found: Mapping[str, Any]) -> Line:
    seconds, said = found["abort_seconds"], found["abort_said"]
    if said:
        return failed(what, f"after {seconds:.1f} s it raised: {said}")
    return at_most(what, seconds, ABORT_SECONDS, "s")


def measure_shared_gpu(place: Place) -> Any:
    """Try a group of two ranks on one GPU; returns what NCCL says, None if it works."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    control = GlooControl(place.world, place.options.timeout)
    said = None
    try:
        group = _created(TorchNccl(), [0, 1], "gpu-report")
        _finish(GpuBench(device), group.all_reduce(torch.ones(1, device=device)))
    except RuntimeError as error:
        said = first_line(error)
    control.gather(said, place.options.timeout)  # no rank leaves before the others have an answer
    return said


def judge_shared_gpu(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The line of :func:`measure_shared_gpu`."""
    what, said = "two ranks of one communicator on one GPU", next((each for each in answers if each), None)
    yield informative(what, "works") if said is None else not_run(what, f"NCCL refuses: {said}")


def measure_receives(place: Place) -> Any:
    """Post receives whose sends come late, and compute meanwhile."""
    control = GlooControl(place.world, place.options.timeout)
    bench = GpuBench(place.device)
    return receives(TorchNccl(), control, bench, place.options.timeout)


def receives(api: NcclApi, control: ControlPlane, bench: Bench, timeout: float) -> dict[str, Any]:
    """Waiting receives on rank 1: next to a kernel that is not loaded yet, several at once, aborted."""
    rank = control.rank
    free = bench.cuda.mem_get_info(bench.device)[0]
    groups = [_created(api, [0, 1], f"gpu-report {index}") for index in range(KERNELS)]
    buffers = [torch.full((_SIDE,), float(1 - rank), device=bench.device) for _ in groups]
    for group in groups:  # a send connects another communicator than a sum; all ranks in one order
        greeting = torch.ones(1, device=bench.device)
        _finish(bench, group.send(greeting, 1) if rank == 0 else group.receive(greeting, 0))
    taken = free - bench.cuda.mem_get_info(bench.device)[0]
    found: dict[str, Any] = {"bytes": taken // len(groups)}
    works: list[NcclWork] = []
    if rank == 1:
        works = [group.receive(buffer, 0) for group, buffer in zip(groups, buffers, strict=True)]
        found["cold_seconds"] = _cold_product(bench)
    control.barrier(timeout)
    if rank == 0:  # only on the last group: the receives before it still wait
        works = [groups[-1].send(buffers[-1], 1)]
    if rank == 1:
        found["last_arrives"] = _arrives(bench, works[-1])
    control.barrier(timeout)
    if rank == 0:
        works += [group.send(buffer, 1) for group, buffer in zip(groups[:-1], buffers[:-1], strict=True)]
    found["all_arrive"] = all(_arrives(bench, work) for work in works)
    _synchronize(bench)
    found["right"] = all(is_filled(buffer, 1.0) for buffer in buffers)
    control.barrier(timeout)
    if rank == 1:  # nothing will ever arrive
        groups[0].receive(buffers[0], 0)
        found["abort_seconds"], found["abort_said"] = _abort(groups[0], bench)
    return found


def _cold_product(bench: Bench) -> float | None:
    """Seconds of a product whose kernel is loaded only now; None if it does not end."""
    before = bench.clock.now()
    bench.load_product()
    done = bench.cuda.Event(enable_timing=False)
    done.record(bench.cuda.current_stream(bench.device))
    while not done.query():
        if bench.clock.now() - before > _ARRIVAL_SECONDS:
            return None
        bench.clock.pause(_POLL_SECONDS)
    return bench.clock.now() - before


def judge_receives(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_receives`."""
    receiver = answers[1]
    seconds = receiver["cold_seconds"]
    yield that(
        f"a product with a kernel that is not loaded yet ends while {KERNELS} receives wait",
        seconds is not None,
        f"it did not end within {_ARRIVAL_SECONDS:g} s; set CUDA_MODULE_LOADING=EAGER",
        "" if seconds is None else f"{seconds * 1e3:.1f} ms",
    )
    yield that(
        f"the last of {KERNELS} receives arrives while those before it wait",
        receiver["last_arrives"],
        "the device runs fewer communication kernels at once; set CUDA_DEVICE_MAX_CONNECTIONS=32",
    )
    arrive = all(answer["all_arrive"] and answer["right"] for answer in answers)
    yield that("every receive arrives with the sent numbers", arrive, "missing or wrong numbers")
    yield _abort_line("set_timeout(), then abort() while a receive waits forever", receiver)
    taken = max(answer["bytes"] for answer in answers)
    yield informative("memory of the device that a communicator of two ranks took", f"{taken / 1e6:.0f} MB")


def _created(api: NcclApi, ranks: Sequence[int], name: str) -> NcclGroup:
    group = api.new_group(ranks, _PATIENCE, CHANNEL_OPTIONS, name)
    if group is None:
        raise RuntimeError(f"NCCL made no group of ranks {list(ranks)} for this rank, which is one of them")
    return group


def _finish(bench: Bench, work: NcclWork) -> None:
    work.wait()
    _synchronize(bench)


def _synchronize(bench: Bench) -> None:
    """Wait on the host until the compute stream has ended its work."""
    done = bench.cuda.Event(enable_timing=False)
    done.record(bench.cuda.current_stream(bench.device))
    done.synchronize()


def _arrives(bench: Bench, work: NcclWork) -> bool:
    """Whether an operation ends in time."""
    deadline = bench.clock.now() + _ARRIVAL_SECONDS
    while not work.is_completed():
        if bench.clock.now() > deadline:
            return False
        bench.clock.pause(_POLL_SECONDS)
    work.wait()
    return True


def _said(work: Any) -> str:
    """What ``is_success`` of torch's work says, which the worker never calls."""
    try:
        return f"returns {work.is_success()}"
    except (RuntimeError, AttributeError) as error:
        return f"raises {type(error).__name__}: {first_line(error)}"
