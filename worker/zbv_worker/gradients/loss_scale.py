"""Loss scaling for float16: the factor that keeps small gradients from vanishing."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_worker.stage.program import Precision

_FIRST_SCALE, _LARGEST = 2.0**16, 2.0**24
_GROWTH, _BACK_OFF = 2.0, 0.5
_GOOD_STEPS = 2000
"""So many good steps in a row double the factor."""


@dataclass
class LossScale:
    """The factor of losses, and thus of all gradients; equal on every rank.

    float16 cannot represent numbers below 6e-8, where many gradients lie. A step whose gradients overflow is
    skipped and halves the factor; many good steps in a row double it (Micikevicius et al. 2018, §3.2). Other
    dtypes have the range of float32 and need no factor.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """The loss scale for a precision."""
        return cls(_FIRST_SCALE, True) if precision == "float16" else cls()

    @property
    def may_shrink(self) -> bool:
        """Whether a smaller factor may avoid an overflow."""
        return self.is_dynamic and self.value > 1.0

    def go_on_from(self, saved: LossScale) -> None:
        """Take over a checkpoint's factor, unless its run had another precision.

        Raises
        ------
        ValueError
            If the saved values are invalid.
        """
        if not (isinstance(saved.value, float) and 1.0 <= saved.value <= _LARGEST):
            raise ValueError(f"the loss scale is {saved.value!r}")
        if not (isinstance(saved.good_steps, int) and 0 <= saved.good_steps < _GOOD_STEPS):
            raise ValueError(f"the loss scale has been good for {saved.good_steps!r} steps")
        if self.is_dynamic and saved.is_dynamic:
            self.value, self.good_steps = saved.value, saved.good_steps

    def update(self, *, is_finite: bool) -> None:
        """Adjust the factor after a step."""
        if not self.is_dynamic:
            return
        if not is_finite:
            self.value, self.good_steps = max(1.0, self.value * _BACK_OFF), 0
            return
        self.good_steps += 1
        if self.good_steps == _GOOD_STEPS:
            self.value, self.good_steps = min(_LARGEST, self.value * _GROWTH), 0
