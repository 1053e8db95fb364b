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
from torch._subclasses.fake_tensor import FakeTensor

_HALVES = (torch.bfloat16, torch.float16)
_BLOCK_ELEMENTS = 1 << 20
"""The most elements of a temporary product; 2 to 4 MiB, enough for a product's full speed."""
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
    """Give trainable parameters in half precision a main gradient, initially None. Idempotent.

    From now on every backward adds to it, until :func:`rest_main_gradients`.
    """
    for parameter in parameters:
        if not (is_half(parameter) and parameter.requires_grad):
            continue
        hooks = parameter._post_accumulate_grad_hooks or {}
        if any(not isinstance(hook, OwnHook) for hook in hooks.values()):
            if has_main_gradient(parameter):
                delattr(parameter, _NAME)
                _remove_move(parameter)
            continue
        if not has_main_gradient(parameter):
            setattr(parameter, _NAME, None)
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
                delattr(parameter, _NAME)


def _remove_move(parameter: Tensor) -> None:
    hooks = parameter._post_accumulate_grad_hooks or {}
    for at in [at for at, hook in hooks.items() if hook is _MOVE]:
        del hooks[at]


def has_main_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a main gradient, even if it is still None."""
    return _NAME in parameter.__dict__


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The tensor that a parameter's gradients are added to: the main gradient, or ``.grad``."""
    found: Tensor | None = getattr(parameter, _NAME) if has_main_gradient(parameter) else parameter.grad
    return found


def _dense_gradient_of(parameter: Tensor) -> Tensor | None:
    """:func:`gradient_of`, made dense if a sparse embedding has left a sparse one, as autograd does."""
    total = gradient_of(parameter)
    if total is not None and total.is_sparse:
        total = total.to_dense()
        set_gradient(parameter, total)
    return total


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Make this tensor the sum of a parameter's gradients; None: the first gradient creates it."""
    if has_main_gradient(parameter):
        setattr(parameter, _NAME, gradient)
        parameter.grad = None
    else:
        parameter.grad = gradient


def rows_of(tensor: Tensor) -> Tensor:
    """A tensor (..., n) as (rows, n); either may be zero."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient, possibly of a smaller dtype, without converting a copy of it first."""
    total = _dense_gradient_of(parameter)
    if total is not None:
        total.add_(gradient)
    else:
        set_gradient(parameter, gradient.to(dtype_of_sum(parameter)))


def add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product, without a temporary of the parameter's size.

    If the sum is in float32 and the factors are in half precision, a GPU accumulates in one operator. Other
    devices have no such operator in torch 2.13 (``addmm.dtype_out``): they compute blocks of rows.
    """
    total = _dense_gradient_of(parameter)
    if total is not None:  # most calls
        add_product_to(total, left, right)
    else:
        set_gradient(parameter, product(left, right, dtype_of_sum(parameter)))


def add_grouped_products(parameter: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Add leftᵀ·right of each group of rows to that group's slice of a gradient (groups, out, in).

    Parameters
    ----------
    left, right
        (rows, out) and (rows, in), in the order of groups.
    ends
        The end of each group's rows, an integer tensor (groups,). To read it waits for a GPU.
    """
    total = _dense_gradient_of(parameter)
    if total is None:
        total = torch.zeros(parameter.shape, dtype=dtype_of_sum(parameter), device=left.device)
        set_gradient(parameter, total)
    if isinstance(ends, FakeTensor):  # without values; groups of equal size take as many operations
        first = len(left) // len(ends)
        add_product_to(total[0], left[:first].t(), right[:first])
        _count_product(total[0], left[first:].t(), right[first:])
        return
    begin = 0
    for group, end in zip(total, ends.tolist(), strict=True):
        if end > begin:
            add_product_to(group, left[begin:end].t(), right[begin:end])
        begin = end


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product in a dtype that may be larger than the one of the factors."""
    if left.dtype == dtype:
        return left.mm(right)
    if _is_fused(dtype, left):
        return torch.mm(left, right, out_dtype=dtype)
    total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    add_product_to(total, left, right)
    return total


def add_product_to(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a sum, in place."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    # torch has another path for one row, in which it takes the sum for a bias (isInputCompliesAddmmCudaLt).
    elif _is_fused(total.dtype, left) and len(total) > 1:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        rows = max(1, _BLOCK_ELEMENTS // max(1, total.shape[1]))
        if isinstance(total, FakeTensor) and len(total) > rows:
            _count_product(total[rows:], left[rows:], right)
            total, left = total[:rows], left[:rows]
        for at in range(0, len(total), rows):
            total[at : at + rows].add_(left[at : at + rows].mm(right))


def _count_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Do the operations of a product in an estimate, with factors of one element of memory.

    One block or group of a product shows how much memory all of them take. To go through thousands of them
    would take an estimate longer than all the rest.
    """
    total.addmm_(*(x.new_zeros((), dtype=total.dtype).expand(x.shape) for x in (left, right)))


def _is_fused(dtype: torch.dtype, factor: Tensor) -> bool:
    """Whether torch adds a product of these factors to a sum of this dtype in one operator."""
    return dtype == torch.float32 and factor.dtype in _HALVES and factor.is_cuda


def add_rows(parameter: Tensor, indices: Tensor, rows: Tensor, ignored: int) -> None:
    """Add rows (..., width) to those rows of the gradient (n, width) that ``indices`` (...) names.

    Needs no temporary of the parameter's size, and is deterministic on CPUs and GPUs.

    Parameters
    ----------
    ignored
        An index whose rows are not added; -1 for none.
    """
    dtype = dtype_of_sum(parameter)
    flat, some = indices.reshape(-1), rows_of(rows).to(dtype)
    if ignored >= 0:
        some = some.masked_fill((flat == ignored).unsqueeze(-1), 0)
    total = _dense_gradient_of(parameter)
    if total is None:
        total = torch.zeros(parameter.shape, dtype=dtype, device=rows.device)
        set_gradient(parameter, total)
    if total.is_cuda:
        total.index_put_((flat,), some, accumulate=True)  # sorts; index_add_ would add in any order
    else:
        total.index_add_(0, flat, some)


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter's gradients are summed."""
    total = gradient_of(parameter)
    if total is not None:
        return total.dtype
    return torch.float32 if has_main_gradient(parameter) else dtype_of_gradient(parameter)


def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """The dtype of ``.grad``, which the user may set (``grad_dtype``); None there stands for any."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


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
                setattr(parameter, _NAME, None)
