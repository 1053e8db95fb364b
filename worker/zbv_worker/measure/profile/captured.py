"""Captures the inputs and gradients of a stage, or of its layers, so that its actions can be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.boundary import Gradient
from zbv_worker.stage.layers import NO_KEYWORDS
from zbv_worker.stage.program import AUTOCAST, PLAIN, Program
from zbv_worker.stage.stage import Stage
from zbv_worker.values.packing import copied, zero_gradient


@dataclass(frozen=True, eq=False)
class Captured:
    """A stage with the tensors that it is measured on."""

    stage: Stage
    input: Any
    target: Any
    """Given for the last stage only."""
    gradient: Gradient | None
    """The gradient of the output; None for the last stage."""
    output: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments of the microbatch, if the stage takes any."""


def capture(stage: Stage) -> Callable[[], Captured]:
    """Record a stage's tensors while one microbatch is trained.

    Call the returned function after that: it restores the stage and returns the tensors.
    """
    seen: dict[str, Any] = {}
    forward, backward = stage.forward, stage.backward

    def recorded_forward(
        microbatch: int,
        input: Any,
        target: Any = None,
        *,
        split: bool,
        keywords: Mapping[str, Any] = NO_KEYWORDS,
    ) -> Any:
        seen["input"], seen["target"], seen["keywords"] = copied(input), target, keywords
        output = seen["output"] = forward(microbatch, input, target, split=split, keywords=keywords)
        return output

    def recorded_backward(microbatch: int, grad_output: Gradient | None) -> Any:
        seen["gradient"] = copied(grad_output)
        return backward(microbatch, grad_output)

    def release() -> Captured:
        stage.forward, stage.backward = forward, backward  # type: ignore[method-assign]
        return Captured(stage, **seen)  # after a microbatch, all are set

    stage.forward, stage.backward = recorded_forward, recorded_backward  # type: ignore[method-assign]
    return release


def action_of(captured: Captured, letter: str, microbatch: int, *, split: bool) -> Callable[[], Any]:
    """An action of a stage on its captured tensors."""
    stage, gradient = captured.stage, captured.gradient
    # Several microbatches have the same input, and each may save what it has written.
    input = copied(captured.input) if letter == "F" and stage.writes_to_input else captured.input
    actions: dict[str, Callable[[], Any]] = {
        "F": lambda: stage.forward(
            microbatch, input, captured.target, split=split, keywords=captured.keywords
        ),
        "I": lambda: stage.backward_input(microbatch, gradient),
        "W": lambda: stage.backward_weight(microbatch),
        "B": lambda: stage.backward(microbatch, gradient),
    }
    return actions[letter]


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
    trains = captured.stage.trains_below and captured.stage.index > 0
    if not isinstance(module, nn.Sequential):
        raise InvalidRun(
            f"found a stage of class {type(module).__name__}; must be an nn.Sequential of layers."
        )
    for at, layer in enumerate(module, first):
        is_last = at == n_layers - 1
        loss, target = (model.loss, captured.target) if is_last else (None, None)
        autocast = AUTOCAST[program.precision]
        stage = Stage(
            at,
            n_layers,
            layer,
            1,
            loss,
            autocast,
            is_recomputed=is_recomputed,
            is_compiled=program.is_compiled,
        )
        stage.trains_below = trains
        trains = trains or any(parameter.requires_grad for parameter in layer.parameters())
        output = stage.forward(0, x, target, split=False, keywords=captured.keywords)
        found[at] = Captured(stage, x, target, None, output, captured.keywords)
        x = output
    gradient = captured.gradient
    if gradient is not None and not isinstance(gradient, Tensor):
        # Recomputed layers may expect gradients of more tensors than the stage.
        gradient = zero_gradient(x)
    for at in reversed(found):
        found[at] = replace(found[at], gradient=gradient)
        gradient = found[at].stage.backward(0, gradient)
    return found
