"""Replicas of the pipeline: which microbatches are whose."""

from __future__ import annotations

import torch
from torch import Tensor

from zbv_worker.model.protocol import Evaluated, PipelineModel
from zbv_worker.transport.channels import Transport


class DataOfReplica:
    """A replica's share of a step's microbatches: of m for each, replica d has those from d·m on.

    Together the replicas train on what one pipeline with as many microbatches would.
    """

    def __init__(self, model: PipelineModel, microbatches: int, replica: int):
        self._model = model
        self._first = replica * microbatches

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """See :meth:`zbv_worker.model.protocol.PipelineModel.microbatch`."""
        return self._model.microbatch(step, self._first + index)

    def evaluation_microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """As :meth:`microbatch`, of the data that are kept for evaluation where the model has such."""
        if isinstance(self._model, Evaluated):
            return self._model.evaluation_microbatch(step, self._first + index)
        return self.microbatch(step, index)


def mean_over_replicas(transport: Transport, value: float | None, timeout: float) -> float | None:
    """The mean of a number over the replicas of a position; None where they have none.

    Collective, with and without a number: so that the replicas' steps end after one another's begin (see
    :mod:`zbv_worker.training.plan_change`).
    """
    if transport.layout.replicas == 1:
        return value
    total = torch.tensor([0.0 if value is None else value / transport.layout.replicas], dtype=torch.float64)
    transport.sum_over_replicas(total).wait(timeout)
    return None if value is None else float(total)
