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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.stage.main_gradients import (
    OwnHook,
    add_gradient,
    add_grouped_products,
    add_product,
    add_rows,
    rows_of,
)


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
                deferred.require_unchanged()
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
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = self.x._version + self.grad_output._version

    def require_unchanged(self) -> None:
        """Raise :class:`ModelError` if somebody has written to the operands since they were queued."""
        if self.x._version + self.grad_output._version != self._version:
            raise ModelError(
                f"the input {list(self.x.shape)} of a layer, or the gradient {list(self.grad_output.shape)} "
                f"of its output, was written to before W computed the gradient of the weight. Do not write "
                f"to them (use x = x + y in place of x += y), or use a plan with B in place of I and W."
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
        is_distributed = is_dtensor(self.grad_output)
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
        from zbv_worker.stage.dtensors import add_linear_gradients

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
