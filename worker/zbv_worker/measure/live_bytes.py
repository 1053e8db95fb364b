"""Measures the memory that stages hold, in bytes.

On CUDA the allocator counts it. On a CPU nothing does, so :class:`LiveBytes` intercepts every operator and
counts the new storages that are still alive. :func:`watching` selects the counter for a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(Protocol):
    """Memory that was allocated since the start of a ``with`` block and is still held."""

    @property
    def bytes(self) -> int:
        """Bytes held now."""

    @property
    def peak(self) -> int:
        """The most bytes held since the start, or since :meth:`restart`."""

    def restart(self) -> None:
        """Reset the peak to the current bytes."""


def watching(device: torch.device) -> AbstractContextManager[HeldMemory]:
    """The memory counter for a device: ``with watching(device) as held``."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()


class AllocatedBytes:
    """Counts what CUDA's allocator has handed out since the start of a ``with`` block and not got back."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = 0

    def __enter__(self) -> AllocatedBytes:
        self._before = torch.cuda.memory_allocated(self._device)
        self.restart()
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        """The most bytes held since the start, or since :meth:`restart`."""
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        torch.cuda.reset_peak_memory_stats(self._device)


class LiveBytes:
    """Counts bytes of tensors that this thread creates in a ``with`` block, while they are alive.

    Older storages (parameters, gradients that are accumulated in place) and temporary memory inside an
    operator do not count.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        # Sends release their tensors in another thread, perhaps while this one counts.
        self._lock = threading.RLock()
        self._alive: set[int] = set()
        self._mode = _Watching(self._made)

    def __enter__(self) -> LiveBytes:
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's own

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        with self._lock:
            self.peak = self.bytes

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._alive:
                return
            size = storage.nbytes()
            self._alive.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        with self._lock:
            self._alive.discard(key)
            self.bytes -= size


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Reports every tensor whose storage an operator created."""

    def __init__(self, made: Callable[[Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._report = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then report outputs that share no storage with its inputs."""
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    self._report(leaf)
        return result
