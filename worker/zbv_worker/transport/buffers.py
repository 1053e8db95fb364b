"""Receive buffers, reused as soon as nothing else refers to their memory.

A received tensor may be needed by autograd, the queues of weight gradients, the module (which may keep its
input) and sends that pass it on. All of them hold its storage, and torch counts the holders of a storage. So
a buffer is free when the pool is the only holder.

On a GPU, a queued kernel may still read the old content when its last holder releases it. That is safe
because the new content is written only after the work that was queued on the compute stream when the buffer
was taken (:mod:`zbv_worker.transport.receives`). The caching allocator relies on the same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from functools import lru_cache
from sys import getrefcount

import torch
from torch import Tensor

from zbv_worker.values.structure import TensorSpec

_SLACK = 1 / 8
"""How much larger a buffer may be than the tensor it is reused for, as a share of the tensor."""
_SPARE = 1 / 4
"""How much more memory may be kept than was in use at once, as a share of that."""


class _Buffer:
    """Memory of the pool, and the tensor that it was last taken as.

    Attributes
    ----------
    storage
        Kept, because Python's object of a storage is itself a holder; the count must always include it.
    idle
        The number of holders when only the pool holds the storage.
    """

    __slots__ = ("flat", "idle", "spec", "storage", "tensor")

    def __init__(self, flat: Tensor):
        self.flat = flat
        self.storage = flat.untyped_storage()
        self.spec: TensorSpec | None = None
        self.tensor = flat
        self.idle = _held(self.storage)

    @property
    def is_free(self) -> bool:
        """Whether nothing else holds the memory."""
        return _held(self.storage) == self.idle

    def taken_as(self, spec: TensorSpec) -> Tensor:
        """A tensor of this memory."""
        if spec != self.spec:
            self.spec = spec
            with torch.no_grad():
                self.tensor = self.flat[: spec.nbytes].view(spec.dtype).view(spec.shape)
            self.idle = _held(self.storage)
        # Never return the pool's own tensor: its user would not add a holder of the storage.
        return self.tensor.detach()


class ReceiveBuffers:
    """The receive buffers of one rank, by size; channels share them.

    Tensors of equal size reuse each other's buffers. If sizes vary, a tensor may also get a slightly larger
    buffer, and free buffers of other sizes are given up before a new one is made: the pool holds little more
    than was in use at once.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[int, deque[_Buffer]] = {}
        self._sizes: list[int] = []
        self._most_used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(size * len(pool) for size, pool in self._pools.items())

    def take(self, spec: TensorSpec) -> Tensor:
        """Return a tensor of undefined content whose memory nothing else uses."""
        nbytes, sizes = _size_of(spec), self._sizes
        for at in range(bisect_left(sizes, nbytes), len(sizes)):
            if sizes[at] > nbytes * (1 + _SLACK):
                break
            pool = self._pools[sizes[at]]
            # Least recently taken first: most buffers are released in about the order in which they were
            # taken.
            for _ in range(len(pool)):
                buffer = pool[0]
                pool.rotate(-1)
                if buffer.is_free:
                    return buffer.taken_as(spec)
        return self._made(nbytes).taken_as(spec)

    def clear(self) -> None:
        """Release every buffer; those in use stay alive with their users."""
        self._pools.clear()
        self._sizes.clear()

    def _made(self, nbytes: int) -> _Buffer:
        """A new buffer, in place of free ones of other sizes if there are too many."""
        used = nbytes + sum(
            size for size, pool in self._pools.items() for buffer in pool if not buffer.is_free
        )
        self._most_used = max(self._most_used, used)
        surplus = self.nbytes + nbytes - self._most_used * (1 + _SPARE)
        if surplus > 0:
            self._give_up(surplus)
        buffer = _Buffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        self._pools.setdefault(nbytes, deque()).append(buffer)
        self._sizes = sorted(self._pools)
        return buffer

    def _give_up(self, surplus: float) -> None:
        """Release free buffers of that many bytes, the smallest first: large ones are more often reused."""
        for size in self._sizes:
            pool = self._pools[size]
            for buffer in [each for each in pool if each.is_free]:
                if surplus <= 0:
                    return
                pool.remove(buffer)
                surplus -= size
            if not pool:
                del self._pools[size]


@lru_cache(maxsize=1024)
def _size_of(spec: TensorSpec) -> int:
    """The bytes of a buffer, at least one."""
    return max(1, spec.nbytes)


def _held(storage: torch.UntypedStorage) -> int:
    """The number of holders of a storage, including those of Python's object for it."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count + getrefcount(storage)
