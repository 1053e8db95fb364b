"""The sending ends of channels: start sends, keep their tensors alive until they are done, notice failures.

gloo's Work of a send says that it is complete only once it was waited for, and completes only when the peer
has posted its receive. So a small thread per channel waits for the sends in order and lets go of their
tensors. To wake it costs the sending thread more than the rest of a small send together, so that is done only
when there is memory to be given back; small tensors wait for its next look. NCCL's can be asked without
waiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.transport.cuda_api import CudaEvent
from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_errors import classified

_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.05
_WORTH_A_WAKE_BYTES = 256 * 1024
_EVER = timedelta(days=1)
_TAG = 0
"""Channels are ordered: nothing is told apart by tags."""


class SendWork(Protocol):
    """What is asked of torch's Work."""

    def wait(self, timeout: timedelta = ...) -> object:
        """gloo: until the peer took it."""

    def is_completed(self) -> bool:
        """NCCL: whether the peer took it, or it failed."""

    def is_success(self) -> bool:
        """Of a completed one."""

    def exception(self) -> object:
        """Why it failed."""


class Wire(Protocol):
    """One end of a channel's process group, see :class:`GroupWire`."""

    def send(self, tensor: Tensor) -> SendWork:
        """Start a send."""


class Endpoint(Protocol):
    """A process group, or the backend inside it."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:  # torch's name
        """Start a send."""

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        """Post a receive."""


class GroupWire(NamedTuple):
    """A process group of two, and the other one's rank in it.

    Sends and receives go to the group itself: the functions of ``torch.distributed`` look up again, at every
    call, what never changes.
    """

    group: Endpoint
    peer: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, peer: int) -> GroupWire:
        """The wire of a group to the global rank ``peer``.

        With gloo it is the backend's: a group's send is an operator of torch's dispatcher, which costs as
        much again as gloo's own part and only finds that backend.
        """
        at, cpu = dist.get_group_rank(group, peer), torch.device("cpu")
        if dist.get_backend(group) != "gloo":
            return cls(group, at)
        return cls(cast("Endpoint", group._get_backend(cpu)), at)

    def send(self, tensor: Tensor) -> dist.Work:
        """Start a send."""
        return self.group.send([tensor], self.peer, _TAG)

    def receive(self, tensor: Tensor) -> dist.Work:
        """Post a receive into a tensor."""
        return self.group.recv([tensor], self.peer, _TAG)


class SendFailures:
    """The first failure of a rank's sends, wherever it was noticed: one look per action finds it."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def add(self, error: Exception) -> None:
        """Note a failure; the ones that follow from it are not the cause."""
        if self.first is None:
            self.first = error

    def check(self) -> None:
        """Raise the failure if there is one."""
        if self.first is not None:
            raise self.first


class Sender(ABC):
    """The sending end of one channel.

    Parameters
    ----------
    peer
        The global rank at the other end.
    """

    def __init__(self, peer: int, wire: Wire, failures: SendFailures):
        self._peer = peer
        self._wire = wire
        self._failures = failures

    @abstractmethod
    def send(self, tensor: Tensor, label: object) -> None:
        """Send without waiting; raises TimeoutError or ConnectionError when it cannot start.

        ``label`` names the tensor in errors; it is asked for its text only there.
        """

    @abstractmethod
    def look(self) -> None:
        """Let go of what is done, where somebody must look for that."""

    @abstractmethod
    def flush(self, deadline: float) -> None:
        """Wait until everything was taken; raises TimeoutError or ConnectionError."""

    @abstractmethod
    def close(self) -> None:
        """Stop; does not wait for the peer."""

    def _start(self, tensor: Tensor, label: object) -> SendWork:
        try:
            return self._wire.send(tensor)
        except RuntimeError as error:
            raise classified(error, self._what(label)) from error

    def _what(self, label: object) -> str:
        return f"sending {label} to rank {self._peer}"


class _Sent(NamedTuple):
    work: SendWork | None
    payload: Tensor
    label: object
    copied: CudaEvent | None = None
    on_device: Tensor | None = None


def _payload(tensor: Tensor) -> Tensor:
    """What is sent: memory in order, and no graph that would be kept alive with it."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class ThreadSender(Sender):
    """Waits for sends in a thread of its own (gloo).

    Parameters
    ----------
    staging
        For a rank that computes on a GPU: the thread also starts the sends, each when its copy to the host
        is done.
    is_staged
        Which tensors are copied: those on a GPU, so headers are not.
    """

    def __init__(
        self,
        peer: int,
        wire: Wire,
        failures: SendFailures,
        staging: Staging | None = None,
        is_staged: Callable[[Tensor], bool] = _is_on_gpu,
    ):
        super().__init__(peer, wire, failures)
        self._is_staged = is_staged
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

    @override
    def send(self, tensor: Tensor, label: object) -> None:
        tensor = _payload(tensor)
        self._added += 1
        if self._staging is not None:
            self._sent.append(self._staged(tensor, label))
            self._wakes.put(True)  # it starts the send
            return
        self._sent.append(_Sent(self._start(tensor, label), tensor, label))
        self._bytes += tensor.nbytes
        if self._bytes >= _WORTH_A_WAKE_BYTES:
            self._bytes = 0
            self._wakes.put(True)

    def _staged(self, tensor: Tensor, label: object) -> _Sent:
        if self._staging is None or not self._is_staged(tensor):
            return _Sent(None, tensor, label)
        copy, copied = self._staging.outwards(tensor)
        return _Sent(None, copy, label, copied, tensor)

    @override
    def look(self) -> None:
        """The thread does."""

    @override
    def flush(self, deadline: float) -> None:
        # By looking, once a run: a condition would cost every send something.
        self._wakes.put(True)
        while self._finished < self._added:
            self._failures.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._peer} did not take {self._current}")
            time.sleep(_POLL_SECONDS)
        self._failures.check()

    @override
    def close(self) -> None:
        self._closed = True
        self._wakes.put(True)
        self._thread.join(timeout=0.2)  # a daemon: one that still waits for a lost peer is left behind

    def _reap(self) -> None:
        while not self._closed:
            with contextlib.suppress(Empty):
                self._wakes.get(timeout=_LOOK_SECONDS)
            while self._sent and not self._closed:
                self._reap_one(self._sent.popleft())

    def _reap_one(self, sent: _Sent) -> None:
        self._current = sent.label
        try:
            self._finish(sent)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            if not self._closed:
                known = isinstance(error, TimeoutError | ConnectionError)
                self._failures.add(error if known else classified(error, self._what(sent.label)))
        self._finished += 1

    def _finish(self, sent: _Sent) -> None:
        if sent.copied is not None:
            sent.copied.synchronize()
        work = sent.work if sent.work is not None else self._start(sent.payload, sent.label)
        # How long a peer may take is for it to say, whose receive has the timeout: it may be busy with other
        # microbatches. This one ends with the connection, or with the process.
        work.wait(_EVER)


class PollSender(Sender):
    """Asks the sends whether they are done (NCCL).

    A send begins where the compute stream's queue ends when it is issued, and holds up no other stream.
    """

    def __init__(self, peer: int, wire: Wire, failures: SendFailures):
        super().__init__(peer, wire, failures)
        self._sent: deque[_Sent] = deque()

    @override
    def send(self, tensor: Tensor, label: object) -> None:
        self.look()
        self._failures.check()
        tensor = _payload(tensor)
        self._sent.append(_Sent(self._start(tensor, label), tensor, label))

    @override
    def look(self) -> None:
        while self._sent:
            work, _, label, *_ = self._sent[0]
            if work is None or not work.is_completed():
                return
            if not work.is_success():
                self._failures.add(ConnectionError(f"{self._what(label)} failed: {work.exception()}"))
            self._sent.popleft()

    @override
    def flush(self, deadline: float) -> None:
        self.look()
        self._failures.check()
        while self._sent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._peer} did not take {self._sent[0].label}")
            time.sleep(_POLL_SECONDS)
            self.look()
            self._failures.check()

    @override
    def close(self) -> None:
        self._sent.clear()
