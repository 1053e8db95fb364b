"""Adds the gradients of a step to those of earlier steps, until the user zeroes them.

``.grad`` is the truth: what the user sets, scales or zeroes there counts. A parameter in half precision has a
main gradient as well (:mod:`zbv_worker.stage.main_gradients`), of which ``.grad`` is a rounded copy. As long
as nobody has changed that copy, the next step adds to the main gradient, so that several steps are summed in
float32 too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zbv_worker.stage.main_gradients import gradient_of, has_main_gradient, is_half, set_gradient
from zbv_worker.training.gradients import Gradients


class Accumulation:
    """The gradients of one rank over several steps."""

    def __init__(self, gradients: Gradients):
        self.gradients = gradients
        self._before: list[tuple[nn.Parameter, Tensor]] = []
        self._rounded: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def replace(self, make: Callable[[], Gradients]) -> None:
        """Call between steps when other parameters are trained: go on with the gradients that this makes."""
        self.gradients.rest(forget=True)
        self._rounded.clear()  # copies of main gradients that are forgotten now
        self.gradients = make()

    def begin(self, *, in_place: bool) -> None:
        """Call before a step's first action.

        Parameters
        ----------
        in_place
            Whether the step adds to the earlier gradients. Otherwise they are kept separately, because the
            step's own gradients are still to be scaled, or summed over replicas.
        """
        before = [(p, total) for p in self.gradients.parameters if (total := self._total(p)) is not None]
        if not in_place and self.gradients.reuses_memory:
            before = [(parameter, total.clone()) for parameter, total in before]
        self._rounded.clear()
        self.gradients.begin()
        if in_place:
            for parameter, total in before:
                _set(parameter, total)
        self._before = [] if in_place else before

    def end(self, factor: Tensor | float = 1.0) -> None:
        """Call once the step's gradients are complete: scale them, add the earlier ones, set ``.grad``."""
        self.gradients.scale(factor)
        before, self._before = self._before, []
        for parameter, total in before:
            own = gradient_of(parameter)
            if own is None:
                _set(parameter, total)
            else:
                own.add_(total)
        self._hand_over()

    def cancel(self) -> None:
        """Discard a step that was not added in place; ``.grad`` is as before the step."""
        self.gradients.begin()
        before, self._before = self._before, []
        for parameter, total in before:
            _set(parameter, total)
        self._hand_over()

    def _hand_over(self) -> None:
        self.gradients.hand_over(keep=True)
        for parameter in self.gradients.parameters:
            grad = parameter.grad
            if grad is not None and has_main_gradient(parameter):
                self._rounded[parameter] = grad, grad._version
        self.gradients.rest()

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of a parameter's gradients so far; None if the user has zeroed it, or there is none."""
        grad = parameter.grad
        if grad is None or not has_main_gradient(parameter):
            return grad
        rounded, version = self._rounded.get(parameter, (None, 0))
        if rounded is grad and version == grad._version:
            return gradient_of(parameter)
        return grad.to(torch.float32)


def _set(parameter: nn.Parameter, total: Tensor) -> None:
    """Make a sum the gradient; whether that is a main gradient may have changed since the step before."""
    if is_half(parameter):
        total = total.to(torch.float32 if has_main_gradient(parameter) else parameter.dtype)
    set_gradient(parameter, total)
