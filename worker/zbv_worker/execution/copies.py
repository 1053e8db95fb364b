"""Copies to the memory of the host and back, as a plan says; see "Copies to the host" in docs/formats.md.

============  ==============================================================================================
entry         what happens
============  ==============================================================================================
F             what autograd saves is noted (:mod:`zbv_worker.stage.kept`)
O             the engine that copies out starts, once the device has done what was queued before
D             the device waits for that copy, and its memory is free
R             the device has taken memory again, and the engine that copies in starts
I or B        the device waits for that copy
============  ==============================================================================================

A rank has one engine per direction, which copies in the order of the list. On a GPU an engine is a stream,
and the buffers on the host are pinned; only the device waits, never the host. On the CPU an engine is a
thread, and the rank itself waits.

A buffer is used again once the backward has waited for its copy in, so there are as many as the plan has
copies at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from zbv_solver.plans.orders import Action

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.binding import Computation
from zbv_worker.execution.timeline import CudaTimeline, Timeline
from zbv_worker.stage.kept import Kept, Seen, addresses_of


@runtime_checkable
class Movable(Protocol):
    """A stage whose F's can leave the device's memory."""

    def tensors(self) -> Sequence[Tensor]:
        """What the stage holds all the time: parameters and buffers."""

    def hold_inputs(self, microbatch: int, kept: Kept) -> None:
        """Call after F: add what the stage keeps besides what autograd saves."""


class Copies:
    """The copies of one rank.

    Parameters
    ----------
    stages
        By index.
    timeline
        That of the device.

    Raises
    ------
    InvalidRun
        If a stage cannot be moved.
    """

    def __init__(self, stages: Mapping[int, Computation], device: torch.device, timeline: Timeline):
        self._stages = {index: _movable(index, stage) for index, stage in stages.items()}
        self._device = device
        self._staying: dict[int, frozenset[int]] = {}
        self._seen: defaultdict[int, Seen] = defaultdict(Seen)
        make = (lambda: _Stream(timeline, device)) if isinstance(timeline, CudaTimeline) else _Thread
        self._out, self._in = make(), make()
        self._is_pinned = isinstance(timeline, CudaTimeline)
        self._copied: dict[tuple[int, int], _Copied] = {}
        self._free: list[Tensor] = []
        self._host_bytes = 0

    @property
    def host_bytes(self) -> int:
        """The size of all buffers."""
        return self._host_bytes

    def begin(self) -> None:
        """Begin a step. Parameters may have other memory than before."""
        self._staying.clear()

    def keeping(self, index: int, microbatch: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The F of a stage, which then notes what it keeps."""
        stage = self._stages[index]

        def noted(*arguments: Any, **keywords: Any) -> Any:
            if index not in self._staying:
                self._staying[index] = addresses_of(stage.tensors())
            # Data belong to the user; only later stages get their input from another stage.
            data = arguments[1:] if index else arguments
            leaves = (each for each in tree_leaves((data, keywords)) if isinstance(each, Tensor))
            kept = Kept(self._device, self._staying[index] | addresses_of(leaves), self._seen[index])
            with kept.saving(), _naming_transforms():
                output = forward(*arguments, **keywords)
            stage.hold_inputs(microbatch, kept)
            self._copied[index, microbatch] = _Copied(kept)
            return output

        return noted

    def run(self, action: Action) -> None:
        """Run an O, D or R, or what an I or B begins with."""
        stage, letter, microbatch = action
        copied = self._copied[stage, microbatch]
        kept, buffer = copied.kept, copied.buffer
        if buffer is None:  # an O
            kept.settle()
            copied.buffer = buffer = self._buffer(kept.span)
            copied.ended = self._out.copy(kept.places(buffer))
        elif letter == "D":
            self._out.wait(copied.ended)
            kept.free()
        elif letter == "R":
            kept.allocate()
            copied.ended = self._in.copy([(there, here) for here, there in kept.places(buffer)])
        else:
            self._in.wait(copied.ended)
            kept.clear()
            del self._copied[stage, microbatch]
            self._free.append(buffer)

    def close(self) -> None:
        """Stop the engines, and free what a failed step has left."""
        self._out.close()
        self._in.close()
        self._copied.clear()
        self._free.clear()

    def _buffer(self, size: int) -> Tensor:
        """The smallest free buffer that is large enough, or a new one in place of the largest free one."""
        self._free.sort(key=Tensor.numel)
        for at, buffer in enumerate(self._free):
            if buffer.numel() >= size:
                return self._free.pop(at)
        if self._free:
            self._host_bytes -= self._free.pop().numel()
        self._host_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)


class _Copied:
    """The copy of one F."""

    __slots__ = ("buffer", "ended", "kept")

    def __init__(self, kept: Kept):
        self.kept = kept
        self.buffer: Tensor | None = None
        self.ended: Any = None
        """The end of the last copy that has begun."""


class _Thread:
    """An engine of the CPU."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "zbv-copies")

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Future[None]:
        """Start to copy each second tensor into the first; returns what :meth:`wait` takes."""

        def work() -> None:
            while waiting:  # the thread may keep its last work for a while, but no memory
                target, source = waiting.pop()
                target.copy_(source)

        waiting = list(pairs)
        return self._pool.submit(work)

    def wait(self, ended: Future[None]) -> None:
        """Wait for the end of a copy."""
        ended.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


class _Stream:
    """An engine of a GPU; see :class:`_Thread`."""

    def __init__(self, timeline: CudaTimeline, device: torch.device):
        self._cuda, self._device = timeline.cuda, device
        self._stream = timeline.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Queue the copies after what is queued on the compute stream."""
        begun, ended = (self._cuda.Event(enable_timing=False) for _ in range(2))
        begun.record(self._cuda.current_stream(self._device))
        self._stream.wait_event(begun)
        with self._cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        ended.record(self._stream)
        return ended

    def wait(self, ended: Any) -> None:
        """Make the compute stream wait."""
        self._cuda.current_stream(self._device).wait_event(ended)

    def close(self) -> None:
        """Nothing to end."""


@contextmanager
def _naming_transforms() -> Iterator[None]:
    """A context for an F without transforms of ``torch.func``, which refuse hooks for saved tensors."""
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise ModelError(
            "a layer uses a transform of torch.func, such as grad or vjp, which torch cannot run while what "
            "the layer keeps is copied to the host. Use torch.autograd.grad in the layer, or a plan without "
            "copies."
        ) from error


def _movable(index: int, stage: Computation) -> Movable:
    if isinstance(stage, Movable):
        return stage
    raise InvalidRun(
        f"stage {index}: a {type(stage).__name__} has no model, and the plan copies what it keeps to the "
        f"host. Use a plan without copies."
    )
