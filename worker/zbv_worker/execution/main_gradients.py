"""Main gradients: what parameters in half precision add their microbatches' gradients to, in float32.

bfloat16 has 8 significant bits. Added up in it, the gradients of many microbatches lose whatever is smaller
than 1/256 of the sum so far. As in Megatron-LM (``accumulate_allreduce_grads_in_fp32``), such a parameter
therefore has a ``main_grad`` in float32, and ``.grad`` is made from it once, before the optimizer's step.

A parameter with post-accumulate hooks of somebody else keeps torch's own accumulation, as those hooks expect.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_NAME = "main_grad"  # as in Megatron-LM and TransformerEngine


class OwnHook:
    """A post-accumulate hook of the worker's. It does not keep a parameter from being queued for W."""


class _Move(OwnHook):
    """Adds what autograd has just accumulated to the main gradient."""

    def __call__(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            add_gradient(parameter, grad)


_MOVE = _Move()


def is_half(parameter: Tensor) -> bool:
    """Whether a parameter is in half precision."""
    return parameter.dtype in _HALVES


def use_main_gradients(parameters: Iterable[Tensor]) -> None:
    """Give trainable parameters in half precision a main gradient, still None. May be called again."""
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
    """Whether a parameter adds up in a main gradient, also while that is None."""
    return _NAME in parameter.__dict__


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What a parameter's gradients are added to: the main gradient, or ``.grad``."""
    found: Tensor | None = getattr(parameter, _NAME) if has_main_gradient(parameter) else parameter.grad
    return found


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Have a parameter's gradients added to this tensor from now on; None: the first one makes it."""
    if has_main_gradient(parameter):
        setattr(parameter, _NAME, gradient)
        parameter.grad = None
    else:
        parameter.grad = gradient


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient, which may be of a smaller type: without a copy of it in the larger one."""
    total = gradient_of(parameter)
    if total is not None:
        total.add_(gradient)
    else:
        set_gradient(
            parameter, gradient.to(torch.float32 if has_main_gradient(parameter) else parameter.dtype)
        )


def round_main_gradients(parameters: Iterable[Tensor], *, keep: bool = False) -> None:
    """Make ``.grad`` of every main gradient, for the optimizer.

    Parameters
    ----------
    keep
        Whether the main gradients stay; else each is freed as soon as it is rounded.
    """
    for parameter in parameters:
        if has_main_gradient(parameter):
            main = gradient_of(parameter)
            parameter.grad = None if main is None else main.to(parameter.dtype)
            if not keep:
                setattr(parameter, _NAME, None)
