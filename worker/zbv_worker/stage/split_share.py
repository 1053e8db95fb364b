"""How much of a stage's weight gradients W computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class SplitShare:
    """The share of a stage's weight gradients that W computes."""

    share: float
    """The share of the elements of all trainable parameters, 0 to 1."""
    unsplit: tuple[str, ...]
    """The modules whose gradients I computes, as ``name (Class)``, those with the most parameters first."""

    @classmethod
    def of(cls, module: nn.Module, queued: Collection[Tensor]) -> SplitShare | None:
        """The share of a module with these queued parameters; None without trainable parameters."""
        trainable = {parameter for parameter in module.parameters() if parameter.requires_grad}
        elements = sum(parameter.numel() for parameter in trainable)
        if not elements:
            return None
        left: dict[str, int] = {}
        for name, child in module.named_modules():
            own = [p for p in child.parameters(recurse=False) if p in trainable and p not in queued]
            if own:
                left[f"{name or 'the stage'} ({type(child).__name__})"] = sum(p.numel() for p in own)
        split = sum(parameter.numel() for parameter in trainable if parameter in queued)
        return cls(split / elements, tuple(sorted(left, key=lambda each: -left[each])))

    @property
    def is_small(self) -> bool:
        """Whether W is too small to fill many bubbles."""
        return self.share < 0.5

    def __str__(self) -> str:
        some, more = ", ".join(self.unsplit[:3]), len(self.unsplit) - 3
        others = f" and {more} more" if more > 0 else ""
        return f"W computes {self.share:.0%} of the weight gradients; I computes those of {some}{others}"
