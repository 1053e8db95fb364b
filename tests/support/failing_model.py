"""A model of which one stage fails, or hangs, in the middle of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from zbv_worker.models.tiny import Tiny

What = Literal["raise", "interrupt", "hang", "pause"]


class FailingStage(nn.Module):
    """A Linear that fails at its ``after``-th forward; with ``pause`` it is only slow."""

    def __init__(self, inner: nn.Module, what: What, after: int):
        super().__init__()
        self.inner = inner
        self._what = what
        self._left = after

    def forward(self, value: Tensor) -> Tensor:
        self._left -= 1
        if self._what == "pause":
            time.sleep(0.01)
        elif self._left == 0:
            if self._what == "raise":
                raise ValueError("this stage cannot go on")
            if self._what == "interrupt":
                raise KeyboardInterrupt
            time.sleep(3600)
        output: Tensor = self.inner(value)
        return output


class Failing(Tiny):
    def __init__(self, stage: int, what: What, after: int):
        super().__init__(8, 4, 0)
        self._stage = stage
        self._what = what
        self._after = after

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        inner = super().build_stage(stage, n_stages, device)
        nn.init.eye_(next(inner.parameters()))  # losses stay finite however long a test waits
        return FailingStage(inner, self._what, self._after) if stage == self._stage else inner

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)


def failing(*, stage: int, what: What, after: int = 0, seed: int = 0) -> Failing:
    return Failing(stage, what, after)
