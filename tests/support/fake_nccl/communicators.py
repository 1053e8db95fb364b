"""NCCL's communicators as ProcessGroupNCCL uses them: one stream each, operations in the order of issue.

A communicator has one running operation per rank at most, because its stream runs one at a time. A send and a
receive that run at the same time on both ends match, whatever their tags and sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from support.fake_nccl.device import Device, FakeStream, Item, Recording
from support.fake_nccl.memory import Block
from support.fake_nccl.simulation import ModelError, Simulation, pause_if_host

_TREE_BYTES = 16
"""Larger sums use another algorithm. A greeting is smaller, and a stage's gradients are larger."""
_ALGORITHMS = ("tree", "ring", "all_gather", "reduce_scatter")
CONNECTION_BYTES = 1 << 20
"""Memory of a communicator, and of each algorithm that it has connected."""
Kind = Literal["send", "receive", "all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class NcclModes:
    """What NCCL may do; each choice is allowed by its documentation."""

    buffered_sends: int = 0
    """How many sends of a communicator end before their receives start, because NCCL's buffers hold them."""
    transfer_seconds: float = 1e-4
    """The mean time of a transfer between two running operations."""
    runtime_connect: bool = False
    """NCCL_RUNTIME_CONNECT=1: what an algorithm of sums and gathers needs is connected and allocated when
    it is first used; otherwise at the communicator's first use."""
    abort_hangs: bool = False
    """``abort`` waits for something that does not end, so it raises at the group's timeout."""


@dataclass(eq=False)
class Operation(Item):
    kind: Kind = "send"
    communicator: Communicator = field(kw_only=True)
    source: Tensor | None = None
    target: Tensor | None = None
    blocks: tuple[Block, ...] = ()
    is_matched: bool = False

    @property
    def rank(self) -> int:
        return self.stream.device.rank

    @property
    def data(self) -> Tensor:
        found = self.target if self.kind == "receive" else self.source
        assert found is not None
        return found

    def start(self) -> bool:
        if self.rank in self.communicator.aborted:
            self.abort()
            return True
        if not self.stream.device.take_slot(self):
            return False
        self.communicator.running[self.rank] = self
        self.communicator.match()
        return True

    def finish(self) -> None:
        self.communicator.running.pop(self.rank, None)
        self.stream.device.unsent -= self.kind == "send"
        for block in self.blocks:
            self.stream.device.memory.release(block)
        super().finish()

    def abort(self) -> None:
        """End without a result: the memory holds garbage."""
        for block in self.blocks:
            if self.kind != "send":
                block.poison(f"{self.label} was aborted")
        self.finish()


@dataclass(eq=False)
class Communicator:
    """One ncclComm over some ranks."""

    simulation: Simulation
    modes: NcclModes
    name: str
    ranks: tuple[int, ...]
    joined: dict[str, set[int]] = field(default_factory=dict)
    running: dict[int, Operation] = field(default_factory=dict)
    buffers: dict[int, deque[Tensor]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def join(self, device: Device, algorithm: str = "") -> None:
        """Block the host until every rank has joined, as ``ncclCommInitRank`` does.

        Parameters
        ----------
        algorithm
            What is connected, if not the communicator itself (``ncclCollPreconnect``).
        """
        joined = self.joined.setdefault(algorithm, set())
        if device.rank in joined:
            return
        joined.add(device.rank)
        self.simulation.changed_everywhere()
        device.host().block(
            lambda: len(joined) == len(self.ranks),
            f"connects {f'{algorithm} of ' * bool(algorithm)}{self.name}, which rank(s) "
            f"{sorted(set(self.ranks) - joined)} have not entered",
        )
        if algorithm:
            device.wait_until_idle(f"the memory of {algorithm} of {self.name}")
        connects_all = not algorithm and not self.modes.runtime_connect
        device.connected_bytes += CONNECTION_BYTES * (1 + len(_ALGORITHMS) * connects_all)

    def match(self) -> None:
        """Start the transfer between operations that wait for each other."""
        waiting = {rank: op for rank, op in self.running.items() if not op.is_matched}
        if all(op.kind in ("send", "receive") for op in waiting.values()):
            self._match_pair(list(waiting.values()))
            return
        alike = {(op.kind, op.data.numel()) for op in waiting.values()}
        if len(waiting) == len(self.ranks) and len(alike) == 1:
            self._later(list(waiting.values()), lambda: _reduce([waiting[rank] for rank in self.ranks]))

    def _match_pair(self, waiting: list[Operation]) -> None:
        sends = [op for op in waiting if op.kind == "send"]
        for receive in (op for op in waiting if op.kind == "receive"):
            buffer = self._buffer(self._other(receive.rank))
            if buffer:
                self._later([receive], partial(_deliver, buffer.popleft(), receive))
            elif sends:
                send = sends.pop()
                self._later([send, receive], partial(_transfer, send, receive))
        for send in sends:
            if len(self._buffer(send.rank)) < self.modes.buffered_sends:
                self._later([send], partial(self._deposit, send))

    def _deposit(self, send: Operation) -> None:
        self._buffer(send.rank).append(send.data.clone())
        send.finish()
        self.match()

    def _later(self, operations: list[Operation], transfer: Callable[[], None]) -> None:
        """Run a transfer after its time. If a rank aborts meanwhile, its peers wait forever."""
        for operation in operations:
            operation.is_matched = True

        def end() -> None:
            if all(self.running.get(op.rank) is op for op in operations):
                transfer()

        seconds = self.modes.transfer_seconds * self.simulation.random.uniform(0.2, 3)
        self.simulation.at(self.simulation.now + seconds, end)

    def _buffer(self, sender: int) -> deque[Tensor]:
        return self.buffers.setdefault(sender, deque())

    def _other(self, rank: int) -> int:
        (other,) = set(self.ranks) - {rank}
        return other

    def abort(self, rank: int) -> None:
        """End a rank's operations; the other ranks' go on waiting."""
        self.aborted.add(rank)

        def end() -> None:
            running = self.running.get(rank)
            if running is not None:
                running.abort()

        self.simulation.at(self.simulation.now, end)


def _transfer(send: Operation, receive: Operation) -> None:
    _deliver(send.data, receive)
    send.finish()


def _deliver(sent: Tensor, receive: Operation) -> None:
    """Copy what fits. A receive of more than was sent never ends; a smaller one ends without an error."""
    source, target = sent.reshape(-1).view(torch.uint8), receive.data.reshape(-1).view(torch.uint8)
    size = min(len(source), len(target))
    target[:size] = source[:size]
    if len(target) <= len(source):
        receive.finish()


def _reduce(operations: list[Operation]) -> None:
    """Complete a collective of all ranks, in ascending order."""
    sources = [operation.data.clone() for operation in operations]
    for index, operation in enumerate(operations):
        assert operation.target is not None
        if operation.kind == "all_gather":
            result = torch.cat(sources)
        else:
            result = torch.stack(sources).sum(0)
            if operation.kind == "reduce_scatter":
                result = result.reshape(len(operations), -1)[index]
        operation.target.copy_(result)
    for operation in operations:
        operation.finish()


class FakeWork:
    """A queued operation (``WorkNCCL``), without what the worker must not call."""

    def __init__(self, operation: Operation, end: Recording):
        self._operation = operation
        self._end = end

    def is_completed(self) -> bool:
        """Whether the stream has passed it, also because of an abort."""
        return self._operation.stream.device.has_passed(self._end)

    def wait(self) -> bool:
        """Make the current stream wait; the host goes on."""
        self._operation.stream.device.current.wait_recording(self._end)
        return True


class FakeGroup:
    """One rank's process group (``ProcessGroupNCCL``, connected lazily)."""

    def __init__(
        self,
        cluster_communicators: Communicators,
        device: Device,
        name: str,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        high_priority: bool,
    ):
        self._communicators = cluster_communicators
        self._device = device
        self._name = name
        self._ranks = tuple(ranks)
        self._timeout = timeout
        self._is_high_priority = high_priority
        self._streams: dict[str, FakeStream] = {}
        self._is_aborted = False

    process_group = None

    def send(self, tensor: Tensor, peer: int) -> FakeWork:
        return self._point_to_point("send", tensor, peer)

    def receive(self, tensor: Tensor, peer: int) -> FakeWork:
        return self._point_to_point("receive", tensor, peer)

    def all_reduce(self, tensor: Tensor) -> FakeWork:
        return self._issue("all_reduce", self._ranks, "device", tensor, tensor)

    def all_gather(self, whole: Tensor, part: Tensor) -> FakeWork:
        return self._issue("all_gather", self._ranks, "device", part, whole)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> FakeWork:
        return self._issue("reduce_scatter", self._ranks, "device", whole, part)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def abort(self) -> None:
        """End the operations of this rank; from any thread. Raises at the group's timeout if it hangs."""
        self._is_aborted = True
        if self._communicators.modes.abort_hangs:
            pause_if_host(self._timeout.total_seconds())
            raise RuntimeError("ProcessGroup abort timed out")
        for communicator in self._mine():
            communicator.abort(self._device.rank)

    def shutdown(self) -> None:
        """Block the host until every operation is finished."""
        self._device.host().block(
            lambda: not any(stream.queue for stream in self._streams.values()),
            f"shuts {self._name} down, which has unfinished operations",
        )

    def _mine(self) -> list[Communicator]:
        return [self._communicators.by_key[self._name, key] for key in self._streams]

    def _point_to_point(self, kind: Kind, tensor: Tensor, peer: int) -> FakeWork:
        pair = sorted((self._device.rank, self._ranks[peer]))
        key = f"{self._ranks.index(pair[0])}:{self._ranks.index(pair[1])}"
        source, target = (tensor, None) if kind == "send" else (None, tensor)
        return self._issue(kind, tuple(pair), key, source, target)

    def _issue(
        self, kind: Kind, ranks: tuple[int, ...], key: str, source: Tensor | None, target: Tensor | None
    ) -> FakeWork:
        device = self._device
        device.host()
        if self._is_aborted:
            raise torch.distributed.DistBackendError(f"NCCL communicator was aborted on rank {device.rank}.")
        for tensor in (source, target):
            _check_device_tensor(device, tensor, kind)
        communicator = self._communicators.get(self._name, key, ranks)
        stream = self._streams.get(key)
        if stream is None:
            communicator.join(device)
            stream = self._streams[key] = device.pool_stream(high_priority=self._is_high_priority)
        if (
            self._communicators.modes.runtime_connect
            and source is not None
            and kind not in ("send", "receive")
        ):
            communicator.join(device, _algorithm(kind, source.nbytes))
        stream.wait_recording(device.current.record())
        ticket = stream.ticket(f"{kind} on {communicator.name}")
        memory = device.memory
        reads = () if source is None else (source,)
        writes = () if target is None else (target,)
        stream.use_memory(ticket[3], ticket[4], reads if target is not source else (), writes)
        blocks = {id(block): block for t in (*reads, *writes) if (block := memory.block_of(t)) is not None}
        for block in blocks.values():
            block.recorded.add(stream.number)
            block.pending += 1
        operation = Operation(
            *ticket,
            kind=kind,
            communicator=communicator,
            source=None if source is None else memory.raw(source),
            target=None if target is None else memory.raw(target),
            blocks=tuple(blocks.values()),
        )
        device.unsent += kind == "send"
        device.most_unsent = max(device.most_unsent, device.unsent)
        device.issued_communication(operation)
        stream.add(operation)
        return FakeWork(operation, stream.record())


def _algorithm(kind: Kind, nbytes: int) -> str:
    """What NCCL might choose for a sum or gather; the choice depends on its kind and size."""
    return kind if kind in _ALGORITHMS else "tree" if nbytes <= _TREE_BYTES else "ring"


def _check_device_tensor(device: Device, tensor: Tensor | None, kind: Kind) -> None:
    """Raise what ``check_gpu_single_tensor`` raises."""
    if tensor is None:
        return
    block = device.memory.block_of(tensor)
    if tensor.is_sparse or block is None or not block.is_on_device:
        raise ValueError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous():
        if kind in ("send", "receive"):  # torch warns once and moves the bytes as they lie
            raise ModelError(f"the tensor of a {kind} is not contiguous")
        raise ValueError("Tensors must be contiguous")


class Communicators:
    """Every communicator of the cluster, by group and pair."""

    def __init__(self, simulation: Simulation, modes: NcclModes):
        self.simulation = simulation
        self.modes = modes
        self.by_key: dict[tuple[str, str], Communicator] = {}

    def get(self, group: str, key: str, ranks: tuple[int, ...]) -> Communicator:
        made = self.by_key.get((group, key))
        if made is None:
            made = Communicator(self.simulation, self.modes, f"{group} ({key})", ranks)
            self.by_key[group, key] = made
        return made
