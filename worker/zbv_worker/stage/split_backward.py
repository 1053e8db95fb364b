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
from zbv_worker.stage.queueing_functions import (
    QueueingEmbeddingFunction,
    QueueingLinearFunction,
    Tap,
    cast_like_autocast,
)
from zbv_worker.stage.recorder import (
    Queueing,
    Recorder,
    Tapping,
    ordinary_class,
    queue_for,
    queueing_class,
)
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, has_hooks
from zbv_worker.values.structure import FLOATS


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
