"""Records of numbers that are added field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Summed:
    """Base class of records that are added field by field."""

    def __add__(self, other: Self) -> Self:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(first + second for first, second in pairs))

    def scaled(self, factor: float) -> Self:
        """All numbers multiplied by a factor."""
        return type(self)(*(value * factor for value in vars(self).values()))


@dataclass(frozen=True)
class PerAction:
    """One number for each of F, I and W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: PerAction) -> PerAction:
        return PerAction(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def scaled(self, factor: float) -> PerAction:
        """All numbers multiplied by a factor."""
        return PerAction(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)

    def __truediv__(self, parts: int) -> PerAction:
        return PerAction(self.forward / parts, self.backward_input / parts, self.backward_weight / parts)

    @property
    def total(self) -> float:
        """F, I and W together."""
        return self.forward + self.backward_input + self.backward_weight
