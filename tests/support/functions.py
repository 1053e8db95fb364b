"""Layers of any kind: a function, or an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Function(nn.Module):
    """A layer with some parts, whose forward is a function of the layer and of what it gets."""

    def __init__(self, compute: Callable[..., Any], **parts: Any):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.compute(self, x)


class Adapted(nn.Module):
    """A layer with LoRA's adapter, as PEFT adds it: a frozen linear layer, and what two matrices add."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output
