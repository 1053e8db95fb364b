"""The ends of gloo channels: start sends, keep their tensors alive until done, and post receives.

A gloo send completes only once the peer has posted its receive, and reports completion only to a thread that
waits for it. So each channel has a thread that waits for its sends in order and releases their tensors.
Waking that thread costs the sender more than the rest of a small send, so it is woken only when enough memory
can be released; small tensors wait for its next poll.

gloo moves CPU memory only, so CUDA tensors pass through pinned host memory (:class:`Staging`). The copies use
their own streams, ordered by events, and overlap with compute. The copy of a sent tensor waits for the kernel
that computes it. The copy of a received tensor waits only for kernels that were queued when its receive was
posted, because they may still read the buffer's old content.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zbv_worker.errors import InvalidRun
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Send
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, classified, torch_cuda
from zbv_worker.values.structure import TensorSpec


class Staging:
    """The copies between one rank's GPU and host.

    Parameters
    ----------
    device
        Where the rank computes.
    pin
        Use pinned host memory; copies from or to pageable memory block the host. torch reuses a pinned block
        only after the copies queued on it are complete.
    """

    def __init__(self, device: torch.device, cuda: CudaApi | None = None, *, pin: bool = True):
        self._device = device
        self._cuda = cuda if cuda is not None else torch_cuda()
        self._pin = pin
        self._outwards = self._cuda.Stream(device)
        self._inwards = self._cuda.Stream(device)

    def host_memory(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A host tensor for one copy."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pin)

    def here(self) -> CudaEvent:
        """An event at the current end of the compute stream's queue."""
        return self._marked(self._cuda.current_stream(self._device))

    def outwards(self, tensor: Tensor) -> tuple[Tensor, CudaEvent]:
        """Queue a copy to the host; returns the host tensor and the event of its completion.

        The caller must keep the tensor alive until then.
        """
        ready = self.here()
        target = self.host_memory(tensor.shape, tensor.dtype)
        self._outwards.wait_event(ready)
        with self._cuda.stream(self._outwards):
            target.copy_(tensor, non_blocking=True)
        return target, self._marked(self._outwards)

    def inwards(self, source: Tensor, target: Tensor, free: CudaEvent) -> CudaEvent:
        """Queue a copy to the device and make the compute stream wait for it; returns its completion event.

        Parameters
        ----------
        free
            The event after which the target may be overwritten.
        """
        self._inwards.wait_event(free)
        with self._cuda.stream(self._inwards):
            target.copy_(source, non_blocking=True)
        arrived = self._marked(self._inwards)
        self._cuda.current_stream(self._device).wait_event(arrived)
        return arrived

    def _marked(self, stream: object) -> CudaEvent:
        event = self._cuda.Event(enable_timing=False)
        event.record(stream)
        return event


@lru_cache(maxsize=16)
def _patience(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class ReceiveWork(Protocol):
    """The part of gloo's Work that receives use."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until it arrived."""


# Not frozen: one is created per received tensor, and freezing doubles the cost of that.
@dataclass(eq=False, slots=True)
class HostReceive:
    """gloo into CPU memory."""

    work: ReceiveWork
    buffer: Tensor

    def wait(self, timeout: float) -> Tensor:
        """Wait until the tensor arrived."""
        try:
            self.work.wait(_patience(timeout))
        except RuntimeError as error:
            raise classified(error, "receive") from error
        return self.buffer

    on_stream = wait


@dataclass(frozen=True, eq=False, slots=True)
class StagedReceive:
    """gloo into pinned memory, then a copy to the GPU."""

    work: ReceiveWork
    arrived: Tensor
    buffer: Tensor
    free: CudaEvent
    """The event after which the buffer may be overwritten."""
    staging: Staging

    def wait(self, timeout: float) -> Tensor:
        """Wait until the tensor is on the GPU."""
        self._copied(timeout).synchronize()
        return self.buffer

    def on_stream(self, timeout: float) -> Tensor:
        """Wait on the host until it arrived, and make the current stream wait for the copy to the GPU."""
        self._copied(timeout)
        return self.buffer

    def _copied(self, timeout: float) -> CudaEvent:
        HostReceive(self.work, self.arrived).wait(timeout)
        return self.staging.inwards(self.arrived, self.buffer, self.free)


_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.05
_WAKE_BYTES = 256 * 1024
"""Unreleased bytes of sent tensors from which waking the thread is worth its cost."""
_EVER = timedelta(days=1)
_TAG = 0
"""Channels are ordered, so all messages use the same tag."""


class SendWork(Protocol):
    """The part of gloo's Work that sends use."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the peer has the tensor."""


class GroupWire(NamedTuple):
    """A process group of two, and the peer's rank in it.

    Sends and receives call the group directly: the functions of ``torch.distributed`` repeat lookups whose
    result never changes.
    """

    group: dist.ProcessGroup
    peer: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, peer: int) -> GroupWire:
        """The wire from a group to the global rank ``peer``.

        It uses the group's backend, which has the same methods: a group's send goes through torch's
        dispatcher, which takes as long as gloo's own part and only finds that backend.
        """
        backend = cast("dist.ProcessGroup", group._get_backend(torch.device("cpu")))
        return cls(backend, dist.get_group_rank(group, peer))


def receiving_end(
    wires: Mapping[ChannelKey, GroupWire],
    key: ChannelKey,
    rank: int,
    device: torch.device,
    staging: Staging | None,
) -> Receive:
    """How a rank receives on an open channel; raises :class:`InvalidRun` if it does not."""
    wire = wires.get(key)
    if wire is None:
        raise InvalidRun(f"rank {rank} does not receive on {key}.")
    receive, peer = wire.group.recv, wire.peer

    def post(spec: TensorSpec) -> Pending:
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        try:
            if staging is None:
                return HostReceive(receive([buffer], peer, _TAG), buffer)
            host = staging.host_memory(spec.shape, spec.dtype)
            return StagedReceive(receive([host], peer, _TAG), host, buffer, staging.here(), staging)
        except RuntimeError as error:
            raise classified(error, f"posting a receive from rank {key.sender}") from error

    return post


class SendFailures:
    """The first failure of a rank's sends; one check per action finds it."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def add(self, error: Exception) -> None:
        """Record a failure. Only the first counts, because later ones follow from it."""
        if self.first is None:
            self.first = error

    def check(self) -> None:
        """Raise the first failure, if any."""
        if self.first is not None:
            raise self.first


class _Sent(NamedTuple):
    work: SendWork | None
    payload: Tensor
    label: object
    copied: CudaEvent | None = None
    on_device: Tensor | None = None


def sendable(tensor: Tensor) -> Tensor:
    """The tensor to send: contiguous, and without a graph that it would keep alive."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class SendingEnd(Protocol):
    """The sending end of one channel."""

    def send(self, tensor: Tensor, label: object) -> None:
        """Send without waiting; raises TimeoutError or ConnectionError if it cannot start."""


def sending_end(ends: Mapping[ChannelKey, SendingEnd], key: ChannelKey, rank: int) -> Send:
    """How a rank sends on an open channel; raises :class:`InvalidRun` if it does not."""
    found = ends.get(key)
    if found is None:
        raise InvalidRun(f"rank {rank} does not send on {key}.")
    return found.send


def _staged(staging: Staging, tensor: Tensor, label: object) -> _Sent:
    """A send that waits for the tensor's copy to the host; headers are on the host already."""
    if not _is_on_gpu(tensor):
        return _Sent(None, tensor, label)
    copy, copied = staging.outwards(tensor)
    return _Sent(None, copy, label, copied, tensor)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class ThreadSender:
    """The sending end of one channel; waits for its sends in its own thread.

    Parameters
    ----------
    peer
        The global rank at the other end.
    staging
        Given if the rank computes on a GPU: the thread then also starts each send, once its copy to the host
        is complete.
    """

    def __init__(self, peer: int, wire: GroupWire, failures: SendFailures, staging: Staging | None = None):
        self._peer = peer
        self._wire = wire
        self._failures = failures
        self._staging = staging
        self._sent: deque[_Sent] = deque()
        self._bytes = 0
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._added = 0
        self._finished = 0
        self._current: object = ""
        self._closed = False
        self._thread = threading.Thread(target=self._reap, name=f"sends to {peer}", daemon=True)
        self._thread.start()

    def send(self, tensor: Tensor, label: object) -> None:
        """Send without waiting; raises TimeoutError or ConnectionError if it cannot start.

        ``label`` names the tensor in errors and is formatted only there.
        """
        tensor = sendable(tensor)
        self._added += 1
        if self._staging is not None:
            self._sent.append(_staged(self._staging, tensor, label))
            self._wakes.put(True)  # the thread starts the send
            return
        self._sent.append(_Sent(self._start(tensor, label), tensor, label))
        self._bytes += tensor.nbytes
        if self._bytes >= _WAKE_BYTES:
            self._bytes = 0
            self._wakes.put(True)

    def unfinished(self) -> object | None:
        """The label of the oldest send that the peer has not received; None without any."""
        if self._finished == self._added:
            return None
        if self._wakes.empty():
            self._wakes.put(True)
        return self._current

    def flush(self, deadline: float) -> None:
        """Wait until the peer has everything; raises TimeoutError or ConnectionError.

        Polls, once a run: a condition variable would slow every send down.
        """
        while (label := self.unfinished()) is not None:
            self._failures.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._peer} did not take {label}")
            time.sleep(_POLL_SECONDS)
        self._failures.check()

    def close(self) -> None:
        """Stop; does not wait for the peer."""
        self._closed = True
        self._wakes.put(True)
        self._thread.join(timeout=0.2)  # a daemon thread may still wait for a lost peer; leave it behind

    def _reap(self) -> None:
        while not self._closed:
            with contextlib.suppress(Empty):
                self._wakes.get(timeout=_LOOK_SECONDS)
            while self._sent and not self._closed:
                self._reap_one(self._sent.popleft())

    def _reap_one(self, sent: _Sent) -> None:
        self._current = sent.label
        try:
            if sent.copied is not None:
                sent.copied.synchronize()
            work = sent.work if sent.work is not None else self._start(sent.payload, sent.label)
            # No timeout here: the receiving peer times its own wait and may be busy with other microbatches.
            # This wait ends with the connection or with the process.
            work.wait(_EVER)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            if not self._closed:
                known = isinstance(error, TimeoutError | ConnectionError | torch.AcceleratorError)
                self._failures.add(error if known else classified(error, self._what(sent.label)))
        self._finished += 1

    def _start(self, tensor: Tensor, label: object) -> SendWork:
        try:
            return self._wire.group.send([tensor], self._wire.peer, _TAG)
        except RuntimeError as error:
            raise classified(error, self._what(label)) from error

    def _what(self, label: object) -> str:
        return f"sending {label} to rank {self._peer}"
