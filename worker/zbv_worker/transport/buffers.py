"""Receive buffers, reused as soon as nothing else refers to their memory.

A received tensor may be needed by autograd, the queues of weight gradients, the module (which may keep its
input) and sends that pass it on. All of them hold its storage, and torch counts the holders of a storage. So
a buffer is free when the pool is the only holder.

On a GPU, a queued kernel may still read the old content when its last holder releases it. That is safe
because the new content is written only after the work that was queued on the compute stream when the buffer
was taken (:mod:`zbv_worker.transport.receives`). The caching allocator relies on the same rule.
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import NamedTuple

import torch
from torch import Tensor

from zbv_worker.values.structure import TensorSpec

_SHAPES = 64
"""More than one step uses; steps with other lengths of sequences add more and more."""


class _Buffer(NamedTuple):
    tensor: Tensor
    storage: torch.UntypedStorage
    """Kept, because Python's object of a storage is itself a holder; the count must always include it."""

    idle: int
    """The number of holders when only the pool holds the storage."""


class ReceiveBuffers:
    """The receive buffers of one rank, by shape and dtype; channels with equal tensors share them.

    A step needs as many at once as the step before, so buffers stay until :data:`_SHAPES` other shapes and
    dtypes have been used.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[TensorSpec, deque[_Buffer]] = {}

    def take(self, spec: TensorSpec) -> Tensor:
        """Return a tensor of undefined content whose memory nothing else uses."""
        pool = self._pools.get(spec) or self._new_pool(spec)
        # Least recently taken first: most buffers are released in about the order in which they were taken.
        for _ in range(len(pool)):
            buffer = pool[0]
            pool.rotate(-1)
            if _held(buffer.storage) == buffer.idle:
                return buffer.tensor.detach()
        return self._make(spec, pool)

    def _new_pool(self, spec: TensorSpec) -> deque[_Buffer]:
        if len(self._pools) == _SHAPES:
            del self._pools[next(iter(self._pools))]
        pool = self._pools[spec] = deque()
        return pool

    def clear(self) -> None:
        """Release every buffer; those in use stay alive with their users."""
        self._pools.clear()

    def _make(self, spec: TensorSpec, pool: deque[_Buffer]) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        pool.append(_Buffer(tensor, tensor.untyped_storage(), 0))
        # Count inside the pool, as `take` does: a local name for the storage would be one more holder.
        pool[-1] = pool[-1]._replace(idle=_held(pool[-1].storage))
        # Never return the pool's own tensor: its user would not add a holder of the storage.
        return tensor.detach()


def _held(storage: torch.UntypedStorage) -> int:
    """The number of holders of a storage, including those of Python's object for it."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count + getrefcount(storage)
