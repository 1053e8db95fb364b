"""A model whose stages compute almost nothing, for measuring the overhead of running a plan."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


def tiny(*, width: int = 8, rows: int = 4, seed: int = 0) -> Tiny:
    """The factory: every stage is one Linear of ``width``, on ``rows`` rows."""
    return Tiny(width, rows, seed)


class Tiny:
    """A pipeline model (see :class:`zbv_worker.model.PipelineModel`) without layers.

    Unlike other models it depends on the number of stages: every stage has one Linear.
    """

    def __init__(self, width: int, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self._width = width
        self._seed = seed
        self._input, self._target = (torch.randn(rows, width, generator=generator) for _ in range(2))

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """A Linear."""
        linear = nn.Linear(self._width, self._width, device=device)
        generator = torch.Generator().manual_seed(self._seed + stage)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(self._width, self._width, generator=generator))
            linear.bias.zero_()
        return linear

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """The same rows each time."""
        return self._input, self._target

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error."""
        return nnf.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=1e-3)
