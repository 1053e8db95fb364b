"""The loss of the last stage: a mean over a microbatch, or a sum and its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.values.structure import tensors_of

Loss = Callable[[Any, Any], Any]
"""Takes output and target; returns the mean over a microbatch, or a pair of sum and weight."""


@dataclass(frozen=True)
class WeightedLoss:
    """A loss whose function returns the sum over a microbatch and its weight."""

    function: Callable[[Any, Any], tuple[Tensor, Tensor]]


class Objective:
    """Computes the loss of one stage, checks it, and adds up the weights of its microbatches.

    Attributes
    ----------
    is_weighted
        Whether the loss is a pair; for a plain function, known after the first call.
    """

    def __init__(self, loss: Loss | WeightedLoss):
        self.is_weighted = self._must_have_weight = isinstance(loss, WeightedLoss)
        self._function = loss.function if isinstance(loss, WeightedLoss) else loss
        self._last_weight: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._seed: tuple[float, Tensor] | None = None
        self._sizes: set[int] = set()

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of a microbatch, a scalar; raises :class:`ModelError` if it is not one number."""
        found: object = self._function(output, target)
        if isinstance(found, tuple) and len(found) == 2:
            found, weight = found
            self.is_weighted = True
        elif self._must_have_weight:
            weight = None
        else:
            self._sizes.add(_size_of(target) or _size_of(output))
            return checked_loss(found)
        if not isinstance(weight, Tensor | int | float) or (
            isinstance(weight, Tensor) and weight.numel() != 1
        ):
            raise ModelError(f"the loss returned {shown(weight)} as the weight; must return (sum, weight).")
        # float64, because float32 counts exactly only to 16 million.
        self._last_weight = weight.detach().double() if isinstance(weight, Tensor) else float(weight)
        return checked_loss(found)

    def count(self) -> None:
        """Count the weight of the last call; recomputations do not count."""
        if self.is_weighted:
            self._weight = self._weight + self._last_weight

    def take_weight(self) -> Tensor | float:
        """The sum of the counted weights since the last call of this method; does not wait for a GPU."""
        weight, self._weight = self._weight, 0.0
        return weight

    def require_equal_sizes(self) -> None:
        """Call after a step: raise :class:`ModelError` if its microbatches need weights and have none."""
        sizes, self._sizes = self._sizes, set()
        if len(sizes) > 1 and not self.is_weighted:
            raise ModelError(
                f"the loss returned means over microbatches with targets of {min(sizes)} to {max(sizes)} "
                f"numbers; the mean of such means is not the mean over the batch. Return a pair of the sum "
                f"and its weight, such as the number of tokens (as loss_sum, if the model has methods). For "
                f"equal weights, return (mean, 1.0)."
            )

    def seed(self, loss: Tensor, value: float) -> Tensor:
        """The gradient of the loss; autograd only reads it, so microbatches share one tensor.

        Raises :class:`ModelError` if the loss has no graph.
        """
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on anything that requires a gradient, so the step would train "
                "nothing. Compute it from the output with torch's operators, without detach(), item(), "
                "numpy, no_grad() or integers, and leave at least one parameter trainable."
            )
        known = self._seed
        if known is None or known[0] != value or known[1].dtype is not loss.dtype:
            known = self._seed = (value, torch.full_like(loss, value, requires_grad=False))
        return known[1]


def checked_loss(loss: object) -> Tensor:
    """Return a loss if it is valid; raises :class:`ModelError` otherwise."""
    if is_dtensor(loss):
        loss = loss.full_tensor()
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        of_several = f" of {loss.numel()} numbers" if isinstance(loss, Tensor) else ""
        raise ModelError(
            f"the loss returned {shown(loss)}{of_several}; must be one floating-point number, the mean "
            f"over a microbatch, or a pair of a sum and its weight (from loss_sum, if the model has that)."
        )
    return loss


def _size_of(value: Any) -> int:
    """The number of elements in a value's tensors."""
    if isinstance(value, Tensor):
        return value.numel()
    return sum(tensor.numel() for tensor in tensors_of(value))


def shown(output: object) -> str:
    """The class of a value, for errors."""
    return f"a {output.dtype} tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"
