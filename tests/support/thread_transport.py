"""Ranks as threads of one process: a transport without a network.

It behaves like the real ones where it matters: channels are ordered, sends do not wait, receives match in
the order in which they were posted, and every wait has a timeout.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Reduction, Send, Transport
from zbv_worker.transport.world import Layout
from zbv_worker.values.structure import TensorSpec

Result = TypeVar("Result")


@dataclass(eq=False)
class _Queue:
    """Tensors sent on a channel and not yet received, by index since the start."""

    sent: int = 0
    posted: int = 0
    waiting: dict[int, Tensor] = field(default_factory=dict)


class ThreadHub:
    """Connects the threads of a pipeline and its replicas; creates their transports."""

    def __init__(self, pp_degree: int, replicas: int = 1):
        self.layout = Layout(pp_degree, replicas)
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, ChannelKey], _Queue] = {}
        self.sums: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = defaultdict(dict)
        self.notes: dict[str, str] = {}
        self.gathered: dict[tuple[int, int], str] = {}
        self.told: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.lost: set[int] = set()

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def run(self, work: Callable[[ThreadTransport], Result], seconds: float = 240.0) -> list[Result]:
        """What ``work`` returns on every rank's thread.

        If it fails on a rank, the others lose that rank, and the first error of any is raised.
        """
        found: dict[int, Result] = {}
        failures: list[BaseException] = []

        def rank_main(rank: int) -> None:
            transport = self.transport(rank)
            try:
                found[rank] = work(transport)
            except BaseException as error:
                failures.append(error)
                transport.close()

        ranks = range(self.layout.world_size)
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        if failures:
            raise failures[0]
        assert len(found) == len(ranks), f"only ranks {sorted(found)} ended within {seconds:g} s"
        return [found[rank] for rank in ranks]


class ThreadTransport(Transport):
    """One thread's end of a :class:`ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int):
        self.rank = rank
        self.layout = hub.layout
        self._hub = hub
        self._gathers = 0
        self._sums = 0
        self._turns: dict[tuple[int, ...], int] = {}

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        with self._hub.changed:
            for key in keys:
                self._hub.queues.setdefault((self.column, key), _Queue())

    @override
    def sender(self, key: ChannelKey) -> Send:
        queue = self._hub.queues[self.column, key]

        def send(tensor: Tensor, label: object) -> None:
            with self._hub.changed:
                queue.waiting[queue.sent] = tensor.detach()
                queue.sent += 1
                self._hub.changed.notify_all()

        return send

    @override
    def receiver(self, key: ChannelKey) -> Receive:
        queue, sender = self._hub.queues[self.column, key], self._at(key.sender)

        def receive(spec: TensorSpec) -> Pending:
            with self._hub.changed:
                queue.posted += 1
                return _Posted(self._hub, queue, sender, queue.posted - 1)

        return receive

    @override
    def check(self) -> None:
        return None

    @override
    def flush(self, timeout: float) -> None:
        with self._hub.changed:
            own = (self.column, self.pp_rank)
            mine = [q for (column, key), q in self._hub.queues.items() if (column, key.sender) == own]
            if not self._hub.changed.wait_for(lambda: not any(q.waiting for q in mine), timeout):
                raise TimeoutError("the peer did not receive a sent tensor")

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        turn, self._gathers = self._gathers, self._gathers + 1
        with self._hub.changed:
            gathered = self._hub.gathered
            gathered[turn, self.rank] = json.dumps(value)
            self._hub.changed.notify_all()
            ranks = range(self.world_size)

            def absent() -> set[int]:
                return {rank for rank in ranks if (turn, rank) not in gathered}

            self._hub.changed.wait_for(lambda: not absent() or absent() & self._hub.lost, timeout)
            if absent() & self._hub.lost:
                raise ConnectionError(f"ranks {absent() & self._hub.lost} have closed their transports")
            if absent():
                raise TimeoutError(f"ranks {sorted(absent())} did not take part")
            return [json.loads(gathered[turn, rank]) for rank in ranks]

    @override
    def barrier(self, timeout: float) -> None:
        self.gather(None, timeout)

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        with self._hub.changed:
            self._hub.told[self.rank, peer].append(value)
            self._hub.changed.notify_all()

    @override
    def hear(self, peer: int, timeout: float) -> int:
        with self._hub.changed:
            told = self._hub.told[peer, self.rank]
            if not self._hub.changed.wait_for(lambda: told or peer in self._hub.lost, timeout):
                raise TimeoutError(f"rank {peer} sent no number")
            if not told:
                raise ConnectionError(f"rank {peer} has closed its transport")
            return told.popleft()

    @override
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        return self._together(tensor, tensor, lambda parts: torch.stack(parts).sum(0))

    @override
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Reduction:
        return self._together(part, whole, torch.cat)

    @override
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        mine = slice(self.replica * part.numel(), (self.replica + 1) * part.numel())
        return self._together(whole, part, lambda parts: torch.stack(parts).sum(0)[mine])

    def _together(self, input: Tensor, target: Tensor, combined: Callable[[list[Tensor]], Tensor]) -> _Sum:
        turn, self._sums = self._sums, self._sums + 1
        with self._hub.changed:
            parts = self._hub.sums[self.layout.copies_of(self.rank), turn]
            parts[self.replica] = input.clone()
            self._hub.changed.notify_all()
        return _Sum(self._hub, parts, target, combined, self.layout.replicas)

    @override
    def link(self, sets: Iterable[tuple[int, ...]], timeout: float) -> None:
        return None

    @override
    def sum_over_positions(self, positions: tuple[int, ...], tensor: Tensor) -> Reduction:
        ranks = tuple(map(self._at, positions))
        turn = self._turns[ranks] = self._turns.get(ranks, 0) + 1
        with self._hub.changed:
            parts = self._hub.sums[ranks, -turn]
            parts[positions.index(self.pp_rank)] = tensor.clone()
            self._hub.changed.notify_all()
        return _Sum(self._hub, parts, tensor, lambda parts: torch.stack(parts).sum(0), len(ranks))

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        gathered = self.gather(values.tolist(), timeout)
        return torch.tensor(gathered, dtype=values.dtype).sum(0)

    @override
    def post(self, name: str, value: str) -> None:
        with self._hub.changed:
            self._hub.notes[name] = value

    @override
    def posted(self, name: str) -> str | None:
        with self._hub.changed:
            return self._hub.notes.get(name)

    @override
    def close(self) -> None:
        with self._hub.changed:
            self._hub.lost.add(self.rank)
            self._hub.changed.notify_all()

    def _at(self, pp_rank: int) -> int:
        return self.layout.global_rank(pp_rank, self.column)


@dataclass(frozen=True, eq=False)
class _Sum:
    hub: ThreadHub
    parts: dict[int, Tensor]
    target: Tensor
    combined: Callable[[list[Tensor]], Tensor]
    count: int

    def wait(self, timeout: float) -> None:
        with self.hub.changed:
            replicas = range(self.count)
            self.hub.changed.wait_for(lambda: len(self.parts) == len(replicas) or self.hub.lost, timeout)
            if len(self.parts) < len(replicas) and self.hub.lost:
                raise ConnectionError(f"ranks {self.hub.lost} have closed their transports")
            if len(self.parts) < len(replicas):
                absent = [replica for replica in replicas if replica not in self.parts]
                raise TimeoutError(f"replicas {absent} did not take part in a sum")
            self.target.copy_(self.combined([self.parts[replica] for replica in replicas]))


@dataclass(frozen=True, eq=False)
class _Posted:
    hub: ThreadHub
    queue: _Queue
    sender: int
    position: int

    def wait(self, timeout: float) -> Tensor:
        deadline = time.monotonic() + timeout
        queue = self.queue
        with self.hub.changed:
            while self.position not in queue.waiting:
                if self.sender in self.hub.lost:
                    raise ConnectionError("the peer has closed its transport")
                if not self.hub.changed.wait(deadline - time.monotonic()):
                    raise TimeoutError("nothing was sent")
            tensor = queue.waiting.pop(self.position)
            self.hub.changed.notify_all()
            return tensor

    on_stream = wait
