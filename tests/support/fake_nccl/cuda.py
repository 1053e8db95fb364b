"""``torch.cuda`` and tensors on a fake device.

A device tensor is a CPU tensor in memory that the device has allocated. While a rank's thread runs, a
function mode gives it the device of a GPU, and turns what torch would queue on a GPU into kernels. A function
that is not listed here is refused for device tensors, so that nothing happens at once by mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from support.fake_nccl.device import Device, FakeEvent, FakeStream
from support.fake_nccl.memory import Block
from support.fake_nccl.simulation import ModelError

_KERNEL_SECONDS = 5e-6
TOTAL_BYTES = 1 << 30


class FakeCuda:
    """The functions of ``torch.cuda`` (:class:`zbv_worker.transport.torch_api.CudaApi`)."""

    def __init__(self, device: Device):
        self._device = device

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self._device, enable_timing)

    def Stream(self, device: object = None, priority: int = 0) -> FakeStream:
        return self._device.pool_stream(high_priority=priority < 0)

    def current_stream(self, device: object = None) -> FakeStream:
        return self._device.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._device.current = self._device.current, stream
        try:
            yield
        finally:
            self._device.current = before

    def synchronize(self, device: object = None) -> None:
        for stream in self._device.streams:
            self._device.block_until_passed(stream.record())

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return TOTAL_BYTES - self._device.memory.device.live - self._device.connected_bytes, TOTAL_BYTES


_FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like", "ones_like"}
_METADATA = {
    "data_ptr", "detach", "dim", "element_size", "is_contiguous", "is_conj", "is_floating_point",
    "is_inference", "is_neg", "nelement", "numel", "requires_grad_", "size", "storage_offset", "stride",
    "untyped_storage", "__get__", "__len__", "__hash__", "__set__",
}  # fmt: skip
_VIEWS = {
    "__getitem__", "expand", "set_", "split", "view", "view_as", "reshape", "t", "transpose", "unbind",
    "narrow", "unsqueeze", "squeeze",
}  # fmt: skip
_HOST_READS = {"item", "tolist", "__float__", "__int__", "__bool__", "equal", "allclose", "numpy", "__repr__"}
_IN_PLACE = {"add_", "mul_", "div_", "zero_", "fill_", "sub_"}
_KERNELS = {
    "add", "mul", "div", "sub", "sum", "stack", "cat", "__add__", "__mul__", "__sub__", "square", "isfinite",
    "all", "double", "float",
}  # fmt: skip


class OnDevice(TorchFunctionMode):
    """Makes this thread's torch functions run on a fake device."""

    def __init__(self, device: Device, index: int):
        super().__init__()
        self._device = device
        self._torch_device = torch.device("cuda", index)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FACTORIES:
            return self._made(func, name, args, kwargs)
        if name == "pin_memory" and not self._on_device(args[0]):
            return args[0] if self._block(args[0]) else self._pinned(args[0])
        tensors = [
            a for a in _flat((args, tuple(kwargs.values()))) if isinstance(a, Tensor) and self._block(a)
        ]
        target = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device | str)), None)
        to_device = name == "to" and target is not None and torch.device(target).type == "cuda"
        if not (tensors or to_device):
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args[0])
        if name in _METADATA:
            return func(*args, **kwargs)
        return self._computed(func, name, args, kwargs, tensors)

    def _computed(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if name in ("to", "cpu"):
            return self._moved(args, kwargs, name)
        if name == "copy_":
            return self._copied(args[0], args[1], non_blocking=kwargs.get("non_blocking", False))
        if name in ("clone", "contiguous"):
            if name == "contiguous" and args[0].is_contiguous():
                return args[0]
            return self._copied(self._empty_like(args[0]), args[0])
        if name in _VIEWS:
            made = func(*args, **kwargs)
            if all(self._block(part) is not None for part in _flat((made,))):
                return made
        if name in _HOST_READS:
            return func(*[self._read_on_host(a) if isinstance(a, Tensor) else a for a in args], **kwargs)
        if all(not self._on_device(tensor) for tensor in tensors):
            raise ModelError(f"{name} uses pinned host memory; only copies of it are modelled")
        if name in _IN_PLACE:
            return self._launched(func, args, kwargs, args[0])
        if name in ("double", "float") and func(args[0][:0]).dtype is args[0].dtype:
            return args[0]
        if name in _KERNELS:
            meta = func(*_mapped(args, lambda t: t.to("meta")), **kwargs)
            return self._launched(func, args, kwargs, self._empty(meta.shape, meta.dtype))
        raise ModelError(f"the model of CUDA does not know {name}; add it to tests/support/fake_nccl/cuda.py")

    def _block(self, tensor: Any) -> Block | None:
        return self._device.memory.block_of(tensor)

    def _on_device(self, tensor: Tensor) -> bool:
        block = self._block(tensor)
        return block is not None and block.is_on_device

    def _attribute(self, func: Any, tensor: Tensor) -> Any:
        attribute = func.__self__.__name__
        if self._on_device(tensor):
            if attribute == "device":
                return self._torch_device
            if attribute == "is_cuda":
                return True
        return func(tensor)

    def _empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return self._device.memory.allocate(tuple(shape), dtype, self._device.current.number)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        return self._empty(tensor.shape, tensor.dtype)

    def _made(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A factory: on the device it allocates now and fills later."""
        kwargs = dict(kwargs)
        like = args[0] if name.endswith("_like") else None
        wanted = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        on_device = torch.device(wanted).type == "cuda" if wanted is not None else self._is_like_device(like)
        content: Tensor = func(*args, **kwargs)
        if pinned:
            return self._device.memory.allocate(tuple(content.shape), content.dtype, place="pinned")
        if not on_device:
            return content
        made = self._empty_like(content)
        if not name.startswith("empty"):
            raw = self._device.memory.raw(made)
            self._launch(name, lambda: raw.copy_(content), (), (made,))
        return made

    def _is_like_device(self, like: Tensor | None) -> bool:
        return like is not None and self._on_device(like)

    def _pinned(self, source: Tensor) -> Tensor:
        """Pinned host memory with the same content; the host copies it now."""
        made = self._device.memory.allocate(tuple(source.shape), source.dtype, place="pinned")
        block: Any = self._block(made)
        self._device.memory.raw(made).copy_(source)
        block.garbage = None
        return made

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        source: Tensor = args[0]
        target = args[1] if len(args) > 1 else kwargs.get("device", "cpu")
        if isinstance(target, torch.dtype) or "dtype" in kwargs:
            raise ModelError("the model of CUDA does not know conversions of the dtype")
        to_device = torch.device(target).type == "cuda"
        if to_device == self._on_device(source):
            return source
        non_blocking = kwargs.get("non_blocking", False)
        if to_device:
            return self._copied(self._empty_like(source), source, non_blocking=non_blocking)
        # torch allocates pinned memory for non-blocking copies to the host, pageable memory otherwise.
        place: Literal["pinned", "pageable"] = "pinned" if non_blocking else "pageable"
        made = self._device.memory.allocate(tuple(source.shape), source.dtype, place=place)
        return self._copied(made, source, non_blocking=non_blocking)

    def _copied(self, target: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        """A copy on the current stream. The host waits for it, if it is not between device tensors."""
        memory = self._device.memory
        raw = memory.raw(target)
        if self._block(source) is None:
            content = source.clone()  # from pageable memory: staged before the call returns
            self._launch("copy", lambda: raw.copy_(content), (), (target,))
        elif self._block(target) is None:
            raise ModelError("a copy to memory that is not pinned blocks the host")
        else:
            self._queue_copy(target, source)
        if not non_blocking and not (self._on_device(source) and self._on_device(target)):
            self._device.block_until_passed(self._device.current.record())
        return target

    def _queue_copy(self, target: Tensor, source: Tensor) -> None:
        """A copy that delays the reuse of pinned memory (``CachingHostAllocator``)."""
        memory = self._device.memory
        raw, raw_source = memory.raw(target), memory.raw(source)
        blocks = [block for one in (target, source) if (block := self._block(one)) and not block.is_on_device]
        for block in blocks:
            block.pending += 1

        def run() -> None:
            raw.copy_(raw_source)
            for block in blocks:
                memory.release(block)

        self._launch("copy", run, (source,), (target,))

    def _launched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> Tensor:
        """An elementwise or reducing kernel."""
        memory = self._device.memory
        raw_args, raw_target = _mapped(args, memory.raw), memory.raw(target)
        read = args[1:] if func.__name__ in ("zero_", "fill_") else args
        reads = [a for a in _flat(read) if isinstance(a, Tensor) and self._block(a)]

        def run() -> None:
            made = func(*raw_args, **kwargs)
            if made.data_ptr() != raw_target.data_ptr():
                raw_target.copy_(made)

        self._launch(func.__name__, run, reads, (target,))
        return target

    def _launch(self, name: str, run: Callable[[], Any], reads: Any, writes: Any) -> None:
        self._device.current.launch(name, _KERNEL_SECONDS, run, reads, writes)

    def _read_on_host(self, tensor: Tensor) -> Tensor:
        """The content, for the host: a device tensor makes it wait, pinned memory does not."""
        block = self._block(tensor)
        if block is None:
            return tensor
        if block.is_on_device:
            stream = self._device.current
            ticket = stream.ticket("copy to the host")
            stream.use_memory(ticket[3], ticket[4], (tensor,), ())
            self._device.block_until_passed(stream.record())
        elif block.last_write is not None and not block.last_write.is_before(self._device.host().observed):
            raise ModelError(f"the host reads memory that {block.last_write.label} may not have written yet")
        return self._device.memory.raw(tensor).clone()


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _mapped(values: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return tuple(
        change(v)
        if isinstance(v, Tensor)
        else type(v)(_mapped(v, change))
        if isinstance(v, tuple | list)
        else v
        for v in values
    )
