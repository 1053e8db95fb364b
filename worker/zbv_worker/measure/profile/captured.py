"""Captures the inputs and gradients of a stage, or of its layers, so that its actions can be measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.stage import Stage


@dataclass(frozen=True, eq=False)
class Captured:
    """A stage with the tensors that it is measured on.

    Attributes
    ----------
    target
        Given for the last stage only.
    gradient
        The gradient of the output; None for the last stage.
    """

    stage: Stage
    input: Tensor
    target: Tensor | None
    gradient: Tensor | None
    output: Tensor


class Capture:
    """Captures a stage's tensors while one microbatch is trained."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._input = self._output = torch.empty(0)
        self._target: Tensor | None = None
        self._gradient: Tensor | None = None
        self._forward, self._backward = stage.forward, stage.backward
        stage.forward = self._capture_forward  # type: ignore[method-assign]  # until release
        stage.backward = self._capture_backward  # type: ignore[method-assign]  # until release

    def release(self) -> Captured:
        """Restore the stage's methods; returns the captured tensors."""
        self._stage.forward = self._forward  # type: ignore[method-assign]
        self._stage.backward = self._backward  # type: ignore[method-assign]
        return Captured(self._stage, self._input, self._target, self._gradient, self._output)

    def _capture_forward(
        self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool
    ) -> Tensor:
        self._input, self._target = input.clone(), target
        self._output = self._forward(microbatch, input, target, split=split)
        return self._output

    def _capture_backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        self._gradient = None if grad_output is None else grad_output.clone()
        return self._backward(microbatch, grad_output)


def split_into_layers(
    captured: Captured, model: PipelineModel, first: int, n_layers: int, *, is_recomputed: bool = False
) -> dict[int, Captured]:
    """The layers of a captured stage, each as a stage with its own tensors, by index in the model.

    They share their modules with the stage.

    Parameters
    ----------
    first
        Index of the stage's first layer, of ``n_layers`` in all.
    is_recomputed
        Whether the layers recompute their activations in the backward.
    """
    module, found, x = captured.stage.module, {}, captured.input
    if not isinstance(module, nn.Sequential):
        raise InvalidRun(
            f"found a stage of class {type(module).__name__}; must be an nn.Sequential of layers."
        )
    for at, layer in enumerate(module, first):
        is_last = at == n_layers - 1
        loss, target = (model.loss, captured.target) if is_last else (None, None)
        stage = Stage(at, n_layers, layer, 1, loss, is_recomputed=is_recomputed)
        output = stage.forward(0, x, target, split=False)
        found[at] = Captured(stage, x, target, None, output)
        x = output
    gradient = captured.gradient
    for at in reversed(found):
        found[at] = replace(found[at], gradient=gradient)
        gradient = found[at].stage.backward(0, gradient)
    return found
