"""Splits the backward of any module tree into I (input gradients) and W (weight gradients).

The method is the weight-grad store of DualPipe and of zero-bubble schedules (Qi et al. 2023, §2): in the
backward pass a Linear computes the gradient of its input at once, and *queues* the operands of its weight
gradient: its input and the gradient of its output. Running the queue later is W.

:func:`defer_weight_gradients` prepares a module tree: every plain ``nn.Linear`` and ``nn.Embedding`` changes
its class to a subclass that can queue. Parameters, buffers and state-dict names stay the same, and outside of
:meth:`.Recorder.into` the modules behave as before: a fused backward (B), an evaluation or a reference run
takes PyTorch's own path.

Autograd computes all other gradients during I. These are the gradients of

- LayerNorm and RMSNorm, whose weight gradients are a by-product of the input gradient (queueing them would
  cost a second pass and keep two more activations until W),
- convolutions, parameters that a module owns directly, and subclasses of Linear with their own forward,
- reparametrised weights, and sparse, renormalising or tensor-parallel embeddings,
- layers that the user has compiled (``--compile`` splits them, :mod:`zbv_worker.stage.compiled`),
- complex, sparse, nested and quantized tensors, and subclasses of tensors, except DTensors,
- parameters with hooks. A hook may need the whole gradient of a backward (masks) or consume it (an optimizer
  in the backward). Only autograd's own accumulation calls hooks as their authors expect.

Only a backward that accumulates into parameters fills the queue. A model may call ``torch.autograd.grad`` in
its forward or in the backward of functions that it defines; nothing is queued then, and the gradients that it
asks for are computed at once. Gradients of gradients through a queueing module (``create_graph=True``) raise
an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.stage.layers import LayerSequence
from zbv_worker.stage.recorder import (
    Queueing,
    Recorder,
    Tapping,
    ordinary_class,
    queue_for,
    queueing_class,
)
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, WeightGrads, has_hooks
from zbv_worker.values.structure import FLOATS


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


def defer_weight_gradients(module: nn.Module) -> Recorder:
    """Prepare a module tree in place; returns its recorder. Idempotent.

    Changes only the exact classes ``nn.Linear`` and ``nn.Embedding``, because a subclass may use its weight
    differently. Modules that are :class:`Queueing` already get the recorder. Trees that share modules share a
    recorder; a rank runs one action at a time.

    Raises
    ------
    ModelError
        If the tree has a DistributedDataParallel, whose hooks are invisible to Python, a module that defers
        its weight gradients by itself, or one whose parameters are not initialized yet.
    """
    for child in module.modules():
        _require_splittable(child)
    children = [child for child in module.modules() if isinstance(child, (nn.Linear, nn.Embedding, Queueing))]
    known = [child.recorder for child in children if isinstance(child, Queueing)]
    recorder = next((each for each in known if each is not None), None) or Recorder()
    for child in children:
        if type(child) in _BEHAVIOUR:
            # Changing the class preserves parameters, hooks and state-dict names.
            kind: Any = type(child)
            behaviour: Any = _BEHAVIOUR[kind]
            child.__class__ = queueing_class(behaviour, kind)
        if isinstance(child, Queueing):
            child.recorder = recorder
            recorder.modules.add(child)
    return recorder


def _require_splittable(module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ModelError(
            "found a DistributedDataParallel in a stage; it sums gradients before W has computed them. Build "
            "the stage without it, and pass --data-parallel."
        )
    if any(map(is_lazy, module.parameters(recurse=False))):
        raise ModelError(
            f"found a {type(module).__name__} whose parameters have no shapes yet. Build it with all sizes, "
            f"or call the layers once before the pipeline is made, each with the output of the one before."
        )
    delays: Any = getattr(module, "need_backward_dw", None)  # as modules of TransformerEngine have it
    if callable(delays) and delays():
        raise ModelError(
            f"found a {type(module).__name__} that computes its weight gradients only in backward_dw(), "
            f"which nothing calls here. Build it with delay_wgrad_compute=False; I then computes them."
        )


def stop_deferring(module: nn.Module) -> None:
    """Undo what prepared a stage: its modules get back the classes that they had.

    So do modules that have left the tree, and those whose class was changed since.
    """
    recorders = {id(it): it for it in map(_recorder_of, module.modules()) if it is not None}
    children = set(module.modules()).union(*(recorder.modules for recorder in recorders.values()))
    for child in children:
        if _recorder_of(child) is not None:
            del vars(child)["recorder"]
            vars(child).pop("is_tapped", None)
        if isinstance(child, Queueing):
            child.__class__ = ordinary_class(type(child))
    if type(module) is LayerSequence:
        module.__class__ = nn.Sequential  # type: ignore[assignment]  # the class of which it is one


def _recorder_of(module: nn.Module) -> Recorder | None:
    found = vars(module).get("recorder")  # users may have attributes of that name
    return found if isinstance(found, Recorder) else None


def deferred_parameters(module: nn.Module) -> set[Tensor]:
    """The parameters of a prepared tree whose gradients W will compute, as far as known before F."""
    found: set[Tensor] = set()
    for child in module.modules():
        if isinstance(child, QueueingEmbedding) and not child.is_divisible:
            continue
        own = [p for p in child.parameters(recurse=False) if p.requires_grad]
        if isinstance(child, Queueing) and all(p.dtype in FLOATS and not has_hooks(p) for p in own):
            found.update(own)
    return found


def queued_linear(
    module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool = False
) -> Tensor | None:
    """x Wᵀ + b with a queued weight gradient, or None if autograd must compute that.

    Parameters
    ----------
    weight
        (out_features, in_features), reversed if ``is_transposed``.
    """
    queue = queue_for(module, x, weight, bias)
    if queue is None:
        return None
    output: Tensor = QueueingLinearFunction.apply(x, weight, bias, queue, is_transposed)  # type: ignore[no-untyped-call]  # torch's own
    return output


class QueueingLinear(Queueing):
    """A Linear whose weight gradient can be queued."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self: Any, input: Tensor) -> Tensor:
        """``nn.Linear.forward``: (..., in_features) to (..., out_features)."""
        recorder: Recorder | None = getattr(self, "recorder", None)
        if recorder is not None and recorder.tapping is not None and self.is_tapped:
            return _tapped_linear(self, input, recorder.tapping)
        output = queued_linear(self, input, self.weight, self.bias)
        if output is None or recorder is None:
            return nn.Linear.forward(self, input)
        recorder.note(self, output)
        return output

    def queued(self, x: Tensor, grad_output: Tensor) -> LinearGrad:
        """The gradients of a call, for W."""
        return LinearGrad(x, grad_output, self.weight, self.bias)


def _tapped_linear(module: nn.Linear, x: Tensor, tapping: Tapping) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = cast_like_autocast(x, torch.get_autocast_dtype(x.device.type))
    at = len(tapping.inputs)
    tapping.inputs.append(x.detach())
    bias = None if module.bias is None else module.bias.detach()
    output: Tensor = Tap.apply(nnf.linear(x, module.weight.detach(), bias), tapping.taps[at])  # type: ignore[no-untyped-call]
    return output


class QueueingEmbedding(Queueing):
    """An Embedding whose weight gradient can be queued."""

    weight: nn.Parameter
    padding_idx: int | None
    max_norm: float | None
    sparse: bool
    scale_grad_by_freq: bool

    @property
    def is_divisible(self) -> bool:
        """Whether W can compute the gradient.

        Renormalisation writes to the weight in the forward; a sparse gradient cannot be added to a dense one;
        divided by rows, the gradient depends on a mask of the forward.
        """
        return self.max_norm is None and not self.sparse and not is_dtensor(self.weight)

    def forward(self: Any, input: Tensor) -> Tensor:
        """``nn.Embedding.forward``: integers (...) to (..., embedding_dim)."""
        recorder: Recorder | None = getattr(self, "recorder", None)
        if recorder is not None and recorder.tapping is not None and self.is_tapped:
            return _tapped_embedding(self, input, recorder.tapping)
        queue = queue_for(self, input, self.weight)
        if queue is None or recorder is None or not self.is_divisible:
            return nn.Embedding.forward(self, input)
        output: Tensor = QueueingEmbeddingFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
            input, self.weight, self.padding_idx, self.scale_grad_by_freq, queue
        )
        recorder.note(self, output)
        return output

    def queued(self, indices: Tensor, grad_output: Tensor) -> EmbeddingGrad:
        """The gradient of a call, for W."""
        return EmbeddingGrad(indices, grad_output, self.weight, self.padding_idx, self.scale_grad_by_freq)


def _tapped_embedding(module: nn.Embedding, indices: Tensor, tapping: Tapping) -> Tensor:
    at = len(tapping.inputs)
    tapping.inputs.append(indices.detach())
    looked = nnf.embedding(indices, module.weight.detach(), module.padding_idx)
    output: Tensor = Tap.apply(looked, tapping.taps[at])  # type: ignore[no-untyped-call]
    return output


_BEHAVIOUR: dict[type[nn.Module], type[Queueing]] = {
    nn.Linear: QueueingLinear,
    nn.Embedding: QueueingEmbedding,
}
