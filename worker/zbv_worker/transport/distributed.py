"""The transport over ``torch.distributed``: gloo on CPU ranks, NCCL on CUDA ranks.

Every channel has its own process group, hence its own connection (gloo) or communicator (NCCL). NCCL runs the
operations of one communicator in the order of issue, so a receive posted early would delay a later send; with
one communicator per channel, nothing queues behind another channel. Control messages (agreement, barriers)
always use gloo, the default group, and never touch a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from zbv_worker.errors import InvalidRun
from zbv_worker.transport.buffers import ReceiveBuffers
from zbv_worker.transport.channels import (
    ChannelKey,
    Exchange,
    Pending,
    Receive,
    Reduction,
    Send,
    TensorSpec,
    Transport,
)
from zbv_worker.transport.messages import gather_json
from zbv_worker.transport.receives import HostReceive, StagedReceive, StreamReceive
from zbv_worker.transport.rendezvous import meet, named, ranks_on_this_host
from zbv_worker.transport.sends import GroupWire, PollSender, Sender, SendFailures, ThreadSender
from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_errors import classified, classifying, first_line
from zbv_worker.transport.world import Backend, Layout, World

_EVER = timedelta(days=1)
_REPORT_SECONDS, _REPORT_POLL_SECONDS = 2.0, 0.05
"""How long a rank whose barrier failed waits for rank 0 to report the absent ranks."""


class Summed:
    """The sum over a single replica."""

    def wait(self, timeout: float) -> None:
        """Return at once: nothing to add."""


@dataclass(frozen=True, eq=False)
class Summing:
    """A sum in a buffer of the network's device, copied to the target tensor when complete."""

    sum: HostReceive | StreamReceive
    target: Tensor
    naming_absent: Callable[[], AbstractContextManager[None]]

    def wait(self, timeout: float) -> None:
        """Wait until ``target`` holds the sum."""
        with self.naming_absent():
            found = self.sum.wait(timeout)
        if found is not self.target:
            self.target.copy_(found)


@dataclass(frozen=True, eq=False)
class Exchanging:
    """A collective with buffers of the network's device, copied to the target tensor when complete.

    Attributes
    ----------
    input
        Kept until the end.
    """

    output: HostReceive | StreamReceive
    input: Tensor
    target: Tensor
    naming_absent: Callable[[], AbstractContextManager[None]]

    def wait(self, timeout: float) -> None:
        """Make ``target`` usable for work queued from now on."""
        with self.naming_absent():
            found = self.output.on_stream(timeout)
        if found is not self.target:
            self.target.copy_(found)


class DistributedTransport(Transport):
    """Channels as process groups of two.

    Parameters
    ----------
    device
        Where received tensors go. gloo moves CUDA tensors through the CPU.
    timeout
        Seconds for the rendezvous, and for operations that take no timeout.
    replicas
        Number of pipelines in the world.

    Attributes
    ----------
    ranks_on_host
        Ranks of this world that run on this host, including those of other launchers.
    replica_group
        The ranks that hold the same stages; None when there is one replica.

    Raises
    ------
    InvalidRun
        If the replicas do not divide the world.
    TimeoutError, ConnectionError
        If the ranks do not meet; names those that did not arrive.
    """

    def __init__(
        self,
        world: World,
        backend: Backend,
        device: torch.device,
        timeout: float,
        replicas: int = 1,
    ):
        self.rank = world.rank
        self.layout = Layout.of_world(world.world_size, replicas)
        self._backend = backend
        self._device = device
        self._wire_device = device if backend == "nccl" else torch.device("cpu")
        self._opened: set[ChannelKey] = set()
        self._staging = Staging(device) if backend == "gloo" and device.type == "cuda" else None
        self._senders: dict[ChannelKey, Sender] = {}
        self._failures = SendFailures()
        self._wires_in: dict[ChannelKey, GroupWire] = {}
        self._buffers = ReceiveBuffers(device)
        # Counts collectives to name their notes. Equal on all ranks of a collective; ranks with other stages
        # may sum over their replicas more often.
        self._barriers = self._rank_sums = self._replica_sums = 0
        store = meet(world.rank, world.world_size, timeout)
        # Notes are only polled, so the store's own timeout matters for the rendezvous alone.
        self._notes = PrefixStore("zbv/notes", store)
        self.ranks_on_host = ranks_on_this_host(store)
        with classifying(f"the {world.world_size} ranks did not meet"):
            dist.init_process_group(
                "gloo",
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=timeout),
            )
        self.replica_group = self._meet_replicas(timeout) if replicas > 1 else None

    def _meet_replicas(self, timeout: float) -> dist.ProcessGroup:
        """Create this position's replica group and connect it, because NCCL connects at first use."""
        groups = [
            self._new_group(self.layout.copies_of(pp_rank), timeout, "its replicas")
            for pp_rank in range(self.layout.pp_degree)
        ]
        mine = groups[self.pp_rank]
        greeting = torch.zeros(1, device=self._wire_device)
        self._waiting(dist.all_reduce(greeting, group=mine, async_op=True), greeting).wait(timeout)
        return mine

    def _new_group(self, ranks: Sequence[int], timeout: float, what: str) -> dist.ProcessGroup:
        with classifying(f"connecting {what}"):
            made: dist.ProcessGroup = dist.new_group(
                [*ranks], timeout=self._patience(timeout), backend=self._backend
            )
        return made

    def _patience(self, timeout: float) -> timedelta:
        """A group's timeout.

        NCCL's watchdog counts from when a receive was posted, and then ends the process. The worker instead
        counts from when it needs the tensor and raises an error, so NCCL's timeout must never fire.
        """
        return timedelta(seconds=timeout) if self._backend == "gloo" else _EVER

    def _waiting(self, work: dist.Work, tensor: Tensor) -> HostReceive | StreamReceive:
        return HostReceive(work, tensor) if self._backend == "gloo" else StreamReceive(work, tensor)

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        # new_group is collective over all ranks: all must call it in the same order, members or not.
        for key in sorted(set(keys) - self._opened):
            for replica in range(self.layout.replicas):
                sender, receiver = (
                    self.layout.global_rank(end, replica) for end in (key.sender, key.receiver)
                )
                group = self._new_group([sender, receiver], timeout, f"a channel {sender} → {receiver}")
                if self.rank == sender:
                    self._senders[key] = self._new_sender(receiver, GroupWire.of(group, receiver))
                elif self.rank == receiver:
                    self._wires_in[key] = GroupWire.of(group, sender)
            self._opened.add(key)
            self._greet(key, timeout)

    def _greet(self, key: ChannelKey, timeout: float) -> None:
        """Send one small message on a new channel: NCCL connects at first use, which must not delay a step.

        All ranks greet the channels in the same order, so these blocking connections cannot deadlock.
        """
        greeting = torch.zeros(1, dtype=torch.int64)
        if self.pp_rank == key.sender:
            self.sender(key)(greeting, "greeting")
        elif self.pp_rank == key.receiver:
            self.receiver(key)(TensorSpec.of(greeting)).wait(timeout)

    def _new_sender(self, peer: int, wire: GroupWire) -> Sender:
        if self._backend == "nccl":
            return PollSender(peer, wire, self._failures)
        return ThreadSender(peer, wire, self._failures, self._staging)

    @override
    def sender(self, key: ChannelKey) -> Send:
        found = self._senders.get(key)
        if found is None:
            raise InvalidRun(f"rank {self.rank} does not send on {key}.")
        if self._backend != "nccl":
            return found.send
        device, send = self._device, found.send

        def send_from_device(tensor: Tensor, label: object) -> None:
            send(tensor.to(device), label)  # moves only headers, which are made on the host

        return send_from_device

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        wire, take, staging = self._wires_in.get(key), self._buffers.take, self._staging
        if wire is None:
            raise InvalidRun(f"rank {self.rank} does not receive on {key}.")
        receive, made = wire.receive, StreamReceive if self._backend == "nccl" else HostReceive

        def post(spec: TensorSpec) -> Pending:
            buffer = take(spec)
            try:
                if staging is None:
                    return made(receive(buffer), buffer)
                host = staging.host_memory(spec.shape, spec.dtype)
                return StagedReceive(receive(host), host, buffer, staging.here(), staging)
            except RuntimeError as error:
                raise classified(error, f"posting a receive from rank {key.sender}") from error

        return post

    @override
    def check(self) -> None:
        if self._backend == "nccl":
            for sender in self._senders.values():
                sender.look()
        self._failures.check()

    @override
    def flush(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for sender in self._senders.values():
            sender.flush(deadline)

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        self.barrier(timeout)

        def gather(tensor: Tensor) -> list[Tensor]:
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            HostReceive(dist.all_gather(parts, tensor, async_op=True), tensor).wait(timeout)
            return parts

        try:
            return gather_json(value, gather)
        except ValueError as error:
            raise ConnectionError(str(error)) from error

    @override
    def barrier(self, timeout: float) -> None:
        self._barriers += 1
        try:
            # The only barrier that names absent ranks.
            dist.monitored_barrier(timeout=timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(self._who_is_absent(first_line(error))) from error

    @contextlib.contextmanager
    def _naming_absent(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """If a collective times out, name the absent ranks: those that do not report the timeout as well."""
        try:
            yield
        except TimeoutError as error:
            with contextlib.suppress(ConnectionError):
                self.post(f"{name}/{self.rank}", "")
                notes = {f"{name}/{rank}": rank for rank in ranks}
                absent = [notes[note] for note in self._unpublished(notes)]
                if absent:
                    raise TimeoutError(f"{named(absent)} did not take part: {error}") from error
            raise

    def _who_is_absent(self, said: str) -> str:
        """Describe a failed barrier: only rank 0 knows who is absent, so the others wait for its report."""
        name = f"barrier/{self._barriers}"
        with contextlib.suppress(ConnectionError):
            if self.rank == 0:
                self.post(name, said)
            else:
                self._unpublished([name])
                return self.posted(name) or said
        return said

    def _unpublished(self, names: Iterable[str]) -> list[str]:
        """Wait a moment for other ranks to publish these notes; returns those that are still absent."""
        absent = list(names)
        deadline = time.monotonic() + _REPORT_SECONDS
        while absent and time.monotonic() < deadline:
            time.sleep(_REPORT_POLL_SECONDS)
            absent = [name for name in absent if self.posted(name) is None]
        return absent

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        self._control(dist.isend, torch.tensor([value]), peer, timeout)

    @override
    def hear(self, peer: int, timeout: float) -> int:
        heard = torch.empty(1, dtype=torch.int64)
        self._control(dist.irecv, heard, peer, timeout)
        return int(heard)

    def _control(
        self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int, timeout: float
    ) -> None:
        """Send or receive one message on the default group, which always uses gloo."""
        with classifying(f"a control message between ranks {self.rank} and {peer}"):
            work = operation(tensor, peer)
            if work is not None:
                work.wait(timedelta(seconds=timeout))

    @override
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        if self.replica_group is None:
            return Summed()
        payload = tensor.to(self._wire_device)  # no copy if it is there already
        with classifying(f"summing over the replicas of rank {self.pp_rank}"):
            work = dist.all_reduce(payload, group=self.replica_group, async_op=True)
        return Summing(self._waiting(work, payload), tensor, self._naming_replicas())

    @override
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Exchange:
        return self._exchange(dist.all_gather_single, part, whole)

    @override
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Exchange:
        return self._exchange(dist.reduce_scatter_single, whole, part)

    def _exchange(self, collective: Callable[..., dist.Work], input: Tensor, target: Tensor) -> Exchange:
        if self.replica_group is None:
            target.copy_(input)
            return Summed()
        payload = input.to(self._wire_device)  # no copy if it is there already
        is_there = target.device.type == self._wire_device.type
        output = target if is_there else torch.empty_like(target, device=self._wire_device)
        with classifying(f"exchanging tensors with the replicas of rank {self.pp_rank}"):
            work = collective(output, payload, group=self.replica_group, async_op=True)
        return Exchanging(self._waiting(work, output), payload, target, self._naming_replicas())

    def _naming_replicas(self) -> Callable[[], AbstractContextManager[None]]:
        """Call once per collective of replicas, in order; names those that do not take part."""
        self._replica_sums += 1
        copies = self.layout.copies_of(self.pp_rank)
        return partial(self._naming_absent, f"replicas/{self.pp_rank}/{self._replica_sums}", copies)

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        total = values.clone()
        self._rank_sums += 1
        with classifying("summing over all ranks"):
            work = dist.all_reduce(total, async_op=True)
        with self._naming_absent(f"ranks/{self._rank_sums}", range(self.world_size)):
            return HostReceive(work, total).wait(timeout)

    @override
    def post(self, name: str, value: str) -> None:
        with _naming_the_store():
            self._notes.set(name, value)

    @override
    def posted(self, name: str) -> str | None:
        with _naming_the_store():
            return self._notes.get(name).decode() if self._notes.check([name]) else None

    @override
    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._wires_in.clear()
        self._buffers.clear()
        self._opened.clear()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a broken group cannot be destroyed in order
                dist.destroy_process_group()


@contextlib.contextmanager
def _naming_the_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the ranks' common store is gone: {first_line(error)}") from error
