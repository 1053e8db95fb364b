"""Memory for tensors that arrive, used again as soon as nothing refers to what was in it.

Who still needs a received tensor is known to nobody but autograd, the queues of weight gradients, the module
(which may keep its input) and sends that pass it on. They all hold its storage, and torch counts how often a
storage is held. So a buffer is free when the pool alone holds it, whatever anyone did with it.

On a GPU a kernel that reads the old content may still be queued when its last holder lets go. That is safe
because whatever writes the new content is ordered behind the compute stream as it was when the buffer was
taken (:mod:`zbv_worker.transport.receives`), as the caching allocator has it, too.
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import NamedTuple

import torch
from torch import Tensor

from zbv_worker.transport.channels import TensorSpec


class _Buffer(NamedTuple):
    tensor: Tensor
    storage: torch.UntypedStorage
    """Kept, because Python's object for a storage holds it too: always, or the count would mean nothing."""

    idle: int
    """How often the storage is held when only the pool holds it."""


class ReceiveBuffers:
    """The buffers of one rank, by shape and dtype: channels that carry alike tensors share theirs.

    Nothing is given back: what was needed at once in one step will be in the next.

    Attributes
    ----------
    bytes
        Allocated so far.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[TensorSpec, deque[_Buffer]] = {}
        self.bytes = 0

    def take(self, spec: TensorSpec) -> Tensor:
        """A tensor of undefined content that shares its memory with nothing else in use."""
        pool = self._pools.get(spec)
        if pool is None:
            pool = self._pools[spec] = deque()
        # The one taken longest ago first: most are given back in about the order in which they were taken.
        for _ in range(len(pool)):
            buffer = pool[0]
            pool.rotate(-1)
            if _held(buffer.storage) == buffer.idle:
                return buffer.tensor.detach()
        return self._make(spec, pool)

    def clear(self) -> None:
        """Let go of every buffer; those in use stay alive with their users."""
        self._pools.clear()
        self.bytes = 0

    def _make(self, spec: TensorSpec, pool: deque[_Buffer]) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        pool.append(_Buffer(tensor, tensor.untyped_storage(), 0))
        # Counted as it will be when the pool looks: a name for the storage here would be one holder more.
        pool[-1] = pool[-1]._replace(idle=_held(pool[-1].storage))
        self.bytes += tensor.nbytes
        # Never the pool's own tensor: whoever got that would hold the storage no more often than the pool.
        return tensor.detach()


def _held(storage: torch.UntypedStorage) -> int:
    """How many tensors, and others, hold a storage, and how many hold Python's object for it."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count + getrefcount(storage)
