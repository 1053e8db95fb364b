"""Adds the gradients of a step to those of earlier steps, until the user zeroes them.

``.grad`` is the truth: what the user sets, scales or zeroes there counts. A parameter in half precision has a
main gradient as well (:mod:`zbv_worker.stage.main_gradients`), of which ``.grad`` is a rounded copy. As long
as nobody has changed that copy, the next step adds to the main gradient, so that several steps are summed in
float32 too.

As in plain autograd, a ``.grad`` that is there before a step is the same tensor afterwards: it may be a part
of the user's own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbv_worker.gradients.gradients import Gradients
from zbv_worker.stage.dtensors import local_of
from zbv_worker.stage.main_gradients import (
    dtype_of_gradient,
    gradient_of,
    has_main_gradient,
    is_half,
    set_gradient,
)


class _Before(NamedTuple):
    """A parameter's gradient before a step."""

    parameter: nn.Parameter
    grad: Tensor
    """The tensor in ``.grad``."""
    total: Tensor
    """The sum so far: that tensor, a copy of it, or the main gradient."""


class Accumulation:
    """The gradients of one rank over several steps."""

    def __init__(self, gradients: Gradients):
        self.gradients = gradients
        self._before: list[_Before] = []
        self._is_in_place = False
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
        self._before = [
            _Before(parameter, parameter.grad, total)
            for parameter in self.gradients.parameters
            if parameter.grad is not None and (total := self._total(parameter)) is not None
        ]
        if not in_place and self.gradients.reuses_memory:
            self._before = [each._replace(total=each.total.clone()) for each in self._before]
        self._is_in_place = in_place
        self._rounded.clear()
        self.gradients.begin()
        if in_place:
            for each in self._before:
                _set(each.parameter, each.total)

    @torch.no_grad()  # the user's gradients may have a graph
    def end(self, factor: Tensor | float = 1.0) -> None:
        """Call once the step's gradients are complete: scale them, add the earlier ones, set ``.grad``."""
        self.gradients.scale(factor)
        if not self._is_in_place:
            for before in self._before:
                self._add(before)
        self._hand_over()

    @torch.no_grad()
    def cancel(self) -> None:
        """Discard a step that was not added in place; ``.grad`` is as before the step."""
        self.gradients.begin()
        for before in self._before:
            self._add(before)
        self._hand_over()

    def _add(self, before: _Before) -> None:
        """Add the gradient before a step to that of the step, in the tensor of the former."""
        parameter, grad, total = before
        added = gradient_of(parameter)
        if added is None:
            _set(parameter, total)
        elif has_main_gradient(parameter) or (total is not grad and _share_memory(added, grad)):
            added.add_(total)
        elif grad.is_sparse and not added.is_sparse:
            parameter.grad = added.add_(grad)  # which a sparse tensor cannot hold
            return
        else:
            grad.add_(added)
        if not has_main_gradient(parameter):
            parameter.grad = grad

    def _hand_over(self) -> None:
        for parameter, grad, _ in self._before:
            if has_main_gradient(parameter):
                parameter.grad = grad  # to be overwritten
        self._before = []
        self.gradients.hand_over(keep=True)
        for parameter in self.gradients.parameters:
            rounded = parameter.grad
            if rounded is not None and has_main_gradient(parameter):
                self._rounded[parameter] = rounded, rounded._version
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


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return local_of(one).data_ptr() == local_of(other).data_ptr()


def _set(parameter: nn.Parameter, total: Tensor) -> None:
    """Make a sum the gradient; whether that is a main gradient may have changed since the step before."""
    if is_half(parameter):
        total = total.to(torch.float32 if has_main_gradient(parameter) else dtype_of_gradient(parameter))
    set_gradient(parameter, total)
