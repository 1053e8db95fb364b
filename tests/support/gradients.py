"""Gradients of plain autograd and of a split backward, and comparisons, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads


class Named(Protocol):
    """A module, or a pipeline."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def gradients(of: Named) -> dict[str, Tensor | None]:
    """The gradient of every parameter by its name."""
    return {name: parameter.grad for name, parameter in of.named_parameters()}


def train_plainly(layers: Callable[..., Any], loss: Callable[..., Any], *batches: Any) -> Tensor:
    """Add the gradients of whole batches by plain autograd; returns the last mean loss."""
    for inputs, targets in batches:
        found = loss(layers(inputs), targets)
        mean: Tensor = found[0] / found[1] if isinstance(found, tuple) else found
        torch.autograd.backward(mean)
    return mean.detach()


def require_gradients(found: Named, reference: nn.Module, **tolerances: Any) -> None:
    """Require the gradients of a whole model for the parameters that a rank has."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in found.named_parameters():
        if name in expected:  # a rank without trainable parameters has one without elements, too
            torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name, **tolerances)


def gradients_of(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The gradients of modules by name, on the host."""
    return {
        name: parameter.grad.cpu()
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def relative_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest |found - reference| / |reference| (norms) of any parameter.

    Infinite if a parameter is missing, or an error is not a number.
    """
    if found.keys() != reference.keys():
        return math.inf
    errors = [
        float((found[name] - right).norm() / right.norm().clamp_min(1e-12))
        for name, right in reference.items()
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


def split(module: nn.Module, x: Tensor, gradient: Tensor) -> WeightGrads:
    """Run F and I; the caller runs W, which is the queue."""
    queue = WeightGrads()
    with defer_weight_gradients(module).into(queue):
        module(x).backward(gradient)
    return queue


def require_equal(module: nn.Module, right: nn.Module) -> None:
    """Require the gradients of another module."""
    found, expected = gradients_of([module]), gradients_of([right])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
