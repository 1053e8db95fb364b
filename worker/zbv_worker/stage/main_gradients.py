"""Main gradients: float32 sums of the microbatches' gradients of parameters in half precision.

bfloat16 has 8 significant bits. A sum in bfloat16 loses everything smaller than 1/256 of the sum so far. As
in Megatron-LM (``accumulate_allreduce_grads_in_fp32``), such a parameter therefore has a ``main_grad`` in
float32, which is rounded to ``.grad`` once, before the optimizer's step.

A parameter with post-accumulate hooks of the user keeps torch's own accumulation, which those hooks expect.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_NAME = "main_grad"  # as in Megatron-LM and TransformerEngine


class OwnHook:
    """A post-accumulate hook of the worker. A parameter with such hooks may still be queued for W."""


class _Move(OwnHook):
    """Moves the gradient that autograd has just accumulated to the main gradient."""

    def __call__(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            add_gradient(parameter, grad)


_MOVE = _Move()


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter is in half precision."""
    return parameter.dtype in _HALVES


def use_main_gradients(parameters: Iterable[Tensor]) -> None:
    """Give trainable parameters in half precision a main gradient, initially None. Idempotent."""
    for parameter in parameters:
        if not (is_half(parameter) and parameter.requires_grad):
            continue
        hooks = parameter._post_accumulate_grad_hooks or {}
        if any(not isinstance(hook, OwnHook) for hook in hooks.values()):
            if has_main_gradient(parameter):
                delattr(parameter, _NAME)
                for at in [at for at, hook in hooks.items() if hook is _MOVE]:
                    del hooks[at]
        elif not has_main_gradient(parameter):
            setattr(parameter, _NAME, None)
            parameter.register_post_accumulate_grad_hook(_MOVE)  # type: ignore[no-untyped-call]  # torch's own


def has_main_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a main gradient, even if it is still None."""
    return _NAME in parameter.__dict__


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The tensor that a parameter's gradients are added to: the main gradient, or ``.grad``."""
    found: Tensor | None = getattr(parameter, _NAME) if has_main_gradient(parameter) else parameter.grad
    return found


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Make this tensor the sum of a parameter's gradients; None: the first gradient creates it."""
    if has_main_gradient(parameter):
        setattr(parameter, _NAME, gradient)
        parameter.grad = None
    else:
        parameter.grad = gradient


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient, possibly of a smaller dtype, without converting a copy of it first."""
    total = gradient_of(parameter)
    if total is not None:
        total.add_(gradient)
    else:
        set_gradient(
            parameter, gradient.to(torch.float32 if has_main_gradient(parameter) else parameter.dtype)
        )


def round_main_gradients(parameters: Iterable[Tensor], *, keep: bool = False) -> None:
    """Set ``.grad`` from every main gradient, for the optimizer.

    Parameters
    ----------
    keep
        Whether to keep the main gradients; otherwise each is freed as soon as it is rounded.
    """
    for parameter in parameters:
        if has_main_gradient(parameter):
            main = gradient_of(parameter)
            parameter.grad = None if main is None else main.to(parameter.dtype)
            if not keep:
                setattr(parameter, _NAME, None)
