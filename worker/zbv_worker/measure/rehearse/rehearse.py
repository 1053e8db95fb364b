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

import torch
from zbv_solver.documents.files import write

from zbv_worker.errors import naming_errors
from zbv_worker.execution.agreement import Statement, agree
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, Executor, ExecutorOptions, StepResult
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import HostTimeline
from zbv_worker.execution.whole_plan import SECONDS, WholePlan
from zbv_worker.host.cores import keep_freed_memory
from zbv_worker.measure.rehearse.outcome import CpuUse, Outcome, compare
from zbv_worker.measure.rehearse.sleeping_stage import NoBatches, SleepingDevice, SleepingStage, sharpen_timer
from zbv_worker.tracing.clocks import DEFAULT_CLOCK, Alignment, Clock, find_offsets
from zbv_worker.tracing.merged_trace import RankTrace, claim, collect, render
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.distributed import DistributedTransport
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
    """How to rehearse a plan.

    Attributes
    ----------
    steps
        Steps to measure, after one warm-up step.
    scale
        Seconds per time unit of the plan; None for the unit in the problem's ``units``.
    transfer_bytes
        Size of every tensor between ranks.
    timeout
        Seconds that a rank waits for any one tensor, and for the other ranks before the first step and after
        the last.
    trace
        Where to write the merged trace.
    """

    source: PlanSource
    steps: int = DEFAULT_STEPS
    scale: float | None = None
    transfer_bytes: int = DEFAULT_BYTES
    timeout: float = 120.0
    look_ahead: int = DEFAULT_LOOK_AHEAD
    trace: Path | None = None

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
    plan = options.source.whole(options.timeout)
    mine = plan.of_rank(world.rank)
    if world.rank == 0 and options.trace is not None:
        claim(options.trace)
    with naming_errors(world.rank, "meeting the other ranks"):
        transport = DistributedTransport(world, "gloo", _CPU, options.timeout)
    gc.freeze()  # otherwise a garbage collection during a step would look like a slow action
    try:
        return Rehearsal(options, plan, mine, transport).run()
    finally:
        transport.close()


class Rehearsal:
    """One rank's rehearsal on an open transport.

    Parameters
    ----------
    clock
        This rank's clock, in nanoseconds.
    """

    def __init__(
        self,
        options: RehearseOptions,
        plan: WholePlan,
        mine: RankPlan,
        transport: Transport,
        clock: Clock = DEFAULT_CLOCK,
    ):
        self._options = options
        self._plan = plan
        self._mine = mine
        self._transport = transport
        self._clock = clock
        self._scale = options.seconds_per_unit(plan)
        self._compute = SleepingDevice()
        self._stages = sleeping_stages(plan, mine.rank, self._scale, options.transfer_bytes, self._compute)

    def run(self) -> Outcome | None:
        """Agree, run all steps, and collect the traces; collective. Rank 0 returns the outcome."""
        options, transport, rank = self._options, self._transport, self._mine.rank
        meeting = options.timeout
        keys = agree(transport, self._statement(), meeting)
        with naming_errors(rank, "opening the channels"):
            transport.open(keys, meeting)
            before = find_offsets(transport, meeting, self._clock)
        steps, cpu = self._steps()
        with naming_errors(rank, "ending the rehearsal"):
            transport.flush(meeting)
            alignment = Alignment(before, find_offsets(transport, meeting, self._clock))
            traces = collect(transport, RankTrace.of(self._plan.plan_id, rank, steps), alignment, meeting)
            used = [CpuUse(*each) for each in transport.gather(cpu, meeting)]
            transport.barrier(meeting)  # no rank closes while a peer still receives
        if rank != 0:
            return None
        if options.trace is not None:
            write(options.trace, render([traces], alignment))
        return compare(self._plan, self._scale, traces, used, alignment.uncertainty / 1e9)

    def _steps(self) -> tuple[list[StepResult], CpuUse]:
        """Run all steps; returns them, and the CPU time of those after the warm-up."""
        options, transport = self._options, self._transport
        executor = Executor(
            self._mine,
            self._stages,
            NoBatches(),
            transport,
            device=_CPU,
            timeout=options.timeout,
            options=ExecutorOptions(look_ahead=options.look_ahead, timeline=HostTimeline(self._clock)),
        )
        steps = []
        before = self._cpu_times()
        for step in range(WARM_UP_STEPS + options.steps):
            if step == WARM_UP_STEPS:
                before = self._cpu_times()
            if self._plan.problem.objective == "makespan":
                with naming_errors(self._mine.rank, "between steps"):
                    transport.barrier(options.timeout)  # a makespan is that of a single iteration
            steps.append(executor.step(step))
        thread, process = (now - earlier for now, earlier in zip(self._cpu_times(), before, strict=True))
        return steps, CpuUse(thread, process, options.steps * len(self._mine.actions))

    def _cpu_times(self) -> tuple[int, int]:
        """CPU time of this thread and process so far, in ns, without the simulated compute."""
        sleeping = self._compute.cpu_nanoseconds
        return time.thread_time_ns() - sleeping, time.process_time_ns() - sleeping

    def _statement(self) -> Statement:
        options = self._options
        return Statement(
            plan_id=self._plan.plan_id,
            pp_rank=self._mine.rank,
            pp_degree=self._plan.problem.pp_degree,
            world_size=self._transport.world_size,
            model=f"{options.transfer_bytes} B, {self._scale:g} s",
            backend="gloo",
            steps=options.steps,
            channels=self._mine.channels,
        )


def sleeping_stages(
    plan: WholePlan, rank: int, scale: float, size: int, device: SleepingDevice
) -> Mapping[int, SleepingStage]:
    """A rank's stages with their planned costs; ``scale`` in seconds per time unit, ``size`` in bytes."""
    duration, last = plan.problem.arrays.duration, plan.problem.n_stages - 1
    return {
        stage: SleepingStage(
            {letter: round(duration[code, stage] * scale * 1e9) for code, letter in enumerate("FIWB")},
            None if stage == last else size,
            None if stage == 0 else size,
            device,
        )
        for stage in plan.problem.placement.stages_of[rank]
    }
