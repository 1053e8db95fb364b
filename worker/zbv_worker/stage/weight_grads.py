"""Queued weight gradients: the work that I leaves to W.

W needs no temporary tensor of the weight's size, except for weights with hooks, which need the whole gradient
of a microbatch, and embeddings that scale gradients by frequency.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor

HALVES = (torch.bfloat16, torch.float16)
_BLOCK_ELEMENTS = 1 << 20
"""The most elements of a temporary product; 2 to 4 MiB, enough for a product's full speed."""
MAIN_GRADIENT = "main_grad"
"""The attribute of a parameter that has one, as in Megatron-LM and TransformerEngine."""


class OwnHook:
    """A post-accumulate hook of the worker. A parameter with such hooks may still be queued for W."""


class WeightGrads(deque["LinearGrad | GroupedGrad | EmbeddingGrad"]):
    """The queued weight gradients of one stage and microbatch.

    F registers the queue, I fills it, W runs it. It holds tensors only between I and W.
    """

    def run(self) -> None:
        """Compute every queued gradient and accumulate it into its parameter's ``.grad``.

        Releases each gradient's operands as soon as it is computed. Without ``no_grad`` the results would
        have a graph that keeps all output gradients alive, and autocast of the user, around the whole step,
        would round them. Raises :class:`ModelError` if an operand was written to since I, as autograd does
        for what it saved.
        """
        device = self[0].grad_output.device.type if self else "cpu"
        is_cast = torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, enabled=False) if is_cast else nullcontext():
            while self:
                deferred = self.popleft()
                if deferred.x._version + deferred.grad_output._version != deferred.version:
                    raise deferred.changed
                deferred.accumulate()

    def parameters(self) -> set[Tensor]:
        """The parameters that :meth:`run` will add to."""
        return {parameter for deferred in self for parameter in deferred.parameters()}


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks of the user; hooks on its autograd node need :class:`_Node`."""
    if parameter._backward_hooks:
        return True
    after = parameter._post_accumulate_grad_hooks
    return bool(after) and not all(isinstance(hook, OwnHook) for hook in after.values())


@dataclass(eq=False, slots=True)
class _Operands:
    """What W needs of one call of a module: its input, and the gradient of its output."""

    x: Tensor
    grad_output: Tensor
    version: int = field(init=False)
    """Of both, when they were queued; a write changes it."""

    def __post_init__(self) -> None:
        self.version = self.x._version + self.grad_output._version

    @property
    def changed(self) -> ModelError:
        """The error if somebody has written to the operands since they were queued."""
        return ModelError(
            f"the input {list(self.x.shape)} of a layer, or the gradient {list(self.grad_output.shape)} of "
            f"its output, was written to before W computed the gradient of the weight. Do not write to them "
            f"(use x = x + y in place of x += y), or use a plan with B in place of I and W."
        )


@dataclass(eq=False, slots=True)
class LinearGrad(_Operands):
    """The weight gradient of a Linear, gᵀx (transposed, xᵀg), and the sum of g for the bias.

    Parameters that are None need no gradient.
    """

    weight: Tensor | None
    bias: Tensor | None
    is_transposed: bool = False

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
        is_distributed = type(self.grad_output) is not Tensor and is_dtensor(self.grad_output)
        if is_distributed and not self.is_transposed and self._added_locally():
            return
        grad, x = rows_of(self.grad_output), rows_of(self.x)
        if self.weight is not None and self.weight.requires_grad:
            left, right = (x.t(), grad) if self.is_transposed else (grad.t(), x)
            if is_distributed or has_hooks(self.weight):  # a hook needs the whole gradient
                _add(self.weight, left.mm(right))
            else:
                add_product(self.weight, left, right)
        if self.bias is not None and self.bias.requires_grad:
            _add(self.bias, grad.sum(0))

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias themselves, where they are needed."""
        grad, x = rows_of(self.grad_output), rows_of(self.x)
        weight = bias = None
        if self.weight is not None:
            weight = (x.t().mm(grad) if self.is_transposed else grad.t().mm(x)).to(self.weight.dtype)
        if self.bias is not None:
            bias = grad.sum(0).to(self.bias.dtype)
        return weight, bias

    def _added_locally(self) -> bool:
        from zbv_worker.stage.distributed_grads import add_linear_gradients

        x, grad = self.x, self.grad_output
        if any(map(has_hooks, self.parameters())):
            return False
        return is_dtensor(x) and is_dtensor(grad) and add_linear_gradients(self.weight, self.bias, x, grad)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to."""
        both = (self.weight, self.bias)
        return tuple(parameter for parameter in both if parameter is not None and parameter.requires_grad)


@dataclass(eq=False, slots=True)
class GroupedGrad(_Operands):
    """The gradient of one weight per group of rows, (groups, out, in): gᵀx of each group.

    ``x`` and ``grad_output`` are (rows, in) and (rows, out), in the order of groups.
    """

    weight: Tensor
    ends: Tensor
    """The end of each group's rows, an integer tensor (groups,)."""

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
        if not self.weight.requires_grad:
            return
        if not has_hooks(self.weight):
            add_grouped_products(self.weight, self.grad_output, self.x, self.ends)
            return
        whole = torch.zeros_like(self.weight)
        whole.grad = whole.detach()
        add_grouped_products(whole, self.grad_output, self.x, self.ends)
        _add(self.weight, whole.grad)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to."""
        return (self.weight,)


@dataclass(eq=False, slots=True)
class EmbeddingGrad(_Operands):
    """The weight gradient of an Embedding: rows of g summed by index, which ``x`` holds."""

    weight: Tensor
    padding_idx: int | None
    scale_by_frequency: bool

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
        if not self.weight.requires_grad:
            return
        is_large = self.weight.numel() > self.grad_output.numel()
        if is_large and not self.scale_by_frequency and not has_hooks(self.weight):
            add_rows(self.weight, self.x, self.grad_output, self._padding)
        else:
            _add(self.weight, self.gradient())

    def gradient(self) -> Tensor:
        """The gradient itself."""
        found: Tensor = torch.ops.aten.embedding_dense_backward(
            self.grad_output, self.x, self.weight.shape[0], self._padding, self.scale_by_frequency
        )
        return found

    @property
    def _padding(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx % len(self.weight)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to."""
        return (self.weight,)


def _add(parameter: Tensor, grad: Tensor) -> None:
    if has_hooks(parameter):
        # The hooks were added after F. Autograd's own node of the parameter calls them.
        edge = GradientEdge(get_gradient_edge(parameter).node, 0)
        torch.autograd.backward((edge,), (grad.to(parameter.dtype),))
    else:
        add_gradient(parameter, grad)


def has_main_gradient(parameter: Tensor) -> bool:
    """Whether a parameter has a main gradient, even if it is still None."""
    return MAIN_GRADIENT in parameter.__dict__


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The tensor that a parameter's gradients are added to: the main gradient, or ``.grad``."""
    found: Tensor | None = parameter.__dict__.get(MAIN_GRADIENT, parameter.grad)
    return found


def _dense_gradient_of(parameter: Tensor) -> Tensor | None:
    """:func:`gradient_of`, made dense if a sparse embedding has left a sparse one, as autograd does."""
    total: Tensor | None = parameter.__dict__.get(MAIN_GRADIENT, parameter.grad)
    if total is not None and total.is_sparse:
        total = total.to_dense()
        set_gradient(parameter, total)
    return total


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Make this tensor the sum of a parameter's gradients; None: the first gradient creates it."""
    if has_main_gradient(parameter):
        setattr(parameter, MAIN_GRADIENT, gradient)
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
    return dtype == torch.float32 and factor.dtype in HALVES and factor.is_cuda


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
