"""Splits the backward of subclasses of ``nn.Linear`` and ``nn.Embedding`` that compute what these compute.

Libraries subclass them to add a configuration or an initialization, as torchtitan does.
:func:`~zbv_worker.stage.split_backward.defer_weight_gradients` leaves all subclasses alone, so a library's
adapter asks for them here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from zbv_worker.stage.recorder import queueing_class
from zbv_worker.stage.split_backward import QueueingEmbedding, QueueingLinear


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
