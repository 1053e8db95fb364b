"""What a stage, or one of its layers, was given of the microbatch that it is measured on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.stage import Stage
from zbv_worker.model.protocol import PipelineModel


@dataclass(frozen=True, eq=False)
class Given:
    """A stage with the tensors that it is measured on.

    Attributes
    ----------
    target
        Of the last stage only.
    gradient
        Of the output; None for the last stage.
    """

    stage: Stage
    input: Tensor
    target: Tensor | None
    gradient: Tensor | None
    output: Tensor


class Seen:
    """Watches a stage during the training of one microbatch and keeps what it was given."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._input = self._output = torch.empty(0)
        self._target: Tensor | None = None
        self._gradient: Tensor | None = None
        self._forward, self._backward = stage.forward, stage.backward
        stage.forward = self._see_forward  # type: ignore[method-assign]  # until release
        stage.backward = self._see_backward  # type: ignore[method-assign]  # until release

    def release(self) -> Given:
        """Let the stage be as it was; what it was given."""
        self._stage.forward = self._forward  # type: ignore[method-assign]
        self._stage.backward = self._backward  # type: ignore[method-assign]
        return Given(self._stage, self._input, self._target, self._gradient, self._output)

    def _see_forward(
        self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool
    ) -> Tensor:
        self._input, self._target = input.clone(), target
        self._output = self._forward(microbatch, input, target, split=split)
        return self._output

    def _see_backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        self._gradient = None if grad_output is None else grad_output.clone()
        return self._backward(microbatch, grad_output)


def layers_of(
    given: Given, model: PipelineModel, first: int, n_layers: int, *, is_recomputed: bool = False
) -> dict[int, Given]:
    """The layers of a stage, each as a stage of its own, by their place in the model.

    They share their modules with the stage. What each gets is computed once, forward and backward.

    Parameters
    ----------
    first
        Place of the stage's first layer, of ``n_layers`` in all.
    is_recomputed
        Whether the layers compute their activations again in the backward.
    """
    module, found, x = given.stage.module, {}, given.input
    if not isinstance(module, nn.Sequential):
        raise InvalidRun(f"found a stage of a {type(module).__name__}; layers come in an nn.Sequential.")
    for at, layer in enumerate(module, first):
        is_last = at == n_layers - 1
        loss, target = (model.loss, given.target) if is_last else (None, None)
        stage = Stage(at, n_layers, layer, 1, loss, is_recomputed=is_recomputed)
        output = stage.forward(0, x, target, split=False)
        found[at] = Given(stage, x, target, None, output)
        x = output
    gradient = given.gradient
    for at in reversed(found):
        found[at] = replace(found[at], gradient=gradient)
        gradient = found[at].stage.backward(0, gradient)
    return found
