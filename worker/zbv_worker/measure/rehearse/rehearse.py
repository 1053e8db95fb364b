"""Rehearses a plan: real ranks, real transfers, and sleeps instead of compute. It needs no model.

It runs the executor that trains, with stages that only take time
(:mod:`zbv_worker.measure.rehearse.sleeping_stage`). It finds whether the plan completes on this transport,
how long a step takes, and how long transfers take while the schedule runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from zbv_solver.documents.files import write
from zbv_solver.plans.orders import durations
from zbv_solver.problem.problem import LETTERS

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.agreement import Statement, agree
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, Executor, ExecutorOptions
from zbv_worker.execution.plan_source import SECONDS, PlanSource, WholePlan
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import HostTimeline, StepResult
from zbv_worker.execution.turns import Half, Overlap
from zbv_worker.host.process import keep_freed_memory
from zbv_worker.measure.rehearse.outcome import CpuUse, Outcome, compare
from zbv_worker.measure.rehearse.sleeping_stage import NoBatches, SleepingDevice, SleepingStage, sharpen_timer
from zbv_worker.tracing.merged_trace import (
    DEFAULT_CLOCK,
    Alignment,
    Clock,
    RankTrace,
    claim,
    collect,
    find_offsets,
    render,
)
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import World

DEFAULT_STEPS = 5
DEFAULT_BYTES = 1 << 16
DEFAULT_ACTION_SECONDS = 0.01
"""Mean length of an action if neither the problem nor the caller defines the time unit."""

WARM_UP_STEPS = 1
"""The first step fills the pipeline and exchanges shapes; each other is measured from the end of the last."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RehearseOptions:
    """How to rehearse a plan."""

    source: PlanSource
    steps: int = DEFAULT_STEPS
    """Steps to measure, after one warm-up step."""
    scale: float | None = None
    """Seconds per time unit of the plan; None for the unit in the problem's ``units``."""
    transfer_bytes: int = DEFAULT_BYTES
    """Size of every tensor between ranks."""
    timeout: float = 120.0
    """Seconds that a rank waits for any one tensor, and for the other ranks before the first step and
    after the last."""
    look_ahead: int = DEFAULT_LOOK_AHEAD
    trace: Path | None = None
    """Where to write the merged trace."""

    def plan(self) -> WholePlan:
        """The plan; raises :class:`InvalidRun` for one that cannot be rehearsed."""
        found = self.source.whole(self.timeout)
        if found.orders.copies is not None:
            raise InvalidRun(
                "the plan copies activations to the host, and a rehearsal has none. Rehearse a plan without "
                "costs.offload."
            )
        return found

    def seconds_per_unit(self, plan: WholePlan) -> float:
        """The scale: as given, else of the problem's unit, else one that makes actions 10 ms long."""
        if self.scale is not None:
            return self.scale
        unit = plan.problem.units.time
        if unit in SECONDS:
            return SECONDS[unit]
        mean = sum(map(plan.busy, range(plan.problem.pp_degree))) / max(1, len(plan.orders))
        return DEFAULT_ACTION_SECONDS / mean if mean > 0 else 1.0


def rehearse(options: RehearseOptions, world: World) -> Outcome | None:
    """Rehearse as one rank of the world; rank 0 returns the outcome, the others None.

    Raises
    ------
    WorkerError
        See :mod:`zbv_worker.errors`; the process should end then.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    sharpen_timer()
    plan = options.plan()
    mine = plan.of_rank(world.rank)  # refuses a wrong number of ranks before they meet
    if world.rank == 0 and options.trace is not None:
        claim(options.trace)
    with naming_errors(world.rank, "meeting the other ranks"):
        transport = connect(world, "gloo", _CPU, options.timeout)
    gc.freeze()  # otherwise a garbage collection during a step would look like a slow action
    with transport:
        return rehearse_on(transport, options, plan, mine)


def rehearse_on(
    transport: Transport,
    options: RehearseOptions,
    plan: WholePlan,
    mine: RankPlan,
    clock: Clock = DEFAULT_CLOCK,
    device: SleepingDevice | None = None,
) -> Outcome | None:
    """Agree, run all steps, and collect the traces; collective. Rank 0 returns the outcome.

    Parameters
    ----------
    clock
        This rank's clock, in nanoseconds.
    device
        The rank's simulated device; by default one on the machine's clock.
    """
    rank, timeout = transport.rank, options.timeout
    scale = options.seconds_per_unit(plan)
    statement = Statement(
        plan_id=plan.plan_id,
        pp_rank=rank,
        pp_degree=plan.problem.pp_degree,
        world_size=transport.world_size,
        model=f"{options.transfer_bytes} B, {scale:g} s",
        backend="gloo",
        steps=options.steps,
        channels=mine.channels,
    )
    keys = agree(transport, statement, timeout)
    with naming_errors(rank, "opening the channels"):
        transport.open(keys, timeout)
        before = find_offsets(transport, timeout, clock)
    compute = SleepingDevice() if device is None else device
    executor = Executor(
        mine,
        sleeping_stages(plan, rank, scale, options.transfer_bytes, compute),
        NoBatches(),
        transport,
        device=_CPU,
        timeout=timeout,
        options=ExecutorOptions(
            look_ahead=options.look_ahead,
            timeline=HostTimeline(clock),
            overlap=sleeping_pairs(plan, rank, scale, compute),
        ),
    )
    executor.expect((0,) * mine.microbatches)  # all tensors have one size

    steps = [_step(executor, step, transport, plan, timeout) for step in range(WARM_UP_STEPS)]
    spent = _cpu_times(compute)
    for step in range(options.steps):
        steps.append(_step(executor, WARM_UP_STEPS + step, transport, plan, timeout))
    thread, process = (now - earlier for now, earlier in zip(_cpu_times(compute), spent, strict=True))
    cpu = CpuUse(thread, process, options.steps * len(mine.actions))
    with naming_errors(rank, "ending the rehearsal"):
        transport.flush(timeout)
        alignment = Alignment(before, find_offsets(transport, timeout, clock))
        traces = collect(transport, RankTrace.of(plan.plan_id, rank, steps), alignment, timeout)
        used = [CpuUse(*each) for each in transport.gather(cpu, timeout)]
        transport.barrier(timeout)  # no rank closes while a peer still receives
    if rank != 0:
        return None
    if options.trace is not None:
        write(options.trace, render([traces], alignment))
    return compare(plan, scale, traces, used, alignment.uncertainty / 1e9)


def _step(executor: Executor, step: int, transport: Transport, plan: WholePlan, timeout: float) -> StepResult:
    if plan.problem.objective == "makespan":  # which is the length of a single iteration
        with naming_errors(transport.rank, "between steps"):
            transport.barrier(timeout)
    return executor.step(step)


def _cpu_times(compute: SleepingDevice) -> tuple[int, int]:
    """CPU time of this thread and process so far, in ns, without the simulated compute."""
    sleeping = compute.cpu_nanoseconds
    return time.thread_time_ns() - sleeping, time.process_time_ns() - sleeping


def sleeping_pairs(plan: WholePlan, rank: int, scale: float, device: SleepingDevice) -> Overlap:
    """Runs a rank's pairs in their planned times; ``scale`` in seconds per time unit."""
    part = plan.orders.slice_of(rank)
    nanoseconds = np.rint(durations(plan.problem, plan.orders)[part] * (scale * 1e9)).astype(np.int64)
    of_action = dict(zip(plan.orders.actions(rank), nanoseconds.tolist(), strict=True))

    def run(forward: Half, backward: Half) -> None:
        device.instead = [of_action[backward.action], 0]
        forward()
        backward()
        forward.end, backward.start = backward.end, forward.start

    return run


def sleeping_stages(
    plan: WholePlan, rank: int, scale: float, size: int, device: SleepingDevice
) -> Mapping[int, SleepingStage]:
    """A rank's stages with their planned costs; ``scale`` in seconds per time unit, ``size`` in bytes."""
    arrays, last = plan.problem.arrays, plan.problem.n_stages - 1
    nanoseconds = np.rint(arrays.duration[..., arrays.kind_of] * (scale * 1e9)).astype(np.int64)
    return {
        stage: SleepingStage(
            {letter: nanoseconds[code, stage].tolist() for code, letter in enumerate(LETTERS)},
            None if stage == last else size,
            None if stage == 0 else size,
            device,
        )
        for stage in plan.problem.placement.stages_of[rank]
    }
