"""Queued weight gradients: the work that I leaves to W.

W needs no temporary tensor of the weight's size, except for weights with hooks, which need the whole gradient
of a microbatch, and embeddings that scale gradients by frequency.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.stage.main_gradients import OwnHook, add_gradient, add_grouped_products, add_product, add_rows

if TYPE_CHECKING:
    from zbv_worker.stage.self_deferring import ModuleGrad, StoredGrad


class WeightGrads(deque["LinearGrad | GroupedGrad | EmbeddingGrad | ModuleGrad | StoredGrad"]):
    """The queued weight gradients of one stage and microbatch.

    F registers the queue, I fills it, W runs it. It holds tensors only between I and W.
    """

    def run(self) -> None:
        """Compute every queued gradient and accumulate it into its parameter's ``.grad``.

        Releases each gradient's operands as soon as it is computed. Without ``no_grad`` the results would
        have a graph that keeps all output gradients alive.
        """
        with torch.no_grad():
            while self:
                self.popleft().accumulate()

    def parameters(self) -> set[Tensor]:
        """The parameters that :meth:`run` will add to."""
        return {parameter for deferred in self for parameter in deferred.parameters()}


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks of the user; hooks on its autograd node need :class:`_Node`."""
    if parameter._backward_hooks:
        return True
    after = parameter._post_accumulate_grad_hooks
    return bool(after) and not all(isinstance(hook, OwnHook) for hook in after.values())


@dataclass(frozen=True, eq=False, slots=True)
class LinearGrad:
    """The weight gradient of a Linear, gᵀx (transposed, xᵀg), and the sum of g for the bias."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad_output: Tensor
    is_transposed: bool = False

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
        is_distributed = is_dtensor(self.weight)
        if is_distributed and not self.is_transposed and self._added_locally():
            return
        grad = self.grad_output.reshape(-1, self.grad_output.shape[-1])
        x = self.x.reshape(-1, self.x.shape[-1])
        if self.weight.requires_grad:
            left, right = (x.t(), grad) if self.is_transposed else (grad.t(), x)
            if is_distributed or has_hooks(self.weight):  # a hook needs the whole gradient
                _add(self.weight, left.mm(right))
            else:
                add_product(self.weight, left, right)
        if self.bias is not None and self.bias.requires_grad:
            _add(self.bias, grad.sum(0))

    def _added_locally(self) -> bool:
        from zbv_worker.stage.distributed_grads import add_linear_gradients

        x, grad = self.x, self.grad_output
        if any(map(has_hooks, self.parameters())):
            return False
        return is_dtensor(x) and is_dtensor(grad) and add_linear_gradients(self.weight, self.bias, x, grad)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters whose gradients it adds to."""
        both = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return tuple(parameter for parameter in both if parameter.requires_grad)


@dataclass(frozen=True, eq=False, slots=True)
class GroupedGrad:
    """The gradient of one weight per group of rows, (groups, out, in): gᵀx of each group.

    Attributes
    ----------
    x, grad_output
        (rows, in) and (rows, out), in the order of groups.
    ends
        The end of each group's rows, an integer tensor (groups,).
    """

    weight: Tensor
    x: Tensor
    grad_output: Tensor
    ends: Tensor

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
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


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingGrad:
    """The weight gradient of an Embedding: rows of g summed by index."""

    weight: Tensor
    indices: Tensor
    grad_output: Tensor
    padding_idx: int
    scale_by_frequency: bool

    def accumulate(self) -> None:
        """Add the gradient to ``.grad``; runs under ``no_grad``."""
        is_large = self.weight.numel() > self.grad_output.numel()
        if is_large and not self.scale_by_frequency and not has_hooks(self.weight):
            add_rows(self.weight, self.indices, self.grad_output, self.padding_idx)
            return
        grad = torch.ops.aten.embedding_dense_backward(
            self.grad_output, self.indices, self.weight.shape[0], self.padding_idx, self.scale_by_frequency
        )
        _add(self.weight, grad)

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
