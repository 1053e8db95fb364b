"""Captures the inputs and gradients of a stage, or of its layers, so that its actions can be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.precision import AUTOCAST
from zbv_worker.stage.program import PLAIN, Program
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


def capture(stage: Stage) -> Callable[[], Captured]:
    """Record a stage's tensors while one microbatch is trained.

    Call the returned function after that: it restores the stage and returns the tensors.
    """
    seen: dict[str, Tensor | None] = {}
    forward, backward = stage.forward, stage.backward

    def recorded_forward(
        microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool
    ) -> Tensor:
        seen["input"], seen["target"] = input.clone(), target
        output = seen["output"] = forward(microbatch, input, target, split=split)
        return output

    def recorded_backward(microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        seen["gradient"] = None if grad_output is None else grad_output.clone()
        return backward(microbatch, grad_output)

    def release() -> Captured:
        stage.forward, stage.backward = forward, backward  # type: ignore[method-assign]
        return Captured(stage, **seen)  # type: ignore[arg-type]  # after a microbatch, all are set

    stage.forward, stage.backward = recorded_forward, recorded_backward  # type: ignore[method-assign]
    return release


def split_into_layers(
    captured: Captured,
    model: PipelineModel,
    first: int,
    n_layers: int,
    *,
    program: Program = PLAIN,
    is_recomputed: bool = False,
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
        autocast = AUTOCAST[program.precision]
        stage = Stage(at, n_layers, layer, 1, loss, autocast, is_recomputed=is_recomputed)
        output = stage.forward(0, x, target, split=False)
        found[at] = Captured(stage, x, target, None, output)
        x = output
    gradient = captured.gradient
    for at in reversed(found):
        found[at] = replace(found[at], gradient=gradient)
        gradient = found[at].stage.backward(0, gradient)
    return found
