"""Divides microbatches and losses among the replicas of the pipeline."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbv_worker.errors import ModelError
from zbv_worker.model.protocol import Evaluated, Microbatch, PipelineModel
from zbv_worker.transport.channels import Transport


class DataOfReplica:
    """A replica's share of a step's microbatches.

    A step has N parts, each a run of the plan with m microbatches on each of R replicas. In part e, replica d
    has the microbatches from (e·R + d)·m on. So N parts, or N replicas, train on the same microbatches as one
    pipeline with as many.

    Parameters
    ----------
    microbatches
        m.
    parts
        N.
    """

    def __init__(
        self, model: PipelineModel, microbatches: int, replica: int, replicas: int = 1, parts: int = 1
    ):
        self._model = model
        self._first = replica * microbatches
        self._of_part = replicas * microbatches
        self._parts = parts

    def microbatch(self, number: int, index: int) -> Microbatch | tuple[Any, ...]:
        """A microbatch of a run of the plan; ``number`` counts the runs before it."""
        step, part = divmod(number, self._parts)
        found = self._model.microbatch(step, part * self._of_part + self._first + index)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(found)):
            raise ModelError(
                "microbatch returned a tensor that requires a gradient, which a run does not compute. Detach "
                "it, or make the module that computes it the first layer."
            )
        return found

    def evaluation_microbatch(self, step: int, index: int) -> Microbatch | tuple[Any, ...]:
        """A microbatch of an evaluation before a step, of the evaluation data if the model has such data."""
        if isinstance(self._model, Evaluated):
            return self._model.evaluation_microbatch(step, self._first + index)
        return self._model.microbatch(step, self._first + index)


def mean_over_replicas(
    transport: Transport, value: Tensor | None, timeout: float, device: torch.device
) -> Tensor | None:
    """The mean of a scalar over the replicas of a position; None if they have none.

    Collective even without a number, so that no replica ends a step before all have begun it (see
    :mod:`zbv_worker.training.plan_change`).
    """
    replicas = transport.layout.replicas
    if replicas == 1:
        return value
    total = (
        torch.zeros(1, dtype=torch.float64, device=device) if value is None else value.reshape(1) / replicas
    )
    transport.sum_over_replicas(total).wait(timeout)
    return None if value is None else total[0]


def seed_generators(seed: int, transport: Transport) -> None:
    """Give every position and replica its own random numbers: replicas with equal dropout would learn less.

    The inner ranks of a replica get equal ones, or dropout would make their common activations differ.
    Called after the stages are built, because the model may have seeded the same generators.
    """
    place = transport.pp_rank * transport.layout.replicas + transport.replica
    digest = hashlib.sha256(f"{seed}/{place}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))
    random.seed(digest)
