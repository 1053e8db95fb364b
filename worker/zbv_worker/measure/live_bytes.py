"""Measures the memory that stages really hold, in bytes.

On CUDA the allocator knows. On a CPU nobody does, so :class:`LiveBytes` watches every operator and counts
the storages that were made and are still alive. :func:`watching` is the one for a device.
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
    """What was made since the ``with`` block began and is still held."""

    @property
    def bytes(self) -> int:
        """Now."""

    @property
    def peak(self) -> int:
        """The most since the beginning, or since :meth:`restart`."""

    def restart(self) -> None:
        """Look for the peak from now on."""


def watching(device: torch.device) -> AbstractContextManager[HeldMemory]:
    """``with watching(device) as held``."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()


class AllocatedBytes:
    """What CUDA's allocator has handed out since the beginning of its ``with`` block, less what came back."""

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
        """Now."""
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        """The most since the beginning, or since :meth:`restart`."""
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        """Look for the peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)


class LiveBytes:
    """Within its ``with`` block: bytes of the tensors made there, by this thread, that are still alive.

    Storages that existed before (parameters, and gradients that are accumulated in place) do not count.
    Memory that an operator uses only while it runs does not either.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        # Sends let go of their tensors in a thread of their own, maybe while one is counted here.
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
        """Look for the peak from now on."""
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
    """Reports every tensor whose storage an operator made."""

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
