"""The user's loss, and the outputs that it was computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from zbv_worker.errors import InvalidRun, describe_error


class RecordedLoss:
    """Calls a loss, and keeps the model's outputs if they are wanted.

    Parameters
    ----------
    function
        The user's loss; None for a pipeline that is only evaluated.
    is_recomputed
        Whether the backward of the last stage runs the loss a second time.
    """

    def __init__(self, function: Callable[[Any, Any], Any] | None, *, is_recomputed: bool):
        self.function = function
        self._is_recomputed = is_recomputed
        self._outputs: list[Any] | None = None

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss of a microbatch; raises :class:`InvalidRun` if it fails without a target."""
        # F of a recomputed stage runs without a graph, the second run with one.
        if self._outputs is not None and not (self._is_recomputed and torch.is_grad_enabled()):
            self._outputs.append(tree_map(_detached, output))
        if self.function is None:
            return torch.zeros(())
        try:
            return self.function(output, target)
        except (AttributeError, TypeError) as error:
            if target is not None:
                raise
            raise InvalidRun(
                f"the loss got None as target and failed: {describe_error(error)}. Pass targets to step and "
                f"evaluate on ranks with the last layer, or use a loss that needs none."
            ) from error

    @property
    def is_given(self) -> bool:
        """Whether there is a loss."""
        return self.function is not None

    def require(self) -> None:
        """Raise :class:`InvalidRun` if there is no loss."""
        if self.function is None:
            raise InvalidRun(
                "the pipeline has no loss; training needs one. Pass loss=, a function of output and target: "
                "Pipeline(plan, layers, loss=torch.nn.functional.cross_entropy)."
            )

    def record(self, is_wanted: bool) -> None:
        """Keep the outputs from now on, or no longer."""
        self._outputs = [] if is_wanted else None

    def restart(self) -> None:
        """Forget the outputs so far, because the step runs again."""
        if self._outputs is not None:
            self._outputs = []

    def take(self) -> list[Any]:
        """The outputs since :meth:`record`, in the order of the calls."""
        found, self._outputs = self._outputs, None
        return found or []


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
