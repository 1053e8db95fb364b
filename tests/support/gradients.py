"""Compares gradients, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn


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
