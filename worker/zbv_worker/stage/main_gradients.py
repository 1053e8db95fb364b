"""Main gradients: float32 sums of the microbatches' gradients of parameters in half precision.

bfloat16 has 8 significant bits. A sum in bfloat16 loses everything smaller than 1/256 of the sum so far. As
in Megatron-LM (``accumulate_allreduce_grads_in_fp32``), such a parameter therefore has a ``main_grad`` in
float32, which is rounded to ``.grad`` once, before the optimizer's step.

A parameter with post-accumulate hooks of the user keeps torch's own accumulation, which those hooks expect.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zbv_worker.stage.weight_grads import (
    HALVES,
    MAIN_GRADIENT,
    OwnHook,
    add_gradient,
    dtype_of_gradient,
    gradient_of,
    has_main_gradient,
)


class _Move(OwnHook):
    """Moves the gradient that autograd has just accumulated to the main gradient."""

    def __call__(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            add_gradient(parameter, grad)


_MOVE = _Move()


def use_main_gradients(parameters: Iterable[Tensor]) -> None:
    """Give trainable parameters in half precision a main gradient, initially None. Idempotent.

    From now on every backward adds to it, until :func:`rest_main_gradients`.
    """
    for parameter in parameters:
        if not (parameter.dtype in HALVES and parameter.requires_grad):
            continue
        hooks = parameter._post_accumulate_grad_hooks or {}
        if any(not isinstance(hook, OwnHook) for hook in hooks.values()):
            if has_main_gradient(parameter):
                delattr(parameter, MAIN_GRADIENT)
                _remove_move(parameter)
            continue
        if not has_main_gradient(parameter):
            setattr(parameter, MAIN_GRADIENT, None)
        resume_main_gradients([parameter])


def resume_main_gradients(parameters: Iterable[Tensor]) -> None:
    """Undo :func:`rest_main_gradients`, for parameters that have a main gradient."""
    for parameter in parameters:
        if has_main_gradient(parameter):
            hooks = parameter._post_accumulate_grad_hooks or {}
            if not any(hook is _MOVE for hook in hooks.values()):
                parameter.register_post_accumulate_grad_hook(_MOVE)  # type: ignore[no-untyped-call]  # torch's own


def rest_main_gradients(parameters: Iterable[Tensor], *, forget: bool = False) -> None:
    """Let backwards outside of the worker accumulate into ``.grad`` again.

    Parameters
    ----------
    forget
        Whether to remove the main gradients too.
    """
    for parameter in parameters:
        if has_main_gradient(parameter):
            _remove_move(parameter)
            if forget:
                delattr(parameter, MAIN_GRADIENT)


def _remove_move(parameter: Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks or {}
    for at in [at for at, hook in hooks.items() if hook is _MOVE]:
        del hooks[at]


def round_main_gradients(parameters: Iterable[Tensor], *, keep: bool = False) -> None:
    """Set ``.grad`` from every main gradient, for the optimizer; overwrite it if it is there.

    Parameters
    ----------
    keep
        Whether to keep the main gradients; otherwise each is freed as soon as it is rounded.
    """
    for parameter in parameters:
        if has_main_gradient(parameter):
            main, grad = gradient_of(parameter), parameter.grad
            if main is None or grad is None:
                parameter.grad = None if main is None else main.to(dtype_of_gradient(parameter))
            else:
                grad.copy_(main)
            if not keep:
                setattr(parameter, MAIN_GRADIENT, None)
