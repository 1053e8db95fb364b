"""Splits the backward of any module tree into I (input gradients) and W (weight gradients).

The method is the weight-grad store of DualPipe and of zero-bubble schedules (Qi et al. 2023, §2): in the
backward pass a Linear computes the gradient of its input at once, and *queues* the operands of its weight
gradient: its input and the gradient of its output. Running the queue later is W.

:func:`~.recorder.defer_weight_gradients` prepares a module tree: every plain ``nn.Linear`` and
``nn.Embedding`` changes its class to a subclass that can queue. Parameters, buffers and state-dict names stay
the same, and outside of :meth:`.Recorder.into` the modules behave as before: a fused backward (B), an
evaluation or a reference run takes PyTorch's own path.

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

import copyreg
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_distributed_kind, is_dtensor
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, WeightGrads, has_hooks
from zbv_worker.values.structure import FLOATS

if TYPE_CHECKING:
    from zbv_worker.stage.recorder import Recorder


class Queueing:
    """A module whose weight gradients can be queued.

    The first base class of :func:`~.recorder.queueing_class`.
    """

    ordinary: ClassVar[type[nn.Module]]
    """The class of the module before it was prepared."""
    recorder: Recorder | None = None
    """The recorder of the tree; None until :func:`~.recorder.defer_weight_gradients` has prepared it."""
    is_tapped = False
    """Whether compiled code exposes what W needs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and saved modules are ordinary modules, which need neither zbv nor a pipeline."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *others = reduced
        state = {name: value for name, value in state.items() if name not in ("recorder", "is_tapped")}
        return copyreg._reconstructor, (ordinary_class(type(self)), object, None), state, *others  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Call:
    """A call of a module that queued its weight gradient: the module, and its output's shape and dtype."""

    module: Any
    shape: torch.Size
    dtype: torch.dtype

    @property
    def is_deferrable(self) -> bool:
        """Whether the gradients may still be queued, i.e. the parameters have no hooks."""
        return all(defers(self.module.recorder, each) for each in self.module.parameters(recurse=False))


def ordinary_class(kind: Any) -> Any:
    """The class that a module has when it no longer queues.

    torch's parametrizations and ``fully_shard`` derive a class from the one that they find, which may be one
    that queues. The result is then a class with the same members, derived from the ordinary class; for a
    class with calls of ``super()``, which only that class itself can make, the class with other bases.
    """
    if not issubclass(kind, Queueing):
        return kind
    if "ordinary" in vars(kind):
        return kind.ordinary
    bases = tuple(map(ordinary_class, kind.__bases__))
    members = {name: it for name, it in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    if any("__class__" in it.__code__.co_freevars for it in members.values() if isinstance(it, FunctionType)):
        kind.__bases__ = bases
        return kind
    return type(kind)(kind.__name__, bases, members)


def queue_for(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightGrads | None:
    """The queue for the weight gradients of a call, or None if autograd must compute them.

    A parameter that is not a leaf is computed from other tensors (weight norm, a functional call). Its
    gradient must propagate further, so it cannot be deferred. Complex, sparse and nested tensors, and the
    subclasses of other libraries, are left to autograd, which has rules for each. So are layers that the user
    compiles: their backward is compiled as a whole.
    """
    if torch.compiler.is_compiling():
        return None
    recorder: Recorder | None = getattr(module, "recorder", None)
    if recorder is None or recorder.queue is None or recorder.tapping is not None:
        return None
    if not torch.is_grad_enabled() or not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if weight.dtype not in FLOATS or not (_is_dense(x) and defers(recorder, weight)):
        return None
    return recorder.queue if bias is None or defers(recorder, bias) else None


def defers(recorder: Recorder, parameter: Tensor) -> bool:
    """Whether the gradient of a parameter may be queued: it is a dense leaf without hooks, or needs none."""
    if not _is_dense(parameter):
        return False
    if not parameter.requires_grad:
        return True
    if not (isinstance(parameter, nn.Parameter) and parameter.is_leaf):
        return False
    known = recorder.nodes.get(id(parameter))
    if known is None or known.parameter is not parameter:
        known = recorder.nodes[id(parameter)] = Node(parameter)
    return sys.getrefcount(known.node) == _REFERENCES and not has_hooks(parameter)


def _is_dense(tensor: Tensor) -> bool:
    kind = type(tensor)
    if not (kind is Tensor or kind is nn.Parameter or kind is FakeTensor or is_distributed_kind(kind)):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


class Node:
    """A parameter's AccumulateGrad node, to detect whether anyone else refers to it.

    Megatron-LM's distributed optimizer and torch's optimizers in the backward register hooks on the node.
    They cannot be listed, but they vanish with the node. So their owner must keep a reference to the node,
    and Python counts those. All graphs through the node together count as one reference, or as none in some
    versions of torch; a permanent graph here makes that constant.
    """

    __slots__ = ("_graph", "node", "parameter")

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        with torch.enable_grad():
            self._graph = parameter.view_as(parameter)
        self.node = get_gradient_edge(parameter).node


_LONE = Node(torch.zeros(1, requires_grad=True))
_REFERENCES = sys.getrefcount(_LONE.node)
"""The reference count of a node that nobody else refers to."""


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
            return recorder.tapping.linear(self, input)
        output = queued_linear(self, input, self.weight, self.bias)
        if output is None or recorder is None:
            return nn.Linear.forward(self, input)
        if recorder.seen is not None:
            recorder.seen.append(Call(self, output.shape, output.dtype))
        return output

    def queued(self, x: Tensor, grad_output: Tensor) -> LinearGrad:
        """The gradients of a call, for W."""
        return LinearGrad(x, grad_output, self.weight, self.bias)


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
            return recorder.tapping.embedding(self, input)
        queue = queue_for(self, input, self.weight)
        if queue is None or recorder is None or not self.is_divisible:
            return nn.Embedding.forward(self, input)
        output: Tensor = QueueingEmbeddingFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
            input, self.weight, self.padding_idx, self.scale_grad_by_freq, queue
        )
        if recorder.seen is not None:
            recorder.seen.append(Call(self, output.shape, output.dtype))
        return output

    def queued(self, indices: Tensor, grad_output: Tensor) -> EmbeddingGrad:
        """The gradient of a call, for W."""
        return EmbeddingGrad(indices, grad_output, self.weight, self.padding_idx, self.scale_grad_by_freq)
