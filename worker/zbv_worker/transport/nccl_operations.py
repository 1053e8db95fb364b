"""One rank's operations over NCCL: receives, sends and sums that are queued, their ends and their errors.

The host learns that one has ended by polling ``is_completed()``, and has its own deadlines. It remembers
itself that it aborted a group: NCCL then reports operations as complete.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zbv_worker.transport.sends import sendable
from zbv_worker.transport.torch_api import Clock, NcclGroup, NcclWork
from zbv_worker.transport.torch_errors import classified

_POLL_SECONDS = 0.00005


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
