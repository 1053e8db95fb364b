"""What one F keeps for its backward, so that it can leave the device's memory and come back.

Autograd passes each tensor that it saves to a hook (:class:`torch.autograd.graph.saved_tensors_hooks`). The
hook gives it a :class:`_Saved` in place of the tensor, which refers to the tensor's memory. So what autograd
saves is freed when this module lets it go, unless somebody else needs it: the other stage of a rank, for
instance, what passed between them. Then less memory is freed, but nobody gets wrong values.

Some memory stays, because something else holds it anyway: parameters, buffers, data, and what the F's of
several microbatches save, such as a mask that a layer has made once. So do tensors that are more than numbers
in memory: sparse ones, and those of subclasses other than DTensor.

Autograd checks no versions of tensors that it passes to hooks, so this module does, at the same point: when a
backward needs a tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import DTensorSpec, is_dtensor, local_of

_ALIGNMENT = 512
"""Bytes between the beginnings of copies in one buffer, so that every dtype fits."""
_MOST_SEEN = 4096
"""Remembered storages per stage; a stage of a hundred layers saves about as many in one F."""


class Seen:
    """The memory that F's of one stage have saved: what two of them save is held by something else."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[StorageWeakRef, object]] = {}

    def is_shared(self, storage: torch.UntypedStorage, owner: object) -> bool:
        """Whether the F of another microbatch has saved this memory, too."""
        known = self._by.get(storage._cdata)
        if known is not None and not _is_gone(known[0]):
            return known[1] is not owner
        if len(self._by) >= _MOST_SEEN:
            self._by = {key: each for key, each in self._by.items() if not _is_gone(each[0])}
        self._by[storage._cdata] = StorageWeakRef(storage), owner  # type: ignore[no-untyped-call]  # torch's own
        return False


def _is_gone(reference: StorageWeakRef) -> bool:
    found: bool = reference.expired()  # type: ignore[no-untyped-call]  # torch's own
    return found


class Kept:
    """What the F of one stage and microbatch keeps.

    Parameters
    ----------
    device
        Tensors on other devices stay where they are.
    staying
        The addresses of the memory that stays (:func:`addresses_of`).
    seen
        That of the stage.
    """

    def __init__(self, device: torch.device, staying: Collection[int], seen: Seen):
        self._device, self._staying, self._seen, self._token = device.type, staying, seen, object()
        # Weakly: a graph that F itself has dropped is freed at once.
        self._known: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._saved: list[weakref.ref[_Saved]] = []
        self._held: list[_Saved] = []
        self._memories: list[_Memory] = []

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which autograd saves tensors here: that of F."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def hold(self, tensor: Tensor) -> None:
        """Add a tensor that only the stage refers to: its data leave, and come back, too."""
        saved = self._pack(tensor)
        if isinstance(saved, _Saved) and not (saved.is_conj or saved.spec is not None):
            saved.owner = tensor
            self._held.append(saved)

    def settle(self) -> None:
        """Call once before the copy out: what is alive moves."""
        alive = (saved() for saved in self._saved)
        self._memories = list(dict.fromkeys(saved.memory for saved in alive if saved is not None))

    def clear(self) -> None:
        """Call when all has come back: the backward frees each tensor when it no longer needs it."""
        self._saved, self._held, self._memories = [], [], []

    @property
    def span(self) -> int:
        """The size of a buffer for all that moves."""
        return sum(memory.span for memory in self._memories)

    def places(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each place in a buffer (uint8, on the host), with what it is for (uint8, on the device)."""
        if not self._memories:
            return []
        parts = torch.split(buffer[: self.span], [memory.span for memory in self._memories])
        return [(part[: each.size], each.content()) for part, each in zip(parts, self._memories, strict=True)]

    def free(self) -> None:
        """Let go what was copied."""
        for reference in self._saved:
            if (saved := reference()) is not None:
                saved.let_go()
        for memory in self._memories:
            memory.storage = None

    def allocate(self) -> None:
        """Take memory for what comes back."""
        for memory in self._memories:
            memory.storage = _allocated(memory.size, memory.device)
        for saved in self._held:
            saved.come_back()

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of a tensor."""
        local, spec = tensor, None
        if is_dtensor(tensor):
            local, spec = local_of(tensor), DTensorSpec.of(tensor)
        if not self._moves(local):
            return _Staying(tensor)
        storage = local.untyped_storage()
        memory = self._known.get(storage._cdata)
        if memory is None:
            memory = self._known[storage._cdata] = _Memory(storage, local.device)
        saved = _Saved(memory, local, spec)
        self._saved.append(weakref.ref(saved))
        return saved

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if tensor.device.type != self._device or tensor.is_quantized or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._staying:
            return False
        return not self._seen.is_shared(storage, self._token)


def addresses_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where tensors have their memory on this rank."""
    own = map(local_of, tensors)
    return frozenset(each.untyped_storage().data_ptr() for each in own if each.layout is torch.strided)


def private(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Those that only this sequence refers to: a layer may have kept its input."""
    return (each for each in tensors if _references(each) <= _ALONE)


def _references(tensor: Tensor) -> int:
    """How often Python refers to a tensor. If C++ does, too, torch counts that as one more reference."""
    has_graph = tensor._use_count() > 1  # type: ignore[attr-defined]  # not in torch's stubs
    return sys.getrefcount(tensor) - (_OF_GRAPH if has_graph else 0)


_OF_GRAPH = 0


def _counted() -> tuple[int, int]:
    """The references to a tensor in a list, and how many more there are if a graph has it."""
    alone, used = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
    graph = used * 1.0
    first, second = (_references(each) for each in (alone, used))
    del graph
    return first - 1, second - first  # without the variable


_ALONE, _OF_GRAPH = _counted()


def _allocated(size: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


class _Memory:
    """One allocation on the device."""

    __slots__ = ("__weakref__", "device", "size", "storage")

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


class _Staying:
    """A tensor that stays."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor):
        # An output itself would be a cycle.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = _version(tensor)

    def tensor(self) -> Tensor:
        """The tensor; raises :class:`ModelError` if somebody has written to it since."""
        if _version(self._tensor) != self._version:
            raise _written(self._tensor.shape)
        return self._tensor


class _Saved:
    """A tensor whose memory moves.

    Attributes
    ----------
    owner
        The tensor whose data leave and come back; None if autograd refers to this object instead.
    spec
        Of a DTensor, whose local tensor this is.
    """

    __slots__ = (
        *("__weakref__", "_alias", "_changed", "_version", "_view"),
        *("is_conj", "memory", "owner", "spec"),
    )

    def __init__(self, memory: _Memory, tensor: Tensor, spec: DTensorSpec | None):
        self.memory, self.spec = memory, spec
        # Shares memory and version with the tensor, until the memory is let go.
        self._alias: Tensor | None = tensor.detach()
        self._version, self._changed = _version(tensor), False
        self._view = tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        self.is_conj = tensor.is_conj()
        self.owner: Tensor | None = None

    def tensor(self) -> Tensor:
        """The tensor; raises :class:`ModelError` if somebody wrote to it before its memory was let go."""
        found = self._alias
        if self._changed or (found is not None and _version(found) != self._version):
            raise _written(self._view[1])
        if found is None:
            found = self.memory.seen_as(*self._view)
            found = found.conj() if self.is_conj else found
        return found if self.spec is None else self.spec.around(found)

    def let_go(self) -> None:
        """Refer to the memory no longer."""
        if self._alias is not None:
            self._changed = _version(self._alias) != self._version
        self._alias = None
        if self.owner is not None:
            dtype, shape, _, _ = self._view
            # Of the same shape, which autograd checks. Nobody must read it, so it is no number if it can be.
            ones = torch.full((dtype.itemsize,), 255, dtype=torch.uint8, device=self.owner.device)
            self.owner.data = ones.view(dtype)[0].expand(shape)

    def come_back(self) -> None:
        """Refer to the memory again."""
        if self.owner is not None:
            self.owner.data = self.memory.seen_as(*self._view)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those of the inference mode have none


def _written(shape: Iterable[int]) -> ModelError:
    return ModelError(
        f"a tensor {list(shape)} that the backward needs was written to after its layer had saved it. Do not "
        f"write to it in place (use x = x + y in place of x += y)."
    )


def _unpack(saved: _Saved | _Staying) -> Tensor:
    """What autograd saved, for its backward."""
    return saved.tensor()
