"""Channels over NCCL, for ranks with a GPU each.

Every channel has its own communicator. NCCL runs the operations of one communicator in the order of issue, so
with one communicator per ordered pair of ranks a receive that waits delays no send. The communicators are
created and connected in one order on all ranks before any step (:func:`greeting_order`).

The host only queues operations. It learns that one has ended by polling ``is_completed()``, has its own
deadlines, and remembers itself that it aborted a group: NCCL then reports operations as complete.

All operations are issued from the thread that created the transport, because NCCL requires one order of
launches per device. Only :meth:`NcclTransport.abort` may be called from another thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.errors import InvalidRun
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.buffers import ReceiveBuffers
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Reduction, Send, TensorSpec
from zbv_worker.transport.control import ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo import Summed
from zbv_worker.transport.rendezvous import say
from zbv_worker.transport.sends import sendable
from zbv_worker.transport.torch_api import Clock, CudaApi, GroupOptions, NcclApi, NcclGroup, NcclWork
from zbv_worker.transport.torch_errors import classified, classifying

CHANNEL_OPTIONS = GroupOptions(max_ctas=4)
"""A waiting receive occupies the multiprocessors of its thread blocks, which compute then cannot use."""
SUM_OPTIONS = GroupOptions()
"""Sums over replicas wait for ranks in the same position, so not for long; they may use NCCL's full width."""

MAX_COMMUNICATORS = 28
"""torch has 32 streams per GPU and priority, and gives them out in turn (``CUDAStream.h``); this leaves 4."""
NCCL_LOOK_AHEAD = 1
"""Receives posted ahead per channel. The first on a communicator waits on the device and occupies
multiprocessors; further ones wait in its stream and would only hold buffers, because the host queues actions
ahead of the device and so posts the next receive early enough."""
_NEVER = timedelta(days=1)
"""NCCL's watchdog counts from when an operation is issued, and a receive may be issued long before its tensor
exists. The worker has its own deadlines, so NCCL's must never pass."""
_POLL_SECONDS = 0.00005
_LOOK_SECONDS = 0.001
"""Time between two looks at the sends: every look asks CUDA and NCCL about each channel."""


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
    keys: Iterable[ChannelKey], pp_rank: int, replicas: int = 1, *, sums_over_ranks: bool = False
) -> int:
    """The most communication kernels that wait on a rank's device at the same time: one per communicator.

    The device must run this many kernels in addition to compute, or a waiting receive could keep the send
    from running that its peer needs. Receives posted further ahead do not count: they queue behind the first
    on their communicator's stream. A middle rank of a V has 4, plus 1 with replicas, plus 1 with sums over
    all ranks. CUDA offers 32 hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``).
    """
    channels = sum(pp_rank in (key.sender, key.receiver) for key in set(keys))
    return channels + (replicas > 1) + sums_over_ranks


class Operations:
    """What the operations of one rank share: the clock, the issuing thread, and whether they were aborted."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.aborted = False
        self._thread = threading.get_ident()

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
    """A posted receive. NCCL writes the buffer after the work queued on the compute stream at that time."""

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


class StreamSender:
    """The sending end of a channel: keeps each tensor until its send is complete.

    Parameters
    ----------
    rank
        The global rank at the other end.
    peer
        Its index in the group.
    """

    def __init__(self, rank: int, group: NcclGroup, peer: int, device: torch.device, operations: Operations):
        self._rank = rank
        self.group = group
        self.peer = peer
        self._device = device
        self._operations = operations
        self._sent: deque[_Queued] = deque()

    def send(self, tensor: Tensor, label: object) -> None:
        """Send without waiting; raises ConnectionError if it cannot start. ``label`` names it in errors."""
        self._operations.may_issue()
        tensor = sendable(tensor).to(self._device)  # moves only headers, which are made on the host
        try:
            work = self.group.send(tensor, self.peer)
        except RuntimeError as error:
            raise classified(error, self._what(label)) from error
        self._sent.append(_Queued(work, tensor, label))

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


class _Incoming(NamedTuple):
    group: NcclGroup
    peer: int


class NcclTransport(ConnectedTransport):
    """Channels as NCCL communicators of two ranks.

    Parameters
    ----------
    timeout
        Seconds for connecting, and for operations that take no timeout.
    sums_over_ranks
        Connect all ranks for sums of device tensors (:meth:`sum_over_ranks`). Equal on all ranks.

    Raises
    ------
    TimeoutError, ConnectionError
        If the replicas or the ranks do not connect.
    """

    def __init__(
        self,
        control: ControlPlane,
        device: torch.device,
        timeout: float,
        *,
        api: NcclApi,
        cuda: CudaApi,
        clock: Clock,
        sums_over_ranks: bool = False,
    ):
        super().__init__(control)
        self._device = device
        self._timeout = timeout
        self._api = api
        self._cuda = cuda
        self._operations = Operations(clock)
        self._groups: list[NcclGroup] = []
        self._opened: set[ChannelKey] = set()
        self._senders: dict[ChannelKey, StreamSender] = {}
        self._incoming: dict[ChannelKey, _Incoming] = {}
        self._buffers = ReceiveBuffers(device)
        self._next_look = 0.0
        self._replicas = self._all_ranks = None
        if self.layout.replicas > 1:
            positions = [self.layout.copies_of(pp_rank) for pp_rank in range(self.layout.pp_degree)]
            self._replicas = self._connect_sums(positions, "its replicas")
        if sums_over_ranks:
            self._all_ranks = self._connect_sums([tuple(range(self.world_size))], "all ranks")

    @property
    @override
    def replica_group(self) -> dist.ProcessGroup | None:
        return None if self._replicas is None else self._replicas.process_group

    def _connect_sums(self, sets: Iterable[tuple[int, ...]], name: str) -> NcclGroup:
        """Create a group for each of some disjoint sets of ranks, and connect the one that has this rank."""
        found = [self._new_group(ranks, SUM_OPTIONS, name) for ranks in sets]
        (mine,) = (group for group in found if group is not None)
        free = self._free_bytes()
        deadline = self._operations.clock.now() + self._timeout
        greeting = torch.zeros(1, device=self._device)
        with classifying(f"connecting {name}"):
            work = mine.all_reduce(greeting)
        self._operations.finish(work, deadline, f"not all {name} connected")
        self.communicator_bytes += free - self._free_bytes()
        return mine

    def _new_group(self, ranks: Iterable[int], options: GroupOptions, name: str) -> NcclGroup | None:
        with classifying(f"creating a group of {name}"):
            made = self._api.new_group(sorted(ranks), _NEVER, options, name)
        if made is not None:
            self._groups.append(made)
        return made

    def _free_bytes(self) -> int:
        return self._cuda.mem_get_info(self._device)[0]

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        """Create these channels where they do not exist. Collective: every rank passes the same keys.

        Raises
        ------
        InvalidRun
            If this rank would have more than :data:`MAX_COMMUNICATORS`.
        TimeoutError, ConnectionError
            If a channel does not connect.
        """
        self._operations.may_issue()
        deadline = self._operations.clock.now() + timeout
        free = self._free_bytes()
        # new_group is collective over all ranks: all must call it in the same order, members or not.
        new = greeting_order(set(keys) - self._opened)
        self._require_streams(new)
        for key in new:
            for replica in range(self.layout.replicas):
                self._add_channel(key, replica)
        greetings = [(key, self._greet(key)) for key in new if self.pp_rank in (key.sender, key.receiver)]
        for key, (work, _) in greetings:
            self._operations.finish(work, deadline, f"the channel {key} did not connect")
        self._opened.update(new)
        self.communicator_bytes += free - self._free_bytes()
        if new:
            say(f"rank {self.rank}: {self.described(os.environ)}")

    def _require_streams(self, new: Iterable[ChannelKey]) -> None:
        needed = len(self._groups) + sum(self.pp_rank in key for key in new)
        if needed > MAX_COMMUNICATORS:
            raise InvalidRun(
                f"rank {self.rank} needs {needed} NCCL communicators; must be at most {MAX_COMMUNICATORS}: "
                f"torch has 32 streams per GPU, and communicators that share one may wait for each other "
                f"forever. Use a placement in which a rank exchanges tensors with fewer ranks."
            )

    def _add_channel(self, key: ChannelKey, replica: int) -> None:
        sender, receiver = (self.layout.global_rank(end, replica) for end in (key.sender, key.receiver))
        group = self._new_group([sender, receiver], CHANNEL_OPTIONS, f"channel {sender} → {receiver}")
        if group is None:
            return
        if self.rank == sender:
            peer = int(receiver > sender)
            self._senders[key] = StreamSender(receiver, group, peer, self._device, self._operations)
        else:
            self._incoming[key] = _Incoming(group, int(sender > receiver))

    def _greet(self, key: ChannelKey) -> tuple[NcclWork, Tensor]:
        """Send one number through a new channel: NCCL connects at first use, which must not delay a step."""
        greeting = torch.zeros(1, device=self._device)
        with classifying(f"connecting the channel {key}"):
            if self.pp_rank == key.sender:
                group, peer = self._senders[key].group, self._senders[key].peer
                return group.send(greeting, peer), greeting
            group, peer = self._incoming[key]
            return group.receive(greeting, peer), greeting

    def described(self, environment: Mapping[str, str]) -> str:
        """The NCCL version, the communicators and their options, their memory, and the environment."""
        channels = ", ".join(map(str, sorted([*self._senders, *self._incoming]))) or "no channels"
        sums = [
            name
            for name, group in (("its replicas", self._replicas), ("all ranks", self._all_ranks))
            if group is not None
        ]
        return (
            f"NCCL {self._api.version()}: {len(self._groups)} communicators "
            f"({'; '.join([channels, *sums])}), "
            f"{self.communicator_bytes / 2**20:.0f} MiB of GPU memory; channels use at most "
            f"{CHANNEL_OPTIONS.max_ctas} thread blocks on streams of high priority; "
            f"{nccl_environment.found(environment)}"
        )

    @override
    def sender(self, key: ChannelKey) -> Send:
        found = self._senders.get(key)
        if found is None:
            raise InvalidRun(f"rank {self.rank} does not send on {key}.")
        return found.send

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        found = self._incoming.get(key)
        if found is None:
            raise InvalidRun(f"rank {self.rank} does not receive on {key}.")
        receive, peer, take, operations = (
            found.group.receive,
            found.peer,
            self._buffers.take,
            self._operations,
        )

        def post(spec: TensorSpec) -> Pending:
            operations.may_issue()
            buffer = take(spec)
            try:
                return StreamReceive(receive(buffer, peer), buffer, operations)
            except RuntimeError as error:
                raise classified(error, f"posting a receive from rank {key.sender}") from error

        return post

    @override
    def check(self) -> None:
        self._operations.check()
        now = self._operations.clock.now()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            for sender in self._senders.values():
                sender.look()

    @override
    def flush(self, timeout: float) -> None:
        deadline = self._operations.clock.now() + timeout
        for sender in self._senders.values():
            sender.flush(deadline)

    @override
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        if self._replicas is None:
            return Summed()
        self._operations.may_issue()
        payload = tensor if tensor.device.type == self._device.type else tensor.to(self._device)
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = self._replicas.all_reduce(payload)
        return StreamSum(work, payload, tensor, self._operations)

    @override
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Reduction:
        if self._replicas is None:
            whole.copy_(part)
            return Summed()
        self._operations.may_issue()
        with classifying(f"gathering over the replicas of rank {self.pp_rank}"):
            work = self._replicas.all_gather(whole, part)
        return StreamSum(work, whole, whole, self._operations)

    @override
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        if self._replicas is None:
            part.copy_(whole)
            return Summed()
        self._operations.may_issue()
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = self._replicas.reduce_scatter(part, whole)
        return StreamSum(work, part, part, self._operations)

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        """Sum over all ranks. Collective; the result is on the device of ``values``.

        For a device tensor the host does not wait: the current stream waits for the sum. That needs
        ``sums_over_ranks``; otherwise the sum goes through the host.
        """
        if values.device.type != self._device.type:
            return self.control.sum_over_ranks(values, timeout)
        if self._all_ranks is None:
            return self.control.sum_over_ranks(values.cpu(), timeout).to(self._device)
        self._operations.may_issue()
        total = values.clone()
        with classifying("summing over all ranks"):
            work = self._all_ranks.all_reduce(total)
        self._operations.order(work)
        return total

    @override
    def close(self) -> None:
        self._release()
        self.control.close()

    @override
    def abort(self, timeout: float) -> None:
        self._operations.aborted = True
        # In threads: one group's abort may wait for a kernel of another group. Daemons: the process may end
        # before they do.
        threads = [
            threading.Thread(target=_abort, args=(group, timeout), name="zbv-abort", daemon=True)
            for group in self._groups
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _release(self) -> None:
        self._senders.clear()
        self._incoming.clear()
        self._buffers.clear()
        self._opened.clear()
        self._groups.clear()


def _abort(group: NcclGroup, timeout: float) -> None:
    with contextlib.suppress(RuntimeError):  # too late or impossible; the process ends all the same
        group.set_timeout(timedelta(seconds=timeout))  # the most that an abort waits
        group.abort()
