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

from zbv_worker.transport.channels import ChannelKey, Receive, Reduction, Send
from zbv_worker.transport.connected import ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo_control import break_connections
from zbv_worker.transport.gloo_ends import (
    GroupWire,
    HostReceive,
    SendFailures,
    Staging,
    ThreadSender,
    receiving_end,
    sending_end,
)
from zbv_worker.transport.rendezvous import named
from zbv_worker.transport.torch_api import classifying, new_group

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
        self._groups: list[dist.ProcessGroup] = []
        self._staging = Staging(device) if device.type == "cuda" else None
        self._senders: dict[ChannelKey, ThreadSender] = {}
        self._failures = SendFailures()
        self.check = self._failures.check
        self._wires_in: dict[ChannelKey, GroupWire] = {}
        self._device = device
        # Counts collectives by their ranks, to name their notes. Equal on these ranks.
        self._sums: dict[tuple[int, ...], int] = {}
        self._linked: dict[tuple[int, ...], tuple[tuple[int, ...], dist.ProcessGroup]] = {}
        self._replicas = self._meet_replicas(timeout) if self.layout.replicas > 1 else None

    @property
    @override
    def replica_group(self) -> dist.ProcessGroup | None:
        return self._replicas

    def _meet_replicas(self, timeout: float) -> dist.ProcessGroup:
        groups = {
            ranks: self._new_group(ranks, timeout, "its replicas") for ranks in self.layout.sets_of_copies()
        }
        return groups[self.layout.copies_of(self.rank)]

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        # new_group is collective over all ranks: all must call it in the same order, members or not.
        for key in sorted(set(keys) - self._opened):
            for column in range(self.layout.columns):
                sender, receiver = (
                    self.layout.global_rank(end, column) for end in (key.sender, key.receiver)
                )
                group = self._new_group([sender, receiver], timeout, f"a channel {sender} → {receiver}")
                if self.rank == sender:
                    wire = GroupWire.of(group, receiver)
                    self._senders[key] = ThreadSender(receiver, wire, self._failures, self._staging)
                elif self.rank == receiver:
                    self._wires_in[key] = GroupWire.of(group, sender)
            self._opened.add(key)

    @override
    def sender(self, key: ChannelKey) -> Send:
        return sending_end(self._senders, key, self.rank)

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        return receiving_end(self._wires_in, key, self.rank, self._device, self._staging)

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
        return self._over_replicas(work, payload, tensor)

    @override
    def link(self, sets: Iterable[tuple[int, ...]], timeout: float) -> None:
        for positions in sorted(set(sets) - self._linked.keys()):
            for column in range(self.layout.columns):
                ranks = tuple(self.layout.global_rank(position, column) for position in positions)
                group = self._new_group(ranks, timeout, "ranks with tied parameters")
                if self.column == column:
                    self._linked[positions] = ranks, group

    @override
    def sum_over_positions(self, positions: tuple[int, ...], tensor: Tensor) -> Reduction:
        ranks, group = self._linked[positions]
        payload = tensor.to(_CPU)
        with classifying(f"summing over {named(ranks)}"):
            work = dist.all_reduce(payload, group=group, async_op=True)
        return self._in_progress(work, payload, tensor, "positions", ranks)

    @override
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Reduction:
        if self._replicas is None:
            whole.copy_(part)
            return Summed()
        payload = torch.empty_like(whole, device=_CPU) if whole.device.type == "cuda" else whole
        with classifying(f"gathering over the replicas of rank {self.pp_rank}"):
            work = dist.all_gather_single(payload, part.to(_CPU), group=self._replicas, async_op=True)
        return self._over_replicas(work, payload, whole)

    @override
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        if self._replicas is None:
            part.copy_(whole)
            return Summed()
        payload = torch.empty_like(part, device=_CPU) if part.device.type == "cuda" else part
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = dist.reduce_scatter_single(payload, whole.to(_CPU), group=self._replicas, async_op=True)
        return self._over_replicas(work, payload, part)

    def _over_replicas(self, work: dist.Work, payload: Tensor, target: Tensor) -> HostSum:
        return self._in_progress(work, payload, target, "replicas", self.layout.copies_of(self.rank))

    def _in_progress(
        self, work: dist.Work, payload: Tensor, target: Tensor, what: str, ranks: tuple[int, ...]
    ) -> HostSum:
        count = self._sums[ranks] = self._sums.get(ranks, 0) + 1
        name = f"{what}/{'-'.join(map(str, ranks))}/{count}"
        return HostSum(HostReceive(work, payload), target, partial(self.control.naming_absent, name, ranks))

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return self.control.sum_over_ranks(values.to(_CPU), timeout).to(values.device)

    @override
    def close(self) -> None:
        self._release()
        self.control.close(self._groups)
        self._groups.clear()
        self._replicas = None

    @override
    def abort(self, timeout: float) -> bool:
        for group in self._groups:
            break_connections(group)
        self._release()
        if self.world_size == 1:  # no peer can hinder it, and the process may go on
            self.control.close(self._groups)
        return True

    def _release(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._wires_in.clear()
        self._opened.clear()
        self._linked.clear()

    def _new_group(self, ranks: Sequence[int], timeout: float, what: str) -> dist.ProcessGroup:
        with classifying(f"connecting {what}"):
            made: dist.ProcessGroup = new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo")
        if self.rank in ranks:
            self._groups.append(made)
        return made
