"""What one F keeps for its backward, so that it can leave the device's memory and come back.

Autograd passes each tensor that it saves to a hook (:class:`torch.autograd.graph.saved_tensors_hooks`). The
hook gives it a :class:`_Saved` in place of the tensor, which refers to the tensor's memory. So what autograd
saves is freed when this module lets it go, unless somebody else needs it: a layer may keep a mask for all
microbatches, or the other stage of a rank what passed between them. Then less memory is freed, but nobody
gets wrong values.

Parameters and buffers stay, because the stage holds them anyway. So do tensors that are more than numbers in
memory: sparse ones, and those of subclasses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import local_of

_ALIGNMENT = 512
"""Bytes between the beginnings of copies in one buffer, so that every dtype fits."""


class Kept:
    """What the F of one stage and microbatch keeps.

    Parameters
    ----------
    device
        Tensors on other devices stay where they are.
    staying
        The addresses of the memory that stays (:func:`addresses_of`).
    """

    def __init__(self, device: torch.device, staying: Collection[int]):
        self._device, self._staying = device.type, staying
        self._memories: dict[int, _Memory] = {}
        self._saved: list[_Saved] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which autograd saves tensors here: that of F."""
        with saved_tensors_hooks(self._pack, unpacked):
            yield

    def hold(self, tensor: Tensor) -> None:
        """Add a tensor that only the stage refers to: its data leave, and come back, too."""
        saved = tensor if tensor.is_conj() else self._pack(tensor)
        if isinstance(saved, _Saved):
            saved.owner = tensor

    @property
    def bytes(self) -> int:
        """The memory that moves."""
        return sum(memory.size for memory in self._memories.values())

    @property
    def span(self) -> int:
        """The size of a buffer for it."""
        return sum(memory.span for memory in self._memories.values())

    def places(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each place in a buffer (uint8, on the host), with what it is for (uint8, on the device)."""
        memories = self._memories.values()
        parts = torch.split(buffer[: self.span], [memory.span for memory in memories])
        return [(part[: memory.size], memory.content()) for part, memory in zip(parts, memories, strict=True)]

    def free(self) -> None:
        """Let go what was copied; raises :class:`ModelError` if somebody has written to it since F."""
        for saved in self._saved:
            saved.let_go()
        for memory in self._memories.values():
            memory.storage = None

    def allocate(self) -> None:
        """Take memory for what comes back."""
        for memory in self._memories.values():
            memory.storage = _allocated(memory.size, memory.device)
        for saved in self._saved:
            saved.come_back()

    def _pack(self, tensor: Tensor) -> Any:
        """A :class:`_Saved`, or the tensor itself if it stays."""
        if not self._moves(tensor):
            return tensor if tensor.is_leaf else tensor.detach()  # an output itself would be a cycle
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = _Memory(storage, tensor.device)
        saved = _Saved(memory, tensor)
        self._saved.append(saved)
        return saved

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if tensor.device.type != self._device or tensor.is_quantized or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and storage.data_ptr() not in self._staying


def addresses_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where tensors have their memory on this rank."""
    own = map(local_of, tensors)
    return frozenset(each.untyped_storage().data_ptr() for each in own if each.layout is torch.strided)


def _allocated(size: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


class _Memory:
    """One allocation on the device."""

    __slots__ = ("device", "size", "storage")

    def __init__(self, storage: torch.UntypedStorage, device: torch.device):
        self.storage: torch.UntypedStorage | None = storage
        self.size, self.device = storage.nbytes(), device

    @property
    def span(self) -> int:
        """The bytes that it takes in a buffer."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT

    def content(self) -> Tensor:
        """All bytes; raises :class:`ModelError` if somebody has freed some."""
        if self.storage is not None and self.storage.nbytes() != self.size:
            raise ModelError(
                f"found {self.storage.nbytes()} bytes of {self.size} that a backward needs: something has "
                f"resized the memory since F. Use a plan without copies to the host."
            )
        return self.seen_as(torch.uint8, (self.size,), (1,), 0)

    def seen_as(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """A tensor in this memory."""
        if self.storage is None:
            raise ModelError(
                "a backward needs what its plan has on the host at that time. Check the plan with "
                "`zbv check`."
            )
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self.storage, offset, torch.Size(shape), tuple(stride))


class _Saved:
    """One tensor that was saved.

    Attributes
    ----------
    owner
        The tensor whose data leave and come back; None if autograd refers to this object instead.
    """

    __slots__ = ("_alias", "_is_conj", "_memory", "_version", "_view", "owner")

    def __init__(self, memory: _Memory, tensor: Tensor):
        self._memory = memory
        # Shares memory and version with the tensor, until the memory is let go.
        self._alias: Tensor | None = tensor.detach()
        self._version = 0 if tensor.is_inference() else tensor._version
        self._view = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        self._is_conj = tensor.is_conj()
        self.owner: Tensor | None = None

    def tensor(self) -> Tensor:
        """The tensor; raises :class:`ModelError` if somebody has written to it since F."""
        if self._alias is None:
            seen = self._memory.seen_as(*self._view)
            return seen.conj() if self._is_conj else seen
        self._require_unchanged(self._alias)
        return self._alias

    def let_go(self) -> None:
        """Refer to the memory no longer."""
        if self.owner is None:
            self._require_unchanged(self._alias)
        else:
            dtype, shape, _, _ = self._view
            # Of the same shape, which autograd checks. Nobody must read it, so it is no number if it can be.
            nothing = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
            self.owner.data = torch.full((), nothing, dtype=dtype, device=self.owner.device).expand(shape)
        self._alias = None

    def come_back(self) -> None:
        """Refer to the memory again."""
        if self.owner is not None:
            self.owner.data = self._memory.seen_as(*self._view)

    def _require_unchanged(self, alias: Tensor | None) -> None:
        if alias is not None and not alias.is_inference() and alias._version != self._version:
            raise ModelError(
                f"a tensor {list(alias.shape)} that the backward needs was written to after its layer had "
                f"saved it. Do not write to it in place (use x = x + y in place of x += y)."
            )


def unpacked(saved: Any) -> Tensor:
    """What autograd saved, for its backward."""
    tensor: Tensor = saved.tensor() if isinstance(saved, _Saved) else saved
    return tensor
