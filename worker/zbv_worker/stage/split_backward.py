"""Splits the backward of any module tree into I (input gradients) and W (weight gradients).

The method is the weight-grad store of DualPipe and of zero-bubble schedules (Qi et al. 2023, §2): in the
backward pass a Linear computes the gradient of its input at once, and *queues* the operands of its weight
gradient: its input and the gradient of its output. Running the queue later is W.

:func:`defer_weight_gradients` prepares a module tree: every plain ``nn.Linear`` and ``nn.Embedding`` changes
its class to a subclass that can queue. Parameters, buffers and state-dict names stay the same, and outside of
:meth:`Recorder.into` the modules behave as before: a fused backward (B), an evaluation or a reference run
takes PyTorch's own path.

Autograd computes all other gradients during I. These are the gradients of

- LayerNorm and RMSNorm, whose weight gradients are a by-product of the input gradient (queueing them would
  cost a second pass and keep two more activations until W),
- convolutions, parameters that a module owns directly, and subclasses of Linear with their own forward,
- reparametrised weights, and sparse, renormalising or tensor-parallel embeddings,
- parameters with hooks. A hook may need the whole gradient of a backward (masks) or consume it (an optimizer
  in the backward). Only autograd's own accumulation calls hooks as their authors expect.

Only a backward that accumulates into parameters fills the queue. A model may call ``torch.autograd.grad`` in
its forward; nothing is queued then. It must not request the gradient of a queued weight, nor gradients of
gradients through a queueing module (``create_graph=True``): both raise an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, WeightGrads, has_hooks


class Recorder:
    """Selects the queue for the modules of one tree.

    The modules refer to the recorder directly, not through thread-local state: activation checkpointing runs
    the forward again inside I, which on CUDA happens on a thread of autograd.
    """

    def __init__(self) -> None:
        self.queue: WeightGrads | None = None
        self.tapping: Tapping | None = None
        self._seen: list[Call] | None = None
        self._nodes: dict[int, _Node] = {}

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        """Copied or saved modules get a new recorder, because nodes of autograd cannot be copied."""
        return Recorder, ()

    def defers(self, parameter: Tensor) -> bool:
        """Whether the gradient of a leaf may be queued, i.e. the leaf has no hooks."""
        if not parameter.requires_grad:
            return True
        node = self._nodes.get(id(parameter))
        if node is None or node.parameter is not parameter:
            node = self._nodes[id(parameter)] = _Node(parameter)
        return node.references == _REFERENCES and not has_hooks(parameter)

    def note(self, module: _QueueingLinear | _QueueingEmbedding, output: Tensor) -> None:
        """Record a call that queues, for :meth:`watching`."""
        if self._seen is not None:
            self._seen.append(Call(module, output.shape, output.dtype))

    @contextmanager
    def watching(self) -> Iterator[list[Call]]:
        """A context that collects the calls of modules that queue, in order."""
        seen: list[Call] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    @contextmanager
    def tapping_into(self, tapping: Tapping) -> Iterator[None]:
        """A context in which modules expose what W needs, instead of queueing it."""
        self.tapping = tapping
        try:
            yield
        finally:
            self.tapping = None

    def into(self, queue: WeightGrads | None) -> _Into:
        """A context in which forwards of the tree will queue their weight gradients into ``queue``."""
        return _Into(self, queue)


class Tapping:
    """What the compiled modules of one forward expose for W: :mod:`zbv_worker.stage.compiled`.

    Attributes
    ----------
    taps
        One input per call, whose gradient will be that of the call's output.
    inputs
        The inputs of the calls so far.
    """

    __slots__ = ("inputs", "taps")

    def __init__(self) -> None:
        self.taps: list[Tensor] = []
        self.inputs: list[Tensor] = []


class _Into:
    """Not a generator-based context, which would take three times as long; every F and I enters one."""

    __slots__ = ("_before", "_queue", "_recorder")

    def __init__(self, recorder: Recorder, queue: WeightGrads | None):
        self._recorder = recorder
        self._queue = queue

    def __enter__(self) -> None:
        self._before = self._recorder.queue
        self._recorder.queue = self._queue

    def __exit__(self, *_: object) -> None:
        self._recorder.queue = self._before


def defer_weight_gradients(module: nn.Module) -> Recorder:
    """Prepare a module tree in place; returns its recorder. Idempotent.

    Changes only the exact classes ``nn.Linear`` and ``nn.Embedding``, because a subclass may use its weight
    differently. Modules that are :class:`Queueing` already get the recorder. Trees that share modules share a
    recorder; a rank runs one action at a time.

    Raises
    ------
    ModelError
        If the tree has a DistributedDataParallel, whose hooks are invisible to Python.
    """
    if any(isinstance(child, nn.parallel.DistributedDataParallel) for child in module.modules()):
        raise ModelError(
            "found a DistributedDataParallel in a stage; it sums gradients before W has computed them. Build "
            "the stage without it, and pass --data-parallel."
        )
    children = [child for child in module.modules() if isinstance(child, (nn.Linear, nn.Embedding, Queueing))]
    known = [child.recorder for child in children if isinstance(child, Queueing)]
    recorder = next((each for each in known if each is not None), None) or Recorder()
    for child in children:
        if type(child) in _SUBCLASS:
            # Changing the class preserves parameters, hooks and state-dict names.
            child.__class__ = _SUBCLASS[type(child)]  # type: ignore[assignment]  # a subclass of its class
        if isinstance(child, Queueing):
            child.recorder = recorder
    return recorder


def stop_deferring(module: nn.Module) -> None:
    """Undo :func:`defer_weight_gradients`: the modules of a tree get back the classes that they had."""
    for child in module.modules():
        if isinstance(child, Queueing):
            vars(child).pop("recorder", None)
            # The class that queues is a subclass of the one before, made for nothing else.
            child.__class__ = type(child).__bases__[0]


def deferred_parameters(module: nn.Module) -> set[Tensor]:
    """The parameters of a prepared tree whose gradients W will compute, as far as known before F."""
    found: set[Tensor] = set()
    for child in module.modules():
        if isinstance(child, _QueueingEmbedding) and (
            child.max_norm is not None or child.sparse or is_dtensor(child.weight)
        ):
            continue
        own = [p for p in child.parameters(recurse=False) if p.requires_grad]
        if isinstance(child, Queueing) and not any(map(has_hooks, own)):
            found.update(own)
    return found


def queue_for(recorder: Recorder | None, weight: Tensor) -> WeightGrads | None:
    """The queue for a weight's gradient, or None if autograd must compute it.

    A weight that is not a leaf is computed from other tensors (weight norm, a functional call). Its gradient
    must propagate further, so it cannot be deferred.
    """
    if recorder is None or recorder.queue is None or not torch.is_grad_enabled() or not weight.is_leaf:
        return None
    if not isinstance(weight, nn.Parameter) or torch._C._are_functorch_transforms_active():
        return None
    return recorder.queue if recorder.defers(weight) else None


class _Node:
    """A parameter's AccumulateGrad node, to detect whether anyone else refers to it.

    Megatron-LM's distributed optimizer and torch's optimizers in the backward register hooks on the node.
    They cannot be listed, but they vanish with the node. So their owner must keep a reference to the node,
    and Python counts those. All graphs through the node together count as one reference, or as none in some
    versions of torch; a permanent graph here makes that constant.
    """

    __slots__ = ("_graph", "_node", "parameter")

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        with torch.enable_grad():
            self._graph = parameter.view_as(parameter)
        self._node = get_gradient_edge(parameter).node

    @property
    def references(self) -> int:
        return sys.getrefcount(self._node)


_REFERENCES = _Node(torch.zeros(1, requires_grad=True)).references
"""The reference count of a node that nobody else refers to."""


class _Tap(torch.autograd.Function):
    """Returns the output unchanged; the tap gets the output's gradient too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (grad_output,) = grad_outputs
        return grad_output, grad_output


class Queueing:
    """A module whose weight gradients can be queued; a second base class of subclasses of a module's class.

    Attributes
    ----------
    recorder
        The recorder of the tree; None until :func:`defer_weight_gradients` has prepared it.
    is_tapped
        Whether compiled code exposes what W needs.
    """

    recorder: Recorder | None = None
    is_tapped = False


def queued_linear(
    module: Queueing, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool = False
) -> Tensor | None:
    """x Wᵀ + b with a queued weight gradient, or None if autograd must compute that.

    Parameters
    ----------
    weight
        (out_features, in_features), reversed if ``is_transposed``.
    """
    queue, recorder = queue_for(module.recorder, weight), module.recorder
    trainable = weight.requires_grad or (bias is not None and bias.requires_grad)
    if queue is None or recorder is None or recorder.tapping is not None or not trainable:
        return None
    if bias is not None and not (bias.is_leaf and recorder.defers(bias)):
        return None
    output: Tensor = _LinearFunction.apply(x, weight, bias, queue, is_transposed)  # type: ignore[no-untyped-call]  # torch's own
    return output


class _QueueingLinear(nn.Linear, Queueing):
    """A Linear whose weight gradient can be queued."""

    recorder: Recorder

    def forward(self, input: Tensor) -> Tensor:
        """``nn.Linear.forward``: (..., in_features) to (..., out_features)."""
        if self.recorder.tapping is not None:
            return self._tapped(input, self.recorder.tapping)
        output = queued_linear(self, input, self.weight, self.bias)
        if output is None:
            return super().forward(input)
        self.recorder.note(self, output)
        return output

    def queued(self, x: Tensor, grad_output: Tensor) -> LinearGrad:
        """The gradients of a call, for W."""
        return LinearGrad(self.weight, self.bias, x, grad_output)

    def _tapped(self, x: Tensor, tapping: Tapping) -> Tensor:
        if not self.is_tapped:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            x = _autocast(x, torch.get_autocast_dtype(x.device.type))
        at = len(tapping.inputs)
        tapping.inputs.append(x.detach())
        bias = None if self.bias is None else self.bias.detach()
        output: Tensor = _Tap.apply(nnf.linear(x, self.weight.detach(), bias), tapping.taps[at])  # type: ignore[no-untyped-call]
        return output


class _QueueingEmbedding(nn.Embedding, Queueing):
    """An Embedding whose weight gradient can be queued."""

    recorder: Recorder

    def forward(self, input: Tensor) -> Tensor:
        """``nn.Embedding.forward``: integers (...) to (..., embedding_dim)."""
        if self.recorder.tapping is not None:
            return self._tapped(input, self.recorder.tapping)
        queue = queue_for(self.recorder, self.weight)
        # Renormalisation writes to the weight in the forward; a sparse gradient cannot be added to a dense
        # one.
        if queue is None or not self.weight.requires_grad or self.max_norm is not None or self.sparse:
            return super().forward(input)
        if is_dtensor(self.weight):  # divided by rows, its gradient depends on a mask of the forward
            return super().forward(input)
        output: Tensor = _EmbeddingFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
            input, self.weight, self.padding_idx, self.scale_grad_by_freq, queue
        )
        self.recorder.note(self, output)
        return output

    def queued(self, indices: Tensor, grad_output: Tensor) -> EmbeddingGrad:
        """The gradient of a call, for W."""
        padding = -1 if self.padding_idx is None else self.padding_idx
        return EmbeddingGrad(self.weight, indices, grad_output, padding, self.scale_grad_by_freq)

    def _tapped(self, indices: Tensor, tapping: Tapping) -> Tensor:
        if not self.is_tapped:
            return super().forward(indices)
        at = len(tapping.inputs)
        tapping.inputs.append(indices.detach())
        looked = nnf.embedding(indices, self.weight.detach(), self.padding_idx)
        output: Tensor = _Tap.apply(looked, tapping.taps[at])  # type: ignore[no-untyped-call]
        return output


_SUBCLASS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _QueueingLinear,
    nn.Embedding: _QueueingEmbedding,
}
QUEUEING = (_QueueingLinear, _QueueingEmbedding)


@dataclass(frozen=True)
class Call:
    """A call of a module that queued its weight gradient: the module, and its output's shape and dtype."""

    module: Any
    shape: torch.Size
    dtype: torch.dtype

    @property
    def is_deferrable(self) -> bool:
        """Whether the gradients may still be queued, i.e. the parameters have no hooks."""
        return all(map(self.module.recorder.defers, self.module.parameters(recurse=False)))


class _LinearFunction(torch.autograd.Function):
    """y = x Wᵀ + b; its backward returns the gradient of x and queues those of W and b.

    W and b are inputs, so that the output requires a gradient even if x does not, as in the first layer of
    the first stage: I must reach this node there too, or W would find an empty queue.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGrads, is_transposed: bool
    ) -> Tensor:
        device = x.device.type
        ctx.input_dtype = x.dtype
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if dtype is not None:
            x = _autocast(x, dtype)
        ctx.save_for_backward(x, weight)
        # saved_tensors may return other tensors than were saved (checkpointing, offloading), but the gradient
        # must reach the parameter itself.
        ctx.weight, ctx.bias = weight, bias
        ctx.queue, ctx.is_transposed = queue, is_transposed
        if is_transposed:
            weight = weight.t()
        if dtype is None:
            output = nnf.linear(x, weight, bias)
        else:
            # Cast here: autocast caches its casts of parameters, and a cast made within a Function has no
            # graph. Some versions of torch reuse that cast for the parameter's next use, whose gradient is
            # then lost.
            cast_bias = None if bias is None else _autocast(bias, dtype)
            output = nnf.linear(x, _autocast(weight, dtype), cast_bias)
        # With more than two dimensions, the output is a view. Autograd forbids in-place writes to views that
        # a Function returns, so nn.ReLU(inplace=True) would fail. The base has no other user, so it is safe.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        if is_accumulating(ctx, (1, 2)):
            # Detached: the queue must not keep the graph of x alive.
            ctx.queue.append(
                LinearGrad(ctx.weight, ctx.bias, x.detach(), grad_output.detach(), ctx.is_transposed)
            )
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = (weight.t() if ctx.is_transposed else weight).to(grad_output.dtype)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                grad_input = grad_output.matmul(weight)
        else:  # the usual case; the context takes longer than a small product
            grad_input = grad_output.matmul(weight)
        return grad_input.to(ctx.input_dtype), None, None, None, None


class _EmbeddingFunction(torch.autograd.Function):
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
        ctx.save_for_backward(indices)
        ctx.parameter = weight
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.scale_by_frequency = scale_by_frequency
        ctx.queue = queue
        return nnf.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, None, None]:
        (grad_output,) = grad_outputs
        (indices,) = ctx.saved_tensors
        if is_accumulating(ctx, (1,)):
            ctx.queue.append(
                EmbeddingGrad(
                    ctx.parameter, indices, grad_output.detach(), ctx.padding_idx, ctx.scale_by_frequency
                )
            )
        return None, None, None, None, None


def is_accumulating(ctx: Any, parameters: tuple[int, ...]) -> bool:
    """Whether the current backward accumulates into parameters, rather than being ``torch.autograd.grad``.

    ``ctx.needs_input_grad`` cannot tell: it reflects the forward.

    Raises
    ------
    ModelError
        If the backward needs a gradient that only W will compute.
    """
    if torch.is_grad_enabled():
        raise ModelError(
            "found a backward with create_graph=True through a module whose weight gradient W computes, "
            "so gradients of gradients miss it. Use a plan with B instead of I and W, or use a subclass "
            "of nn.Linear or nn.Embedding there: subclasses are not split."
        )
    node = next(ctx.next_functions[at][0] for at in parameters if ctx.needs_input_grad[at])
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:  # torch cannot answer for a leaf that autograd.grad was asked for
        raise ModelError(
            "found torch.autograd.grad of a weight whose gradient is deferred to W and not computed yet. Use "
            "a subclass of nn.Linear or nn.Embedding there: subclasses are not split."
        ) from error


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does: floating point, but not double precision."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
