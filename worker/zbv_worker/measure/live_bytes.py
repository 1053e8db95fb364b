"""Measures the memory that stages hold, in bytes.

On CUDA the allocator counts it. On a CPU nothing does, so :class:`LiveBytes` intercepts every operator and
counts the new storages that are still alive. :func:`watching` selects the counter for a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def watching(device: torch.device) -> AllocatedBytes | LiveBytes:
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
    operator do not count. The attributes mean the same as those of :class:`AllocatedBytes`.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        # Sends release their tensors in another thread, perhaps while this one counts.
        self._lock = threading.RLock()
        self._alive: set[int] = set()
        self._operators = InterceptedOperators(self._run)

    def __enter__(self) -> LiveBytes:
        self._operators.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *raised: object) -> None:
        self._operators.__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's own

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        with self._lock:
            self.peak = self.bytes

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and count the storages of its outputs that are not those of its inputs."""
        given = {tensor.untyped_storage()._cdata for tensor in _strided((args, kwargs))}
        result = operator(*args, **kwargs)
        for tensor in _strided(result):
            if tensor.untyped_storage()._cdata not in given:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
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


def _strided(tree: Any) -> list[Tensor]:
    """The tensors of nested containers that have a storage."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


class InterceptedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A context in which a function runs this thread's operators instead of torch.

    Parameters
    ----------
    run
        Gets an operator, its arguments and its keyword arguments, and returns the operator's result.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass an operator to the function; operators that the function uses are not intercepted."""
        return self._run(func, args, kwargs or {})
