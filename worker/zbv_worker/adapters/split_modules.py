"""Splits the backward of transformers' own kinds of linear layers: ``Conv1D`` of GPT-2, and fused experts.

Experts keep one weight (experts, out, in) for all of them. Between I and W the queue holds the rows that each
expert got and the gradients of its output.

Libraries also subclass ``nn.Linear`` and ``nn.Embedding`` to add a configuration or an initialization, as
torchtitan does. :func:`~zbv_worker.stage.recorder.defer_weight_gradients` leaves all subclasses alone,
so a library's adapter asks for them here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.stage.recorder import ordinary_forward, queueing_class
from zbv_worker.stage.split_backward import (
    Queueing,
    QueueingEmbedding,
    QueueingLinear,
    is_accumulating,
    queue_for,
    queued_linear,
)
from zbv_worker.stage.weight_grads import GroupedGrad, WeightGrads


def split_modules(module: nn.Module) -> None:
    """Change the classes of modules, so that their weight gradients can be queued. Idempotent.

    Parameters, buffers and names stay the same. Experts with biases, without gates or with transposed weights
    stay as they are; I computes their gradients.
    """
    from transformers.pytorch_utils import Conv1D

    child: Any
    for child in module.modules():
        kind: Any = type(child)
        if kind is Conv1D:
            child.__class__ = queueing_class(_QueueingConv1D, kind)
        elif _is_experts(child):
            child.__class__ = queueing_class(_QueueingExperts, kind)


def _is_experts(module: Any) -> bool:
    if isinstance(module, Queueing) or not hasattr(module, "has_gate"):
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    is_plain = module.has_gate and not (
        module.has_bias or module.is_transposed or module.has_post_expert_norm or module._is_expert_parallel
    )
    return is_plain and all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


class _QueueingConv1D(Queueing):
    """A Conv1D, a Linear with a transposed weight, whose weight gradient can be queued."""

    def forward(self: Any, x: Tensor) -> Tensor:
        output = queued_linear(self, x, self.weight, self.bias, is_transposed=True)
        found: Tensor = ordinary_forward(self, x) if output is None else output
        return found


class _QueueingExperts(Queueing):
    """Experts whose weight gradients can be queued."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Hidden states (tokens, width) and the choice of experts (tokens, k) to (tokens, width)."""
        recorder = getattr(self, "recorder", None)
        if recorder is None or recorder.tapping is not None:  # compiled code, or no longer a part of a stage
            found: Tensor = ordinary_forward(self, hidden_states, top_k_index, top_k_weights)
            return found
        return _routed(self, hidden_states, top_k_index, top_k_weights)


def _routed(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts' output, with rows sorted by expert."""
    chosen = index.shape[-1]
    experts, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(module.num_experts, device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True).int()
    rows = x[order // chosen].to(module.gate_up_proj.dtype)
    inner = module._apply_gate(_grouped(module, rows, module.gate_up_proj, ends))
    outer = _grouped(module, inner, module.down_proj, ends) * weights.reshape(-1)[order].unsqueeze(-1)
    found: Tensor = outer[order.argsort()].view(*index.shape, outer.shape[-1]).sum(1).to(x.dtype)
    return found


def _grouped(module: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    queue = queue_for(module, x, weight)
    if queue is None:
        return _products(x, weight.transpose(-2, -1), ends)
    output: Tensor = _GroupedFunction.apply(x, weight, ends, queue)  # type: ignore[no-untyped-call]  # torch's own
    return output


class _GroupedFunction(torch.autograd.Function):
    """y = x Wᵀ with the weight of each row's group; its backward queues the gradient of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, queue: WeightGrads) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.weight, ctx.queue = weight, queue
        return _products(x, weight.transpose(-2, -1), ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight, ends = ctx.saved_tensors
        if is_accumulating(ctx, (1,)):
            ctx.queue.append(GroupedGrad(x.detach(), grad_output.detach(), ctx.weight, ends))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return _products(grad_output.contiguous(), weight, ends), None, None, None


def _products(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows (rows, in) times its matrix (groups, in, out)."""
    from transformers.integrations.moe import _grouped_mm

    # torch's grouped_mm has no shapes for float32 on a CPU, which an estimate needs.
    found: Tensor
    if x.device.type == "cpu":
        found = torch.ops.transformers.grouped_mm_fallback(x, weights, ends)
    else:
        found = _grouped_mm(x, weights, offs=ends)
    return found


def split_subclasses(module: nn.Module, *, without: Collection[str] = ()) -> None:
    """Change the classes of modules, so that their weight gradients can be queued. Idempotent.

    Parameters, buffers and names stay the same. Subclasses that define ``forward`` stay as they are; I
    computes their gradients. Call it before ``fully_shard``, which changes the classes too.

    Parameters
    ----------
    without
        The names of modules that stay as they are, with all modules inside.
    """
    excluded = {child for name in without for child in _children(module, name)}
    for child in module.modules():
        kind: Any = type(child)
        queueing = _BY_FORWARD.get(kind.forward)
        if queueing is not None and child not in excluded:
            child.__class__ = queueing_class(queueing, kind)


_BY_FORWARD: dict[Any, Any] = {
    nn.Linear.forward: QueueingLinear,
    nn.Embedding.forward: QueueingEmbedding,
}


def _children(module: nn.Module, name: str) -> list[nn.Module]:
    found = getattr(module, name, None)
    return list(found.modules()) if isinstance(found, nn.Module) else []
