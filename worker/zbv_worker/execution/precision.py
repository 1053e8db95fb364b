"""Mixed precision: in which type stages compute, and the factor that keeps small gradients from vanishing.

Parameters, their gradients and the optimizer stay in the type that the model gives them; autocast picks the
operators that compute in the smaller one (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "float16"]

AUTOCAST: dict[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What autocast computes in; None: no autocast."""

_FIRST_SCALE = 2.0**16
_GROWTH, _BACK_OFF = 2.0, 0.5
_GOOD_STEPS = 2000
_LARGEST = 2.0**24


@dataclass
class LossScale:
    """The factor by which losses, and so all gradients, are multiplied; the same on every rank.

    float16 has no numbers below 6e-8, where many gradients lie. The factor is halved by a step whose
    gradients overflow, which is then left out, and doubled after many that do not (Micikevicius et al. 2018,
    §3.2).
    Other types have the range of float32 and need none.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """What a precision needs."""
        return cls(_FIRST_SCALE, True) if precision == "float16" else cls()

    @property
    def may_shrink(self) -> bool:
        """Whether gradients that overflow may be finite with a smaller factor."""
        return self.is_dynamic and self.value > 1.0

    def go_on_from(self, saved: LossScale) -> None:
        """Take over the factor of a checkpoint, unless that run had another precision.

        Raises
        ------
        ValueError
            When it is no factor.
        """
        if not (isinstance(saved.value, float) and 1.0 <= saved.value <= _LARGEST):
            raise ValueError(f"the loss scale is {saved.value!r}")
        if not (isinstance(saved.good_steps, int) and 0 <= saved.good_steps < _GOOD_STEPS):
            raise ValueError(f"the loss scale has lasted for {saved.good_steps!r} steps")
        if self.is_dynamic and saved.is_dynamic:
            self.value, self.good_steps = saved.value, saved.good_steps

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step's gradients."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self.good_steps = max(1.0, self.value * _BACK_OFF), 0
            return
        self.good_steps += 1
        if self.good_steps == _GOOD_STEPS:
            self.value, self.good_steps = min(_LARGEST, self.value * _GROWTH), 0
