"""Channels over gloo, for CPU ranks; tensors of a GPU pass through pinned host memory.

Every channel has its own process group, hence its own connection, so nothing queues behind another channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.errors import InvalidRun
from zbv_worker.transport.buffers import ReceiveBuffers
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Reduction, Send, TensorSpec
from zbv_worker.transport.control import ConnectedTransport, ControlPlane
from zbv_worker.transport.receives import HostReceive, StagedReceive
from zbv_worker.transport.sends import GroupWire, SendFailures, ThreadSender
from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_errors import classified, classifying

_CPU = torch.device("cpu")


class Summed:
    """A sum or gather over a single replica."""

    def wait(self, timeout: float) -> None:
        """Return at once: there was nothing to do."""


@dataclass(frozen=True, eq=False)
class HostSum:
    """A sum or gather in host memory, copied to the target tensor when complete."""

    sum: HostReceive
    target: Tensor
    naming_absent: Callable[[], AbstractContextManager[None]]

    def wait(self, timeout: float) -> None:
        """Wait until ``target`` holds the result."""
        with self.naming_absent():
            found = self.sum.wait(timeout)
        if found is not self.target:
            self.target.copy_(found)


class GlooTransport(ConnectedTransport):
    """Channels as gloo groups of two.

    Parameters
    ----------
    device
        Where received tensors go.
    timeout
        Seconds for connecting, and for operations that take no timeout.
    """

    def __init__(self, control: ControlPlane, device: torch.device, timeout: float):
        super().__init__(control)
        self._opened: set[ChannelKey] = set()
        self._staging = Staging(device) if device.type == "cuda" else None
        self._senders: dict[ChannelKey, ThreadSender] = {}
        self._failures = SendFailures()
        self._wires_in: dict[ChannelKey, GroupWire] = {}
        self._buffers = ReceiveBuffers(device)
        # Counts collectives to name their notes. Equal on the ranks of one position; those with other stages
        # may sum over their replicas more often.
        self._sums = 0
        self._replicas = self._meet_replicas(timeout) if self.layout.replicas > 1 else None

    @property
    @override
    def replica_group(self) -> dist.ProcessGroup | None:
        return self._replicas

    def _meet_replicas(self, timeout: float) -> dist.ProcessGroup:
        groups = [
            _new_group(self.layout.copies_of(pp_rank), timeout, "its replicas")
            for pp_rank in range(self.layout.pp_degree)
        ]
        return groups[self.pp_rank]

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        # new_group is collective over all ranks: all must call it in the same order, members or not.
        for key in sorted(set(keys) - self._opened):
            for replica in range(self.layout.replicas):
                sender, receiver = (
                    self.layout.global_rank(end, replica) for end in (key.sender, key.receiver)
                )
                group = _new_group([sender, receiver], timeout, f"a channel {sender} → {receiver}")
                if self.rank == sender:
                    wire = GroupWire.of(group, receiver)
                    self._senders[key] = ThreadSender(receiver, wire, self._failures, self._staging)
                elif self.rank == receiver:
                    self._wires_in[key] = GroupWire.of(group, sender)
            self._opened.add(key)

    @override
    def sender(self, key: ChannelKey) -> Send:
        found = self._senders.get(key)
        if found is None:
            raise InvalidRun(f"rank {self.rank} does not send on {key}.")
        return found.send

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        wire, take, staging = self._wires_in.get(key), self._buffers.take, self._staging
        if wire is None:
            raise InvalidRun(f"rank {self.rank} does not receive on {key}.")
        receive = wire.receive

        def post(spec: TensorSpec) -> Pending:
            buffer = take(spec)
            try:
                if staging is None:
                    return HostReceive(receive(buffer), buffer)
                host = staging.host_memory(spec.shape, spec.dtype)
                return StagedReceive(receive(host), host, buffer, staging.here(), staging)
            except RuntimeError as error:
                raise classified(error, f"posting a receive from rank {key.sender}") from error

        return post

    @override
    def check(self) -> None:
        self._failures.check()

    @override
    def flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for sender in self._senders.values():
            sender.flush(deadline)

    @override
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        if self._replicas is None:
            return Summed()
        payload = tensor.to(_CPU)  # no copy if it is there already
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = dist.all_reduce(payload, group=self._replicas, async_op=True)
        return self._in_progress(work, payload, tensor)

    @override
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Reduction:
        if self._replicas is None:
            whole.copy_(part)
            return Summed()
        payload = torch.empty_like(whole, device=_CPU) if whole.device.type == "cuda" else whole
        with classifying(f"gathering over the replicas of rank {self.pp_rank}"):
            work = dist.all_gather_single(payload, part.to(_CPU), group=self._replicas, async_op=True)
        return self._in_progress(work, payload, whole)

    @override
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        if self._replicas is None:
            part.copy_(whole)
            return Summed()
        payload = torch.empty_like(part, device=_CPU) if part.device.type == "cuda" else part
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = dist.reduce_scatter_single(payload, whole.to(_CPU), group=self._replicas, async_op=True)
        return self._in_progress(work, payload, part)

    def _in_progress(self, work: dist.Work, payload: Tensor, target: Tensor) -> HostSum:
        self._sums += 1
        copies = self.layout.copies_of(self.pp_rank)
        name = f"replicas/{self.pp_rank}/{self._sums}"
        return HostSum(HostReceive(work, payload), target, partial(self.control.naming_absent, name, copies))

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return self.control.sum_over_ranks(values.to(_CPU), timeout).to(values.device)

    @override
    def close(self) -> None:
        self._release()
        self.control.close()

    @override
    def abort(self, timeout: float) -> None:
        self._release()  # its connections end with the process

    def _release(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._wires_in.clear()
        self._buffers.clear()
        self._opened.clear()


def _new_group(ranks: Sequence[int], timeout: float, what: str) -> dist.ProcessGroup:
    with classifying(f"connecting {what}"):
        made: dist.ProcessGroup = dist.new_group([*ranks], timeout=timedelta(seconds=timeout), backend="gloo")
    return made
