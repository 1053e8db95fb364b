"""Device memory: blocks with poison, and the order between everything that uses a block.

Every use of a block carries a vector clock: for each stream, how many of its operations are known to be
finished before. Two uses of which one writes must be ordered by these clocks, whatever the durations. So a
missing wait is found in every run, and not only when timing is unlucky.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from support.fake_nccl.simulation import ModelError

if TYPE_CHECKING:
    from support.fake_nccl.device import FakeStream

Clock = dict[int, int]
"""Operations known to be finished, by stream number."""

_POISON = 0xFF
"""In every byte: not a number in all float types, -1 in all integer types."""


def merge(into: Clock, other: Mapping[int, int]) -> None:
    """Add what ``other`` knows to a clock."""
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


@dataclass(frozen=True)
class Use:
    """One use of a block: the ``count``-th operation of a stream."""

    stream: int
    count: int
    label: str

    def is_before(self, clock: Mapping[int, int]) -> bool:
        """Whether the use is finished before whatever has this clock."""
        return clock.get(self.stream, 0) >= self.count


class _Exported(np.ndarray[Any, Any]):
    """The array that tensors hold. It dies with the last tensor, while the memory itself lives on."""


@dataclass(eq=False)
class Account:
    """How much memory of one kind is allocated, as torch's caching allocators count it.

    Freed memory is available at once, except while a recorded stream or a queued copy still uses it. What was
    once taken from CUDA stays with the allocator.
    """

    live: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> bool:
        """Count an allocation; returns whether CUDA must provide more memory."""
        self.live += nbytes
        grows, self.peak = self.live > self.peak, max(self.live, self.peak)
        return grows


@dataclass(eq=False)
class Block:
    raw: Tensor
    """The memory, for operations of the device."""
    owner: int
    """The stream on which it was allocated: memory that is freed is reused in this stream's order."""
    is_on_device: bool
    account: Account | None = None
    """Where it counts; None for pageable memory."""
    last_write: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    """Streams that delay reuse until they pass their end at the time of freeing (``record_stream``)."""
    pending: int = 0
    """Queued operations that delay the reuse."""
    is_freed: bool = False
    garbage: str | None = "nothing has written it"
    """Why the content is meaningless; None if it is not."""

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def read(self, use: Use, clock: Clock) -> None:
        """Add a reader, or raise :class:`ModelError` if nothing orders it after the last writer."""
        if self.last_write is not None and not self.last_write.is_before(clock):
            raise ModelError(
                f"{use.label} reads memory that {self.last_write.label} may not have written yet"
            )
        if self.garbage is not None:
            raise ModelError(f"{use.label} reads garbage: {self.garbage}")
        self.reads[use.stream] = use

    def write(self, use: Use, clock: Clock) -> None:
        """Add a writer, or raise :class:`ModelError` if nothing orders it after all earlier uses."""
        for earlier in (self.last_write, *self.reads.values()):
            if earlier is not None and not earlier.is_before(clock):
                did = "written" if earlier is self.last_write else "read"
                raise ModelError(f"{use.label} overwrites memory that {earlier.label} may not have {did} yet")
        self.last_write, self.garbage = use, None
        self.reads.clear()

    def poison(self, why: str) -> None:
        self.raw.fill_(_POISON)
        self.garbage = why

    def unordered_at_free(self, clock: Clock) -> Use | None:
        """A use that reuse of the memory would not wait for."""
        for use in (self.last_write, *self.reads.values()):
            if use is None or use.stream in (self.owner, *self.recorded) or use.is_before(clock):
                continue
            return use
        return None


class DeviceMemory:
    """The blocks of one rank, on its device and on the host.

    Parameters
    ----------
    grow
        Called when CUDA must provide more memory.
    """

    def __init__(
        self, knows: Callable[[int], Clock], fail: Callable[[ModelError], None], grow: Callable[[], None]
    ):
        self._knows = knows
        self._fail = fail
        self._grow = grow
        self._blocks: dict[int, Block] = {}
        self._unordered: defaultdict[int, list[Block]] = defaultdict(list)
        self.device, self.pinned = Account(), Account()

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        owner: int = 0,
        place: Literal["device", "pinned", "pageable"] = "device",
    ) -> Tensor:
        """A poisoned tensor of new memory."""
        for block in self._unordered.pop(owner, ()):
            self._require_ordered(block)
        numel = max(1, int(np.prod(shape, dtype=np.int64)))
        words = np.full(numel * dtype.itemsize, _POISON, dtype=np.uint8)
        account = {"device": self.device, "pinned": self.pinned, "pageable": None}[place]
        if account is not None and account.add(len(words)):
            self._grow()
        exported = words.view(_Exported)
        with torch._C.DisableTorchFunction():
            block = Block(torch.from_numpy(words), owner, place == "device", account)
            tensor = torch.from_numpy(exported).view(dtype)[: int(np.prod(shape, dtype=np.int64))].view(shape)
            address = tensor.data_ptr()
        weakref.finalize(exported, self._free, address, block).atexit = False
        self._blocks[address] = block
        return tensor

    def users(self) -> list[str]:
        """The last writers of all allocated device memory."""
        blocks = [block for block in self._blocks.values() if block.is_on_device]
        return [block.last_write.label if block.last_write else "nothing" for block in blocks]

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that holds a tensor; None for ordinary host memory."""
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided:
                return None
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return self._blocks.get(tensor.data_ptr() - offset)

    def raw(self, tensor: Tensor) -> Tensor:
        """The same tensor for operations of the device: it does not keep the block allocated."""
        block = self.block_of(tensor)
        if block is None:
            return tensor
        with torch._C.DisableTorchFunction():
            whole = block.raw.view(tensor.dtype)
            return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        """Delay the reuse of freed memory until a stream has passed its end at that time."""
        block = self.block_of(tensor)
        if block is not None:
            block.recorded.add(stream.number)

    def release(self, block: Block) -> None:
        """An operation that delays the reuse of a block has ended."""
        block.pending -= 1
        self._settle(block)

    def _free(self, address: int, block: Block) -> None:
        self._blocks.pop(address, None)
        block.is_freed = True
        if block.is_on_device and block.owner:
            # Only the next allocation for that stream can reuse it, and the stream may wait before.
            self._unordered[block.owner].append(block)
        elif block.is_on_device:
            self._require_ordered(block)
        self._settle(block)

    def _require_ordered(self, block: Block) -> None:
        use = block.unordered_at_free(self._knows(block.owner))
        if use is not None:
            self._fail(ModelError(f"memory is freed, and may be reused, while {use.label} still uses it"))

    def _settle(self, block: Block) -> None:
        if block.is_freed and block.pending == 0 and block.account is not None:
            block.account.live -= block.nbytes
