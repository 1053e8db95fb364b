"""Steps of a layout on one rank of :mod:`benchmarks.worker.layouts`: with compute, or with sleeps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from zbv_solver.problem.problem import LETTERS
from zbv_worker.execution.agreement import Statement, agree
from zbv_worker.execution.executor import Executor
from zbv_worker.execution.plan_source import plan_of_document
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.measure.ranks import connected
from zbv_worker.measure.rehearse.sleeping_stage import NoBatches, SleepingDevice, SleepingStage, sharpen_timer
from zbv_worker.model.spec import ModelSpec
from zbv_worker.run.loop import Loop
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.transport.world import World

from benchmarks.worker.ranks import MEETING_SECONDS

CPU = torch.device("cpu")
NANOSECONDS = 1000
"""In a microsecond."""
_FLOAT_BYTES = 4
_MANY = 1_000_000


class ComputedSteps:
    """Training of a layout.

    Parameters
    ----------
    layout
        What :mod:`benchmarks.worker.layouts` sends.
    stack
        Closes the transport in the end.
    """

    def __init__(self, layout: Mapping[str, Any], world: World, stack: ExitStack):
        replicas, spec = layout["replicas"], ModelSpec(**layout["spec"])
        self._transport = stack.enter_context(connected(world, "gloo", CPU, MEETING_SECONDS, replicas))
        training = TrainingOptions(replicas, is_sharded=layout["sharded"], non_finite="continue")
        run = RunOptions((), spec, steps=_MANY, timeout=MEETING_SECONDS, training=training)
        plan = plan_of_document(layout["plan"], self._transport.pp_rank)
        self._loop = Loop(run, plan, spec.build(), self._transport, CPU)
        stack.callback(self._loop.close)

    def meet(self) -> None:
        """Wait for all ranks."""
        self._transport.barrier(MEETING_SECONDS)

    def step(self, step: int) -> None:
        """Train."""
        self._loop.step(step)


class SleptSteps:
    """Real transfers and collectives of a layout, and sleeps as long as its actions and updates."""

    def __init__(self, layout: Mapping[str, Any], world: World, stack: ExitStack):
        sharpen_timer()
        replicas, self._is_sharded = layout["replicas"], layout["sharded"]
        self._transport = stack.enter_context(connected(world, "gloo", CPU, MEETING_SECONDS, replicas))
        rank, plan = self._transport.pp_rank, WholePlan.of_document(layout["plan"])
        mine = plan.of_rank(rank)
        statement = Statement(
            plan_id=plan.plan_id,
            pp_rank=rank,
            pp_degree=plan.problem.pp_degree,
            world_size=world.world_size,
            model="",
            backend="gloo",
            steps=_MANY,
            channels=mine.channels,
            replicas=replicas,
        )
        self._transport.open(agree(self._transport, statement, MEETING_SECONDS), MEETING_SECONDS)
        self._device = SleepingDevice()
        stages = _stages(plan, rank, layout["crossing"], self._device)
        self._executor = Executor(
            mine, stages, NoBatches(), self._transport, device=CPU, timeout=MEETING_SECONDS
        )
        self._executor.expect((0,) * mine.microbatches)
        stack.callback(self._executor.close)
        self._update = round(layout["update"][rank] * NANOSECONDS)
        own = -(-int(layout["gradients"][rank]) // _FLOAT_BYTES // replicas)
        self._part, self._whole = torch.zeros(own), torch.zeros(own * replicas)

    def meet(self) -> None:
        """Wait for all ranks."""
        self._transport.barrier(MEETING_SECONDS)

    def step(self, step: int) -> None:
        """Run the plan, reduce gradients, update, and gather parameters."""
        self._executor.step(step)
        transport = self._transport
        if transport.layout.replicas == 1:
            self._device.take(self._update)
        elif self._is_sharded:
            transport.sum_parts_over_replicas(self._whole, self._part).wait(MEETING_SECONDS)
            self._device.take(self._update)
            transport.gather_over_replicas(self._part, self._whole).wait(MEETING_SECONDS)
        else:
            transport.sum_over_replicas(self._whole).wait(MEETING_SECONDS)
            self._device.take(self._update)


def _stages(
    plan: WholePlan, rank: int, crossing: list[float], device: SleepingDevice
) -> dict[int, SleepingStage]:
    """A rank's stages; ``crossing`` are the bytes at each boundary."""
    arrays, last = plan.problem.arrays, plan.problem.n_stages - 1
    lengths = np.rint(arrays.duration[..., arrays.kind_of] * NANOSECONDS).astype(np.int64)
    return {
        stage: SleepingStage(
            {letter: lengths[code, stage].tolist() for code, letter in enumerate(LETTERS)},
            None if stage == last else int(crossing[stage]),
            None if stage == 0 else int(crossing[stage - 1]),
            device,
        )
        for stage in plan.problem.placement.stages_of[rank]
    }
