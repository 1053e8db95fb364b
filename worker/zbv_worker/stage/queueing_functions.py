"""Functions of autograd that queue weight gradients in their backward, or expose what W needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from zbv_worker.errors import ModelError
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, WeightGrads


class QueueingLinearFunction(torch.autograd.Function):
    """y = x Wᵀ + b; its backward returns the gradient of x and queues those of W and b.

    W and b are inputs, so that the output requires a gradient even if x does not, as in the first layer of
    the first stage: I must reach this node there too, or W would find an empty queue.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGrads, is_transposed: bool
    ) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        device = x.device.type
        ctx.input_dtype = x.dtype
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if dtype is not None:
            x = cast_like_autocast(x, dtype)
        ctx.save_for_backward(x, weight)
        # saved_tensors may return other tensors than were saved (checkpointing, offloading), but the gradient
        # must reach the parameter itself.
        ctx.weight = weight if weight.requires_grad else None
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        ctx.queue, ctx.is_transposed = queue, is_transposed
        if is_transposed:
            weight = weight.t()
        if dtype is None:
            output = nnf.linear(x, weight, bias)
        else:
            # Cast here: autocast caches its casts of parameters, and a cast made within a Function has no
            # graph. Some versions of torch reuse that cast for the parameter's next use, whose gradient is
            # then lost.
            cast_bias = None if bias is None else cast_like_autocast(bias, dtype)
            output = nnf.linear(x, cast_like_autocast(weight, dtype), cast_bias)
        # With more than two dimensions, the output is a view. Autograd forbids in-place writes to views that
        # a Function returns, so nn.ReLU(inplace=True) would fail. The base has no other user, so it is safe.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x, and those of W and b if they were asked for."""
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        # Detached: the queue must not keep the graph of x alive.
        deferred = LinearGrad(x.detach(), grad_output.detach(), ctx.weight, ctx.bias, ctx.is_transposed)
        asked: tuple[Tensor | None, ...] = (None, None)
        accumulates = _accumulates(ctx, (1, 2))
        if accumulates is None:
            asked = deferred.gradients()
        elif accumulates:
            ctx.queue.append(deferred)
        if not ctx.needs_input_grad[0]:
            return None, *asked, None, None
        weight = (weight.t() if ctx.is_transposed else weight).to(grad_output.dtype)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                grad_input = grad_output.matmul(weight)
        else:  # the usual case; the context takes longer than a small product
            grad_input = grad_output.matmul(weight)
        return grad_input.to(ctx.input_dtype), *asked, None, None


class QueueingEmbeddingFunction(torch.autograd.Function):
    """Rows of W by index; its backward queues the gradient of W. Indices have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        scale_by_frequency: bool,
        queue: WeightGrads,
    ) -> Tensor:
        """Integers (...) to (..., embedding_dim)."""
        ctx.save_for_backward(indices)
        ctx.parameter = weight
        ctx.padding_idx = padding_idx
        ctx.scale_by_frequency = scale_by_frequency
        ctx.queue = queue
        return nnf.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of W if it was asked for; an index has none."""
        (grad_output,) = grad_outputs
        (indices,) = ctx.saved_tensors
        deferred = EmbeddingGrad(
            indices, grad_output.detach(), ctx.parameter, ctx.padding_idx, ctx.scale_by_frequency
        )
        accumulates = _accumulates(ctx, (1,))
        if accumulates:
            ctx.queue.append(deferred)
        return None, deferred.gradient() if accumulates is None else None, None, None, None


def is_accumulating(ctx: Any, parameters: tuple[int, ...]) -> bool:
    """Whether the current backward accumulates into parameters, rather than being ``torch.autograd.grad``.

    Raises
    ------
    ModelError
        If the backward needs a gradient that only W will compute.
    """
    accumulates = _accumulates(ctx, parameters)
    if accumulates is None:
        raise ModelError(
            "found torch.autograd.grad of a weight whose gradient is deferred to W and not computed yet. Use "
            "a subclass of nn.Linear or nn.Embedding there: subclasses are not split."
        )
    return accumulates


def _accumulates(ctx: Any, parameters: tuple[int, ...]) -> bool | None:
    """:func:`is_accumulating`; None if ``torch.autograd.grad`` was asked for the gradient of a parameter.

    ``ctx.needs_input_grad`` cannot tell: it reflects the forward.
    """
    if torch.is_grad_enabled():
        raise ModelError(
            "found a backward with create_graph=True through a module whose weight gradient W computes, "
            "so gradients of gradients miss it. Use a plan with B instead of I and W, or use a subclass "
            "of nn.Linear or nn.Embedding there: subclasses are not split."
        )
    nodes = (ctx.next_functions[at][0] for at in parameters if ctx.needs_input_grad[at])
    try:
        are_executed = [torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError:  # torch cannot answer for a leaf that autograd.grad was asked for
        return None
    return any(are_executed)


def cast_like_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does: floating point, but not double precision."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


class Tap(torch.autograd.Function):
    """Returns the output unchanged; the tap gets the output's gradient too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tensor) -> Tensor:
        """The output."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The output's gradient, twice."""
        (grad_output,) = grad_outputs
        return grad_output, grad_output
