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
- parameters with hooks. A hook may need the whole gradient of a backward (masks) or consume it (an optimizer
  in the backward). Only autograd's own accumulation calls hooks as their authors expect.

Only a backward that accumulates into parameters fills the queue. A model may call ``torch.autograd.grad`` in
its forward; nothing is queued then. It must not request the gradient of a queued weight, nor gradients of
gradients through a queueing module (``create_graph=True``): both raise an error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.stage.queueing_functions import (
    QueueingEmbeddingFunction,
    QueueingLinearFunction,
    Tap,
    cast_like_autocast,
)
from zbv_worker.stage.recorder import Queueing, Recorder, Tapping, queue_for
from zbv_worker.stage.weight_grads import EmbeddingGrad, LinearGrad, has_hooks


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
    output: Tensor = QueueingLinearFunction.apply(x, weight, bias, queue, is_transposed)  # type: ignore[no-untyped-call]  # torch's own
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
            x = cast_like_autocast(x, torch.get_autocast_dtype(x.device.type))
        at = len(tapping.inputs)
        tapping.inputs.append(x.detach())
        bias = None if self.bias is None else self.bias.detach()
        output: Tensor = Tap.apply(nnf.linear(x, self.weight.detach(), bias), tapping.taps[at])  # type: ignore[no-untyped-call]
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
        output: Tensor = QueueingEmbeddingFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
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
        output: Tensor = Tap.apply(looked, tapping.taps[at])  # type: ignore[no-untyped-call]
        return output


_SUBCLASS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _QueueingLinear,
    nn.Embedding: _QueueingEmbedding,
}
QUEUEING = (_QueueingLinear, _QueueingEmbedding)
