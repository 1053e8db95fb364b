"""Channels over NCCL, for ranks with a GPU each.

Every channel has its own communicator. NCCL runs the operations of one communicator in the order of issue, so
with one communicator per ordered pair of ranks a receive that waits delays no send. The communicators are
created and connected in one order on all ranks before any step (:func:`greeting_order`).

The host only queues operations (:mod:`zbv_worker.transport.nccl_operations`).

All operations are issued from the thread that created the transport, because NCCL requires one order of
launches per device. Only :meth:`NcclTransport.abort` may be called from another thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.errors import InvalidRun
from zbv_worker.host.process import Clock, say
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Reduction, Send
from zbv_worker.transport.connected import ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo import Summed
from zbv_worker.transport.gloo_ends import sending_end
from zbv_worker.transport.nccl_operations import (
    CHANNEL_OPTIONS,
    MAX_COMMUNICATORS,
    SUM_OPTIONS,
    HostedReceive,
    Operations,
    StreamReceive,
    StreamSender,
    StreamSum,
    greeting_order,
)
from zbv_worker.transport.torch_api import (
    CudaApi,
    GroupOptions,
    NcclApi,
    NcclGroup,
    NcclWork,
    classified,
    classifying,
)
from zbv_worker.values.structure import TensorSpec

_NEVER = timedelta(days=1)
"""NCCL's watchdog counts from when an operation is issued, and a receive may be issued long before its tensor
exists. The worker has its own deadlines, so NCCL's must never pass."""
_LOOK_SECONDS = 0.001
"""Time between two looks at the sends: every look asks CUDA and NCCL about each channel."""


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
        self._operations = Operations(clock, self._free_bytes)
        self._groups: list[NcclGroup] = []
        self._others = api.streams_of_groups()
        self._opened: set[ChannelKey] = set()
        self._senders: dict[ChannelKey, StreamSender] = {}
        self._incoming: dict[ChannelKey, _Incoming] = {}
        self._next_look = 0.0
        self._linked: dict[tuple[int, ...], NcclGroup] = {}
        self._replicas = self._all_ranks = None
        if self.layout.replicas > 1:
            self._replicas = self._connect_sums(self.layout.sets_of_copies(), "its replicas")
        if sums_over_ranks:
            self._all_ranks = self._connect_sums([tuple(range(self.world_size))], "all ranks")

    @property
    @override
    def replica_group(self) -> dist.ProcessGroup | None:
        return None if self._replicas is None else self._replicas.process_group

    def _connect_sums(self, sets: Iterable[tuple[int, ...]], name: str) -> NcclGroup | None:
        """Create a group for each of some disjoint sets of ranks, and connect the one that has this rank."""
        found = [self._new_group(ranks, SUM_OPTIONS, name) for ranks in sets]
        mine = next((group for group in found if group is not None), None)
        if mine is None:
            return None
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
            for column in range(self.layout.columns):
                self._add_channel(key, column)
        greetings = [(key, self._greet(key)) for key in new if self.pp_rank in (key.sender, key.receiver)]
        for key, (work, _) in greetings:
            self._operations.finish(work, deadline, f"the channel {key} did not connect")
        self._opened.update(new)
        self.communicator_bytes += free - self._free_bytes()
        if new:
            say(f"rank {self.rank}: {self.described(os.environ)}")

    @override
    def link(self, sets: Iterable[tuple[int, ...]], timeout: float) -> None:
        """Connect sets of positions. The sets have one order on all ranks, so connecting cannot deadlock."""
        self._operations.may_issue()
        new = sorted(set(sets) - self._linked.keys())
        self._require_streams(new)
        for positions in new:
            columns = [
                tuple(self.layout.global_rank(position, column) for position in positions)
                for column in range(self.layout.columns)
            ]
            group = self._connect_sums(columns, "ranks with tied parameters")
            if group is not None:
                self._linked[positions] = group

    def _require_streams(self, new: Iterable[tuple[int, ...]]) -> None:
        needed = len(self._groups) + sum(self.pp_rank in key for key in new)
        if needed + self._others > MAX_COMMUNICATORS:
            others = f", and the process has {self._others} other groups of high priority" * bool(
                self._others
            )
            raise InvalidRun(
                f"rank {self.rank} needs {needed} NCCL communicators{others}; must be at most "
                f"{MAX_COMMUNICATORS}: torch has 32 streams per GPU, and communicators that share one may "
                f"wait for each other forever. Use a placement in which a rank exchanges tensors with fewer "
                f"ranks."
            )

    def _add_channel(self, key: ChannelKey, column: int) -> None:
        sender, receiver = (self.layout.global_rank(end, column) for end in (key.sender, key.receiver))
        group = self._new_group([sender, receiver], CHANNEL_OPTIONS, f"channel {sender} → {receiver}")
        if group is None:
            return
        if self.rank == sender:
            peer = int(receiver > sender)
            self._senders[key] = StreamSender(
                receiver, group, peer, self._device, self._operations, self.control.start_send
            )
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
    def through_host(self, is_on: bool, timeout: float) -> None:
        if is_on != self._operations.is_through_host:
            self.flush(timeout)
            self._operations.is_through_host = is_on
            self._operations.release()

    @override
    def sender(self, key: ChannelKey) -> Send:
        return sending_end(self._senders, key, self.rank)

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        found = self._incoming.get(key)
        if found is None:
            raise InvalidRun(f"rank {self.rank} does not receive on {key}.")
        receive, peer, device, operations = found.group.receive, found.peer, self._device, self._operations

        start_receive, rank = self.control.start_receive, self.layout.global_rank(key.sender, self.column)

        def post(spec: TensorSpec) -> Pending:
            operations.may_issue()
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            if operations.is_through_host:
                host = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                return HostedReceive(start_receive(host, rank), host, buffer, operations)
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
    def sum_over_positions(self, positions: tuple[int, ...], tensor: Tensor) -> Reduction:
        self._operations.may_issue()
        payload = tensor if tensor.device.type == self._device.type else tensor.to(self._device)
        with classifying(f"summing over the positions {positions}"):
            work = self._linked[positions].all_reduce(payload)
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
        made = [group.process_group for group in self._groups]
        self._release()
        self.control.close([group for group in made if group is not None])

    @override
    def abort(self, timeout: float) -> bool:
        """Start to abort all groups, and wait at most ``timeout`` seconds; returns whether all have ended."""
        self._operations.aborted = True
        if self._operations.is_through_host:
            self.control.abort()
        # In threads: one group's abort may wait for a kernel of another group, or never return. Daemons: the
        # process ends all the same.
        ended: list[NcclGroup] = []
        threads = [
            threading.Thread(target=_abort, args=(group, timeout, ended), name="zbv-abort", daemon=True)
            for group in self._groups
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return len(ended) == len(threads)

    def _release(self) -> None:
        self._senders.clear()
        self._incoming.clear()
        self._opened.clear()
        self._linked.clear()
        self._groups.clear()


def _abort(group: NcclGroup, timeout: float, ended: list[NcclGroup]) -> None:
    with contextlib.suppress(RuntimeError):  # too late or impossible; the process ends all the same
        group.set_timeout(timedelta(seconds=timeout))  # after it, the abort raises, if it returns at all
        group.abort()
        ended.append(group)
