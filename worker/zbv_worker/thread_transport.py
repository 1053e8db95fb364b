"""Ranks as threads of one process: a transport with no network, for tests and dry runs.

It behaves like the real ones where it matters: channels are ordered, sends do not wait, receives match in
the order in which they were posted, and every wait has a timeout.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import override

from zbv_worker.channels import ChannelKey, Pending, TensorSpec, Transport


@dataclass(eq=False)
class _Queue:
    """What was sent on a channel and not yet taken, by position since the start."""

    sent: int = 0
    posted: int = 0
    waiting: dict[int, Tensor] = field(default_factory=dict)


class ThreadHub:
    """The medium between the threads of one pipeline; makes their transports."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.changed = threading.Condition()
        self.queues: dict[ChannelKey, _Queue] = {}
        self.gathered: dict[tuple[int, int], Any] = {}
        self.told: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.lost: set[int] = set()

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of one rank."""
        return ThreadTransport(self, rank)


class ThreadTransport(Transport):
    """One thread's end of a :class:`ThreadHub`."""

    def __init__(self, hub: ThreadHub, rank: int):
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._gathers = 0

    @override
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        with self._hub.changed:
            for key in keys:
                self._hub.queues.setdefault(key, _Queue())

    @override
    def isend(self, key: ChannelKey, tensor: Tensor, label: str) -> None:
        with self._hub.changed:
            queue = self._hub.queues[key]
            queue.waiting[queue.sent] = tensor.detach()
            queue.sent += 1
            self._hub.changed.notify_all()

    @override
    def irecv(self, key: ChannelKey, spec: TensorSpec) -> Pending:
        with self._hub.changed:
            queue = self._hub.queues[key]
            queue.posted += 1
            return _Posted(self._hub, key, queue.posted - 1)

    @override
    def check(self) -> None:
        return None

    @override
    def flush(self, timeout: float) -> None:
        with self._hub.changed:
            mine = [queue for key, queue in self._hub.queues.items() if key.sender == self.rank]
            if not self._hub.changed.wait_for(lambda: not any(q.waiting for q in mine), timeout):
                raise TimeoutError("a sent tensor was not taken")

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        turn, self._gathers = self._gathers, self._gathers + 1
        with self._hub.changed:
            gathered = self._hub.gathered
            gathered[turn, self.rank] = value
            self._hub.changed.notify_all()
            ranks = range(self.world_size)
            if not self._hub.changed.wait_for(lambda: all((turn, r) in gathered for r in ranks), timeout):
                absent = [rank for rank in ranks if (turn, rank) not in gathered]
                raise TimeoutError(f"ranks {absent} did not arrive")
            return [gathered[turn, rank] for rank in ranks]

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
                raise TimeoutError(f"rank {peer} told nothing")
            if not told:
                raise ConnectionError(f"rank {peer} has closed its transport")
            return told.popleft()

    @override
    def close(self) -> None:
        with self._hub.changed:
            self._hub.lost.add(self.rank)
            self._hub.changed.notify_all()


@dataclass(frozen=True, eq=False)
class _Posted:
    hub: ThreadHub
    key: ChannelKey
    position: int

    def wait(self, timeout: float) -> Tensor:
        deadline = time.monotonic() + timeout
        queue = self.hub.queues[self.key]
        with self.hub.changed:
            while self.position not in queue.waiting:
                if self.key.sender in self.hub.lost:
                    raise ConnectionError("the peer has closed its transport")
                if not self.hub.changed.wait(deadline - time.monotonic()):
                    raise TimeoutError("nothing was sent")
            tensor = queue.waiting.pop(self.position)
            self.hub.changed.notify_all()
            return tensor
