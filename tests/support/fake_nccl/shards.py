"""Parameters that replicas divide among them, gathered and summed in the order of ``--shard``.

The order is that of :mod:`zbv_worker.training.sharding`, by stage instead of by layer. Its own memory, which
it resizes in place, is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from zbv_worker.transport.channels import Reduction, Transport

from support.fake_nccl.stages import DTYPE, WIDTH, FakeStage, parameters_of

_TIMEOUT = 60.0


class FakeShards:
    """The parameters of one rank's stages.

    Parameters
    ----------
    order
        The stages in the order in which the plan first uses them.
    """

    def __init__(self, transport: Transport, stages: Mapping[int, FakeStage], order: Sequence[int]):
        self._transport = transport
        self._stages = stages
        self._order = order
        width = WIDTH // transport.layout.replicas
        self.rows = slice(transport.replica * width, (transport.replica + 1) * width)
        self._parts = {
            stage: torch.tensor(parameters_of(stage).tolist()[self.rows], dtype=DTYPE, device="cuda")
            for stage in stages
        }
        self._arriving: dict[int, tuple[Tensor, Reduction]] = {}
        self._whole: dict[int, Tensor] = {}
        self._ahead = 0
        self._sums: dict[int, tuple[Tensor, Reduction]] = {}
        for index, stage in stages.items():
            stage.parameters = lambda index=index: self._needed(index)

    def begin(self) -> None:
        """Start the first gather of a step."""
        self._ahead = 0
        self._prefetch()

    def _prefetch(self) -> None:
        if self._ahead < len(self._order):
            stage, self._ahead = self._order[self._ahead], self._ahead + 1
            whole = torch.empty(WIDTH, dtype=DTYPE, device="cuda")
            self._arriving[stage] = whole, self._transport.gather_over_replicas(self._parts[stage], whole)

    def _needed(self, stage: int) -> Tensor:
        """A stage's whole parameters. The first use waits for them and starts the next gather."""
        if stage in self._arriving:
            whole, reduction = self._arriving.pop(stage)
            reduction.wait(_TIMEOUT)
            self._whole[stage] = whole
            self._prefetch()
        return self._whole[stage]

    def done(self, stage: int) -> None:
        """Start the sum of a stage's gradients, and free its whole parameters."""
        part = torch.empty(WIDTH // self._transport.layout.replicas, dtype=DTYPE, device="cuda")
        summing = self._transport.sum_parts_over_replicas(self._stages[stage].weight, part)
        self._sums[stage] = part, summing
        del self._whole[stage]

    def finish(self) -> dict[int, Tensor]:
        """Wait for the sums; returns this replica's part of each stage's gradients."""
        found = {}
        for stage, (part, reduction) in self._sums.items():
            reduction.wait(_TIMEOUT)
            found[stage] = part
        self._sums.clear()
        return found
