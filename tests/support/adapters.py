"""LoRA's adapters, as PEFT adds them."""

from __future__ import annotations

from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer, and what two matrices of a low rank add to its output."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the adapter's."""
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output
