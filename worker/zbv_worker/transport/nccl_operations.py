"""One rank's operations over NCCL: receives, sends and sums that are queued, their ends and their errors.

The host learns that one has ended by polling ``is_completed()``, and has its own deadlines. It remembers
itself that it aborted a group: NCCL then reports operations as complete.

Communicators have options, a largest number, and an order in which all ranks connect them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zbv_worker.host.process import Clock
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.gloo_ends import sendable
from zbv_worker.transport.torch_api import GroupOptions, NcclGroup, NcclWork, classified

CHANNEL_OPTIONS = GroupOptions(max_ctas=4)
"""A waiting receive occupies the multiprocessors of its thread blocks, which compute then cannot use."""
SUM_OPTIONS = GroupOptions()
"""Sums over replicas wait for ranks in the same position, so not for long; they may use NCCL's full width."""

MAX_COMMUNICATORS = 28
"""Of a process. torch has 32 streams per GPU and priority, and gives them out in turn (``CUDAStream.h``);
this leaves 3 for ``fully_shard`` and 1 more."""
NCCL_LOOK_AHEAD = 1
"""Receives posted ahead per channel. The first on a communicator waits on the device and occupies
multiprocessors; further ones wait in its stream and would only hold buffers, because the host queues actions
ahead of the device and so posts the next receive early enough."""


def greeting_order(keys: Iterable[ChannelKey]) -> list[ChannelKey]:
    """The order in which all ranks connect channels.

    Connecting blocks both ends, so the order is a greedy edge colouring: channels of one round have no rank
    in common and connect at the same time. No order of channels that is equal on all ranks can deadlock: of
    the channels not yet connected, the first is next for both its ends.
    """
    busy: dict[int, set[int]] = {}
    rounds = dict[ChannelKey, int]()
    for key in sorted(keys):
        taken = busy.setdefault(key.sender, set()) | busy.setdefault(key.receiver, set())
        rounds[key] = next(turn for turn in range(len(taken) + 1) if turn not in taken)
        busy[key.sender].add(rounds[key])
        busy[key.receiver].add(rounds[key])
    return sorted(rounds, key=lambda key: (rounds[key], key))


def kernels_at_once(
    keys: Iterable[ChannelKey],
    pp_rank: int,
    replicas: int = 1,
    *,
    sums_over_ranks: bool = False,
    ties: Iterable[tuple[int, ...]] = (),
) -> int:
    """The most communication kernels that wait on a rank's device at the same time: one per communicator.

    The device must run this many kernels in addition to compute, or a waiting receive could keep the send
    from running that its peer needs. Receives posted further ahead do not count: they queue behind the first
    on their communicator's stream. A middle rank of a V has 4, plus 1 with replicas, plus 1 with sums over
    all ranks, plus 1 per set of positions with tied parameters. CUDA offers 32 hardware queues
    (``CUDA_DEVICE_MAX_CONNECTIONS``).
    """
    channels = sum(pp_rank in (key.sender, key.receiver) for key in set(keys))
    return channels + (replicas > 1) + sums_over_ranks + sum(pp_rank in tie for tie in set(ties))


_POLL_SECONDS = 0.00005
_HELD, _HELD_SHARE = 24, 1 / 4
"""The most tensors that :meth:`Operations.hold` keeps, and the most memory as a share of what is free."""


class Operations:
    """What the operations of one rank share: the clock, the issuing thread, and whether they were aborted.

    Attributes
    ----------
    is_through_host
        Whether channels use host memory, see :meth:`zbv_worker.transport.channels.Transport.through_host`.
    """

    def __init__(self, clock: Clock, free_bytes: Callable[[], int]):
        self.clock = clock
        self.aborted = False
        self.is_through_host = False
        self._free_bytes = free_bytes
        self._held: deque[Tensor] = deque(maxlen=_HELD)
        self._thread = threading.get_ident()

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor that passed through the host allocated, as far as there is memory.

        In later steps, tensors stay allocated until their receivers have taken them, and those that a rank
        received until the device has. So they find as much memory in torch's cache.
        """
        self._held.append(tensor)
        limit = self._free_bytes() * _HELD_SHARE
        while sum(each.nbytes for each in self._held) > limit:
            self._held.popleft()

    def release(self) -> None:
        """Free what :meth:`hold` keeps."""
        self._held.clear()

    def check(self) -> None:
        """Raise ConnectionError if the rank aborted its groups: their operations then look complete."""
        if self.aborted:
            raise ConnectionError("this rank has aborted its communicators")

    def may_issue(self) -> None:
        """Raise if this thread must not issue operations."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} issued an NCCL operation; all operations of a "
                f"rank must come from the thread that created its transport."
            )
        self.check()

    def finish(self, work: NcclWork, deadline: float, late: str) -> None:
        """Wait on the host until an operation has ended; raises TimeoutError or ConnectionError."""
        while not work.is_completed():
            self.check()
            if self.clock.now() > deadline:
                raise TimeoutError(late)
            self.clock.pause(_POLL_SECONDS)
        self.order(work)

    def order(self, work: NcclWork) -> None:
        """Make the current stream wait for an operation; raises ConnectionError if it has failed."""
        try:
            work.wait()
        except RuntimeError as error:
            raise classified(error, "NCCL") from error
        self.check()


# Not frozen: one is created per received tensor, and freezing doubles the cost of that.
@dataclass(eq=False, slots=True)
class StreamReceive:
    """A posted receive.

    NCCL writes the buffer after the work that was queued on the compute stream at that time. So it may be
    memory that was freed while such work still uses it. It may be freed before NCCL has written it, too:
    torch's sends and receives keep memory from reuse (``recordStream`` in ``pointToPoint``).
    """

    work: NcclWork
    buffer: Tensor
    operations: Operations

    def wait(self, timeout: float) -> Tensor:
        """Wait on the host."""
        deadline = self.operations.clock.now() + timeout
        self.operations.finish(self.work, deadline, "nothing arrived")
        return self.buffer

    def on_stream(self, timeout: float) -> Tensor:
        """Make the current stream wait; the host does not, so nothing times out here."""
        self.operations.order(self.work)
        return self.buffer


@dataclass(frozen=True, eq=False, slots=True)
class HostedReceive:
    """A receive into host memory, then a copy to the GPU."""

    arrived: Callable[[float], None]
    """Waits until ``host`` has the tensor."""
    host: Tensor
    buffer: Tensor
    """Memory of the device from the start, as for any other receive."""
    operations: Operations

    def wait(self, timeout: float) -> Tensor:
        """Wait on the host."""
        self.arrived(timeout)
        self.operations.hold(self.buffer)
        return self.buffer.copy_(self.host)

    on_stream = wait


@dataclass(frozen=True, eq=False, slots=True)
class StreamSum:
    """A sum on the device; a target on the host is filled by :meth:`wait`."""

    work: NcclWork
    payload: Tensor
    target: Tensor
    operations: Operations

    def wait(self, timeout: float) -> None:
        """Make the current stream wait for the sum. The host waits only for a target in its own memory."""
        if self.payload is self.target:
            self.operations.order(self.work)
            return
        late = "another replica did not take part in a sum"
        self.operations.finish(self.work, self.operations.clock.now() + timeout, late)
        self.target.copy_(self.payload)


class _Queued(NamedTuple):
    work: NcclWork
    tensor: Tensor
    label: object


class _Hosted(NamedTuple):
    arrived: Callable[[float], None]
    tensor: Tensor
    label: object


class StreamSender:
    """The sending end of a channel: keeps each tensor until its send is complete.

    Parameters
    ----------
    rank
        The global rank at the other end.
    peer
        Its index in the group.
    start_send
        Sends a tensor in host memory, see :meth:`zbv_worker.transport.connected.ControlPlane.start_send`.
    """

    def __init__(
        self,
        rank: int,
        group: NcclGroup,
        peer: int,
        device: torch.device,
        operations: Operations,
        start_send: Callable[[Tensor, int], Callable[[float], None]],
    ):
        self._rank = rank
        self.group = group
        self.peer = peer
        self._device = device
        self._operations = operations
        self._sent: deque[_Queued] = deque()
        self._start_send = start_send
        self._hosted: list[_Hosted] = []

    def send(self, tensor: Tensor, label: object) -> None:
        """Send without waiting; raises ConnectionError if it cannot start. ``label`` names it in errors."""
        self._operations.may_issue()
        if self._operations.is_through_host:
            self._send_through_host(sendable(tensor), label)
            return
        tensor = sendable(tensor).to(self._device)  # moves only headers, which are made on the host
        try:
            work = self.group.send(tensor, self.peer)
        except RuntimeError as error:
            raise classified(error, self._what(label)) from error
        self._sent.append(_Queued(work, tensor, label))

    def _send_through_host(self, tensor: Tensor, label: object) -> None:
        host = tensor.cpu()
        self._operations.hold(tensor)
        self._hosted.append(_Hosted(self._start_send(host, self._rank), host, label))

    def look(self) -> None:
        """Release completed sends; raises ConnectionError if one failed."""
        while self._sent and self._sent[0].work.is_completed():
            work, _, label = self._sent.popleft()
            try:
                work.wait()  # raises the error of a failed send; a complete one delays nothing
            except RuntimeError as error:
                raise classified(error, self._what(label)) from error

    def flush(self, deadline: float) -> None:
        """Wait until the peer has everything; raises TimeoutError or ConnectionError."""
        clock = self._operations.clock
        for arrived, _, label in self._hosted:
            try:
                arrived(max(0.0, deadline - clock.now()))
            except TimeoutError as error:
                raise TimeoutError(f"rank {self._rank} did not take {label}") from error
        self._hosted.clear()
        while True:
            self.look()
            self._operations.check()
            if not self._sent:
                return
            if clock.now() > deadline:
                raise TimeoutError(f"rank {self._rank} did not take {self._sent[0].label}")
            clock.pause(_POLL_SECONDS)

    def _what(self, label: object) -> str:
        return f"sending {label} to rank {self._rank}"
