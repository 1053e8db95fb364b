"""A rank's actions with nothing around them: the stages' own compute, and no more."""

from __future__ import annotations

import torch
from torch import Tensor

from zbv_worker.bench.torch_schedules import StepData
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.split_backward import WeightGrads, defer_weight_gradients
from zbv_worker.model import PipelineModel, build_stage

_CPU = torch.device("cpu")


class PlainLoop:
    """Runs every F, I, W and B of a rank's list on tensors that are there already.

    Inputs are the first stage's data at every stage, and gradients are ones: as much work, no transfers.
    """

    def __init__(self, model: PipelineModel, plan: RankPlan, data: StepData):
        self._actions = plan.actions
        self._last = plan.placement.n_stages - 1
        self._modules = {
            index: build_stage(model, index, plan.placement.n_stages, _CPU) for index in plan.stages
        }
        self._recorders = {index: defer_weight_gradients(module) for index, module in self._modules.items()}
        self._loss = model.loss
        self._data = data
        self._split = {(a.stage, a.microbatch) for a in plan.actions if a.letter == "I"}

    def step(self, step: int) -> None:
        """Run the list once; gradients accumulate."""
        outputs: dict[tuple[int, int], Tensor] = {}
        queues: dict[tuple[int, int], WeightGrads] = {}
        for stage, letter, microbatch in self._actions:
            cell = (stage, microbatch)
            if letter == "W":
                queues.pop(cell).run()
            elif letter == "F":
                queue = WeightGrads() if cell in self._split else None
                if queue is not None:
                    queues[cell] = queue
                with self._recorders[stage].into(queue):
                    outputs[cell] = self._forward(stage, microbatch)
            else:
                output = outputs.pop(cell)
                output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]  # torch's own

    def _forward(self, stage: int, microbatch: int) -> Tensor:
        x, target = self._data.microbatch(0, microbatch)
        if stage:
            x = x.detach().requires_grad_()
        output: Tensor = self._modules[stage](x)
        return self._loss(output, target) if stage == self._last else output
