"""Compiles layers by ``torch.compile`` and still splits their backward into I and W.

A compiled layer is one node of autograd, whose backward computes everything at once. And a compiled graph may
not queue tensors by itself: the compiler reuses their memory. So everything that W needs leaves the graph as
an output:

- the *input* of every Linear or Embedding that queues is an output of the forward;
- the *gradient of its output* is an output of the backward, as the gradient of a *tap*: an additional input
  of the forward, of the output's shape, whose value is never read. A tap is one number, expanded.

The graph uses weights detached, so it has no weight gradients. W computes them outside, as without compiling.

The number and shapes of taps come from the first microbatch of each input's shape and dtype, which runs
uncompiled. Layers with equal code and shapes share one compilation.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.errors import ModelError
from zbv_worker.stage.layers import NO_KEYWORDS, call
from zbv_worker.stage.loss import leave_uncompiled
from zbv_worker.stage.recorder import Recorder, Tapping
from zbv_worker.stage.split_backward import Call, Queueing, is_accumulating
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.values.structure import Structure, device_of

_OPTIONS: dict[str, Any] = {"fallback_random": True}
"""Random numbers as without compiling, so that dropout does not depend on --compile."""

_Signature = tuple[Hashable, torch.dtype | None]


class CompiledLayer:
    """A layer that computes F and B, or F, I and W, by compiled code.

    Parameters
    ----------
    layer
        A module of a tree that :func:`~zbv_worker.stage.recorder.defer_weight_gradients` prepared.
    recorder
        The recorder of the tree.
    """

    def __init__(self, layer: nn.Module, recorder: Recorder):
        leave_uncompiled()
        self._layer = layer
        self._recorder = recorder
        self._compiled = torch.compile(layer, dynamic=False, options=_OPTIONS)
        self._calls: dict[_Signature, tuple[Call, ...]] = {}
        self._traced: tuple[Call, ...] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, x: Any, keywords: Mapping[str, Any] = NO_KEYWORDS) -> Any:
        """The layer's output; raises :class:`ModelError` if the layer cannot be compiled."""
        recorder = self._recorder
        if recorder.queue is None or not torch.is_grad_enabled():
            return self._run(x, keywords)
        signature = _signature_of(x, keywords)
        calls = self._calls.get(signature)
        if calls is None or not all(each.is_deferrable for each in calls):
            with recorder.watching() as seen:
                output = call(self._layer, x, keywords)
            self._calls[signature] = tuple(seen)
            tapped = {each.module for each in seen}
            for module in self._layer.modules():
                if isinstance(module, Queueing):
                    module.is_tapped = module in tapped
            return output
        return self._tapped(x, keywords, calls, recorder.queue)

    def _tapped(
        self, x: Any, keywords: Mapping[str, Any], calls: tuple[Call, ...], queue: WeightGrads
    ) -> Any:
        if not calls:  # nothing to defer
            with self._recorder.into(None):
                return self._run(x, keywords)
        tapping = Tapping()
        tapping.taps = list(_Taps.apply(self._anchor, calls, tapping, queue, device_of(x)))  # type: ignore[no-untyped-call]
        with self._recorder.tapping_into(tapping), self._quiet(calls):
            output = self._run(x, keywords)
        tapping.keep()
        if len(tapping.inputs) != len(calls):
            raise ModelError(
                f"a {type(self._layer).__name__} called {len(tapping.inputs)} Linears and Embeddings, and "
                f"{len(calls)} for an input of equal shape before; --compile needs the same calls for every "
                f"microbatch. Run without --compile."
            )
        return output

    def _quiet(self, calls: tuple[Call, ...]) -> AbstractContextManager[object]:
        """A context for the first compiled run of some calls, in which torch warns about what it traces."""
        if self._traced is calls:
            return nullcontext()
        self._traced = calls
        return warnings.catch_warnings(action="ignore")

    def _run(self, x: Any, keywords: Mapping[str, Any]) -> Any:
        try:
            return call(self._layer, x, keywords, self._compiled)
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"torch.compile failed for a {type(self._layer).__name__}: {first}. Correct the layer, or "
                f"run without --compile."
            ) from error


def _signature_of(x: Any, keywords: Mapping[str, Any]) -> _Signature:
    device = device_of(x).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if isinstance(x, Tensor) and not keywords:
        return (x.shape, x.dtype, x.requires_grad), autocast
    return Structure.of([x, dict(keywords)]), autocast


class _Taps(torch.autograd.Function):
    """The taps of one forward; its backward runs after the layer's, and fills the queue of W."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        calls: tuple[Call, ...],
        tapping: Tapping,
        queue: WeightGrads,
        device: torch.device,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.tapping, ctx.queue = calls, tapping, queue
        return tuple(torch.zeros((), dtype=call.dtype, device=device).expand(call.shape) for call in calls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if is_accumulating(ctx, (0,)):
            for call, x, gradient in zip(ctx.calls, ctx.tapping.kept(), gradients, strict=True):
                if gradient is not None:
                    ctx.queue.append(call.module.queued(x, gradient))
        ctx.tapping = None  # frees the inputs after W, even if the graph lives longer
        return None, None, None, None, None
