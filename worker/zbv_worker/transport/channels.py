"""What a transport must offer: :class:`Transport`, and the names of what it moves.

A *channel* carries all tensors from one rank to another, activations and gradients, in the order in which
the sender's list produces them (:mod:`zbv_solver.plans.channels`). Both ends know that order, so a transport
needs no tags. :mod:`zbv_worker.transport.endpoints` adds what a channel needs on top: receives posted ahead,
and agreement on shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from zbv_solver.plans.channels import Channel

from zbv_worker.transport.world import Layout
from zbv_worker.values.structure import TensorSpec


class ChannelKey(NamedTuple):
    """A channel's identity: its ends, as positions in the pipeline."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.sender}→{self.receiver}"


def key_of(channel: Channel) -> ChannelKey:
    """The identity of a plan's channel."""
    return ChannelKey(channel.sender, channel.receiver)


class Pending(Protocol):
    """A posted receive. The rank owns its tensor, which is new memory of torch's allocator."""

    def wait(self, timeout: float) -> Tensor:
        """Wait until the tensor is on the rank's device.

        Raises
        ------
        TimeoutError
            If it did not arrive within ``timeout`` seconds.
        ConnectionError
            If the peer is gone.
        """

    def on_stream(self, timeout: float) -> Tensor:
        """Return the tensor for work queued on the current stream from now on; raises like :meth:`wait`.

        On the CPU this is :meth:`wait`. On a GPU the host waits only if it must copy the tensor there itself,
        so a missing tensor may go unnoticed until someone waits for the queued work.
        """


Send = Callable[[Tensor, object], None]
"""Sends without waiting; keeps the tensor alive until received. The second argument names it in errors."""

Receive = Callable[[TensorSpec], Pending]
"""Posts a receive. The receives of a channel match its sends in order."""


class Reduction(Protocol):
    """A sum over replicas, or a gather, in progress."""

    def wait(self, timeout: float) -> None:
        """Wait until the tensor holds the result; raises TimeoutError or ConnectionError.

        NCCL makes the current stream wait, not the host.
        """


class Transport(ABC):
    """Moves tensors between the ranks of a pipeline, and between its replicas. All ranks use the same kind.

    A channel connects two positions of the pipeline within one column. All other methods take global ranks.
    Methods that take a timeout (in seconds) raise TimeoutError if it passes and ConnectionError if a peer is
    gone. After either, a transport is unusable and must be closed.
    """

    rank: int
    layout: Layout
    communicator_bytes: int = 0
    """Memory of the device that the connections took, as measured when they were made."""
    check: Callable[[], None]
    """Raises TimeoutError or ConnectionError if a send has failed. Does not block."""

    @property
    def world_size(self) -> int:
        """The number of ranks in all columns."""
        return self.layout.world_size

    @property
    def pp_rank(self) -> int:
        """This rank's position in its pipeline."""
        return self.layout.pp_rank(self.rank)

    @property
    def replica(self) -> int:
        """The index of the replica that this rank belongs to."""
        return self.layout.replica(self.rank)

    @property
    def column(self) -> int:
        """The index of this rank's pipeline; the ranks of column 0 report what all columns know."""
        return self.layout.column(self.rank)

    @abstractmethod
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        """Create these channels where they do not exist. Collective: every rank passes the same keys."""

    def through_host(self, is_on: bool, timeout: float) -> None:  # noqa: B027 - most transports do nothing
        """Move the tensors of channels through host memory from now on, or no longer.

        Call between steps, alike on all ranks of a pipeline. Waits until peers have received everything sent.
        Without effect on transports whose receives never wait on a device.

        What a GPU does for the first time may wait for everything that is queued: loading a kernel, taking
        memory from CUDA, connecting a sum. If a queued transfer waits for another rank, which waits for this
        one, that never ends. Tensors that pass through the host leave nothing queued.
        """

    @abstractmethod
    def sender(self, key: ChannelKey) -> Send:
        """The sending end of an open channel."""

    @abstractmethod
    def receiver(self, key: ChannelKey) -> Receive:
        """The receiving end of an open channel."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until peers have received everything sent."""

    @abstractmethod
    def gather(self, value: Any, timeout: float) -> list[Any]:
        """Return every rank's value, ordered by rank. Collective.

        Values are JSON and come back as JSON: tuples become lists. The caller must validate what peers sent.
        The TimeoutError names the absent ranks where it can. A value that is too long or not JSON raises
        ConnectionError on every rank.
        """

    @abstractmethod
    def barrier(self, timeout: float) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def tell(self, peer: int, value: int, timeout: float) -> None:
        """Send a 64-bit number to any rank, outside the channels; may wait until the peer receives it."""

    @abstractmethod
    def hear(self, peer: int, timeout: float) -> int:
        """Receive the next number that ``peer`` sends."""

    @abstractmethod
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        """Start to add up a tensor over the replicas of this rank, in place.

        Collective among them: all start the same sums in the same order. Several may be in progress.
        """

    @abstractmethod
    def gather_over_replicas(self, part: Tensor, whole: Tensor) -> Reduction:
        """Start to fill ``whole`` with the parts of this rank's replicas, in order of replicas.

        Both are contiguous and one-dimensional. Collective like :meth:`sum_over_replicas`, and in one order
        with it.
        """

    @abstractmethod
    def sum_parts_over_replicas(self, whole: Tensor, part: Tensor) -> Reduction:
        """Start to add up ``whole`` over the replicas, and to fill ``part`` with this replica's part of it.

        The counterpart of :meth:`gather_over_replicas`. ``whole`` must not change before the end.
        """

    @abstractmethod
    def link(self, sets: Iterable[tuple[int, ...]], timeout: float) -> None:
        """Connect sets of positions, within each column, for sums over them.

        Collective: every rank passes the same sets. Each has at least two positions, in ascending order.
        """

    @abstractmethod
    def sum_over_positions(self, positions: tuple[int, ...], tensor: Tensor) -> Reduction:
        """Start to add up a tensor over linked positions of this rank's column, in place.

        Collective among them like :meth:`sum_over_replicas`.
        """

    @abstractmethod
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        """Sum a small tensor over all ranks; the result is on its device. Collective."""

    @abstractmethod
    def post(self, name: str, value: str) -> None:
        """Publish a note that every rank can read."""

    @abstractmethod
    def posted(self, name: str) -> str | None:
        """Return a note, or None if no rank has published it. Does not wait; raises ConnectionError.

        A rank that has received a tensor sees every note that the sender published before sending it, and so
        does every rank that receives a tensor computed from it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; does not wait for peers."""
