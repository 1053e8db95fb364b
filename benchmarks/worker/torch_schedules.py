"""PyTorch's pipelines: its schedule classes, and its runtime with one of our plans.

Their stages are plain ``PipelineStage`` objects, so PyTorch splits the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from zbv_solver.export.torch_comms_csv import lowered
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.problem.stages import Placement, PlacementKind
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.model.checks import build_stage
from zbv_worker.model.protocol import PipelineModel

from benchmarks.worker.ranks import MEETING_SECONDS
from benchmarks.worker.torch_runtime.executor import load

_CPU = torch.device("cpu")

ScheduleName = Literal["ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B", "Schedule1F1B"]

_PLACEMENT: dict[str, PlacementKind] = {
    "ScheduleZBVZeroBubble": "v",
    "ScheduleInterleaved1F1B": "loop",
    "Schedule1F1B": "single",
}
SCHEDULES: tuple[ScheduleName, ...] = ("ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B", "Schedule1F1B")


class StepData:
    """The microbatches of one step, made before it begins, so that no runtime is charged for reading data.

    It replaces the model where the executor reads data.
    """

    def __init__(self, model: PipelineModel, microbatches: int):
        self._model = model
        self._count = microbatches
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.inputs = self.targets = torch.empty(0)

    def load(self, step: int) -> None:
        """Make the microbatches of a step."""
        self._pairs = [self._model.microbatch(step, index) for index in range(self._count)]
        self.inputs = torch.cat([input for input, _ in self._pairs])
        self.targets = torch.cat([target for _, target in self._pairs])

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """A microbatch of the loaded step."""
        return self._pairs[index]


class TorchPipeline:
    """One rank of a PyTorch pipeline.

    Parameters
    ----------
    modules
        The rank's stages by index.
    last
        Index of the model's last stage.
    """

    def __init__(self, schedule: Any, modules: Mapping[int, nn.Module], last: int, data: StepData):
        self._schedule = schedule
        self._data = data
        self._has_first, self._has_last = 0 in modules, last in modules
        self.modules = list(modules.values())

    def step(self, step: int) -> float | None:
        """Run the schedule once; returns the mean loss on the rank with the last stage, otherwise None."""
        losses: list[Tensor] = []
        inputs = (self._data.inputs,) if self._has_first else ()
        target = self._data.targets if self._has_last else None
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).mean()) if losses else None


def torch_schedule(
    name: ScheduleName, model: PipelineModel, rank: int, p: int, microbatches: int, data: StepData
) -> TorchPipeline:
    """Return a rank of one of PyTorch's schedule classes; collective."""
    placement = Placement.of(_PLACEMENT[name], p)
    modules = _modules(model, placement.stages_of[rank], placement.n_stages)
    stages = _stages(modules, placement.n_stages)
    schedule: Any
    if name == "Schedule1F1B":
        schedule = Schedule1F1B(stages[0], microbatches, loss_fn=model.loss)
    elif name == "ScheduleZBVZeroBubble":
        schedule = ScheduleZBVZeroBubble(list(stages), microbatches, loss_fn=model.loss)
    else:
        schedule = ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=model.loss)
    return TorchPipeline(schedule, modules, placement.n_stages - 1, data)


def torch_plan(model: PipelineModel, plan: WholePlan, rank: int, data: StepData) -> TorchPipeline:
    """Return a rank of our plan on PyTorch's unchanged runtime; collective."""
    placement = plan.problem.placement
    modules = _modules(model, placement.stages_of[rank], placement.n_stages)
    stages = _stages(modules, placement.n_stages)
    runtime: Any = _PipelineScheduleRuntime  # torch has no types for its constructor
    schedule = runtime(stages, plan.problem.microbatches, loss_fn=model.loss)
    load(schedule, lowered(plan.problem, relabelled(plan.orders, placement.n_stages)))
    return TorchPipeline(schedule, modules, placement.n_stages - 1, data)


def _modules(model: PipelineModel, indices: Sequence[int], n_stages: int) -> dict[int, nn.Module]:
    return {index: build_stage(model, index, n_stages, _CPU) for index in indices}


def _stages(modules: Mapping[int, nn.Module], n_stages: int) -> list[PipelineStage]:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))
    return [PipelineStage(module, index, n_stages, _CPU, group=group) for index, module in modules.items()]
