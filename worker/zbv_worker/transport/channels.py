"""Point-to-point transfers of a rank: what is asked of a transport, and the order of every channel.

A *channel* carries all tensors of one kind (activation or gradient) from one rank to another, in the order
in which the sender's list produces them (:mod:`zbv_solver.channels`). Both ends know that order, so nothing
relies on tags. A :class:`Transport` moves tensors; :class:`Inbox` and :class:`Outbox` add what a channel
needs on top of it: order, receives posted ahead, and the agreement on shapes.

Shapes are agreed without running anyone's code: the first tensor of a boundary is preceded by a header with
its shape and dtype. A gradient has the shape of its boundary's activation, which its receiver sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from zbv_solver.channels import Channel, ChannelKind, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.layout import Layout


class ChannelKey(NamedTuple):
    """A channel's identity: direction and kind. A tuple, because every transfer looks its channel up."""

    sender: int
    receiver: int
    kind: ChannelKind

    def __str__(self) -> str:
        return f"{self.kind}s {self.sender}→{self.receiver}"


def key_of(channel: Channel) -> ChannelKey:
    """The identity of a plan's channel."""
    return ChannelKey(channel.sender, channel.receiver, channel.kind)


class TensorSpec(NamedTuple):
    """Shape and dtype of what crosses a boundary. A tuple, because every receive looks its memory up."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Whether it is the spec of a tensor."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype


class Pending(Protocol):
    """A posted receive. Its tensor is the rank's own; its memory is used again when nothing refers to it."""

    def wait(self, timeout: float) -> Tensor:
        """Wait for the tensor: it is on the rank's device when this returns.

        Raises
        ------
        TimeoutError
            When it did not arrive within ``timeout`` seconds.
        ConnectionError
            When the peer is gone.
        """

    def on_stream(self, timeout: float) -> Tensor:
        """The tensor, for work that is queued on the current stream from now on; raises as :meth:`wait`.

        On the CPU the same as :meth:`wait`. On a GPU the host waits only where it must bring the tensor there
        itself, so one that never comes may be noticed only by who waits for that work.
        """


Send = Callable[[Tensor, object], None]
Receive = Callable[[TensorSpec], Pending]


class Reduction(Protocol):
    """A sum over replicas that is under way."""

    def wait(self, timeout: float) -> None:
        """Until the tensor holds the sum; raises TimeoutError or ConnectionError."""


class Transport(ABC):
    """Moves tensors between the ranks of a pipeline, and between its replicas. All ranks use the same kind.

    A channel's ends are positions of the pipeline; it leads to the same replica's rank there. Everything else
    speaks of global ranks. After a timeout or a lost connection a transport is unusable; close it.
    """

    rank: int
    layout: Layout

    @property
    def world_size(self) -> int:
        """All ranks of all replicas."""
        return self.layout.world_size

    @property
    def pp_rank(self) -> int:
        """This rank's position in its pipeline."""
        return self.layout.pp_rank(self.rank)

    @property
    def replica(self) -> int:
        """Which pipeline this rank belongs to."""
        return self.layout.replica(self.rank)

    @abstractmethod
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        """Make sure that these channels exist. Collective: every rank passes the same keys."""

    @abstractmethod
    def isend(self, key: ChannelKey, tensor: Tensor, label: object) -> None:
        """Send without waiting; the tensor is kept alive until it was taken. ``label`` names it in errors."""

    @abstractmethod
    def irecv(self, key: ChannelKey, spec: TensorSpec) -> Pending:
        """Post a receive. Receives of a channel match its sends in order."""

    def sender(self, key: ChannelKey) -> Send:
        """:meth:`isend` of one open channel, for who sends on it again and again."""
        return partial(self.isend, key)

    def receiver(self, key: ChannelKey) -> Receive:
        """:meth:`irecv` of one open channel."""
        return partial(self.irecv, key)

    @property
    def buffer_bytes(self) -> int:
        """Memory of this rank that receives have taken so far and that is kept for further ones."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Raise TimeoutError or ConnectionError if a send has failed meanwhile. Does not block."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until everything sent was taken; raises TimeoutError or ConnectionError."""

    @abstractmethod
    def gather(self, value: Any, timeout: float) -> list[Any]:
        """Every rank's value, by rank. Collective.

        Values are JSON, and come back as JSON: tuples as lists. Whoever asks checks what a peer sent.

        Raises
        ------
        TimeoutError
            When a rank does not take part; names the absent ranks where it can.
        ConnectionError
            When a rank sends something other than JSON, or too much of it.
        """

    @abstractmethod
    def barrier(self, timeout: float) -> None:
        """Wait for all ranks; raises TimeoutError."""

    @abstractmethod
    def tell(self, peer: int, value: int, timeout: float) -> None:
        """Send a number of 64 bits to any rank, beside the channels; may wait until the peer hears it.

        Raises TimeoutError or ConnectionError.
        """

    @abstractmethod
    def hear(self, peer: int, timeout: float) -> int:
        """The next number that a rank tells this one; raises TimeoutError or ConnectionError."""

    @abstractmethod
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        """Begin to add up a tensor over the replicas of this position, in place.

        Collective among them: all begin the same sums in the same order. Several may be under way.
        """

    @abstractmethod
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        """The sum of a small CPU tensor over all ranks. Collective; TimeoutError or ConnectionError."""

    @abstractmethod
    def post(self, name: str, value: str) -> None:
        """Put a note where every rank can read it."""

    @abstractmethod
    def posted(self, name: str) -> str | None:
        """A note, None when nobody has posted it. Does not wait for one; raises ConnectionError.

        What a rank posted before it sent a tensor is there for whoever has received that tensor, or any that
        was sent because of it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; does not wait for peers."""


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_DIMENSIONS = 8
_HEADER = TensorSpec((_MAX_DIMENSIONS + 2,), torch.int64)


def encode_header(spec: TensorSpec) -> Tensor:
    """A spec as a tensor: dtype code, number of dimensions, dimensions; raises :class:`ModelError`."""
    if spec.dtype not in _DTYPES or len(spec.shape) > _MAX_DIMENSIONS:
        raise ModelError(
            f"found a {spec.dtype} tensor of {len(spec.shape)} dimensions between stages; it must be one of "
            f"{', '.join(map(str, _DTYPES))} with at most {_MAX_DIMENSIONS}."
        )
    padding = [0] * (_MAX_DIMENSIONS - len(spec.shape))
    return torch.tensor([_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape, *padding])


def decode_header(header: Tensor) -> TensorSpec:
    """The spec that :func:`encode_header` wrote."""
    code, dimensions, *shape = header.tolist()
    return TensorSpec(tuple(shape[:dimensions]), _DTYPES[code])


class Outbox:
    """The sending end of one channel, which must be open when something is sent."""

    def __init__(self, transport: Transport, channel: Channel):
        self.key = key_of(channel)
        self._transport = transport
        self._send: Send | None = None
        self._announced: dict[int, TensorSpec] = {}
        self._is_announcing = self.key.kind == "activation"

    def send(self, transfer: Transfer, tensor: Tensor, label: object) -> None:
        """Send a tensor, in the order of the channel; does not wait.

        Raises
        ------
        ModelError
            When a boundary's tensors change their shape or dtype.
        """
        send = self._send
        if send is None:
            send = self._send = self._transport.sender(self.key)
        if self._is_announcing:
            known = self._announced.get(transfer.boundary)
            if known is None:
                known = self._announced[transfer.boundary] = TensorSpec.of(tensor)
                send(encode_header(known), f"header of {label}")
            elif not known.fits(tensor):
                raise ModelError(
                    f"{label}: the output is {_text(TensorSpec.of(tensor))}, but it was {_text(known)} "
                    f"before. A stage must keep its shape; drop or pad the incomplete microbatch."
                )
        send(tensor, label)


class Inbox:
    """The receiving end of one channel: receives are posted ahead, in the channel's order.

    Parameters
    ----------
    specs
        What crosses each boundary, as far as known; shared by the rank's inboxes. Activations are added here
        from their headers, gradients by whoever sends the boundary's activation.
    look_ahead
        How many receives are kept posted ahead of use. Each holds one tensor beyond the plan's memory
        account. The one that is needed next is always posted, however far it is.
    """

    def __init__(self, transport: Transport, channel: Channel, specs: dict[int, TensorSpec], look_ahead: int):
        self.key = key_of(channel)
        self._transport = transport
        self._receive: Receive | None = None
        self._boundaries = [transfer.boundary for transfer in channel.transfers]
        self._index = {transfer: index for index, transfer in enumerate(channel.transfers)}
        self._specs = specs
        self._look_ahead = look_ahead
        self._posted = 0
        self._pending: dict[int, Pending] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self._posted = 0
        self._pending.clear()
        self._post_ahead()

    def index(self, transfer: Transfer) -> int:
        """Where a transfer stands in the channel's order."""
        return self._index[transfer]

    def take(self, index: int, timeout: float) -> Tensor:
        """The tensor at a place of the channel's order, for the current stream: :meth:`Pending.on_stream`."""
        while self._posted <= index:
            if not self._post_next():
                self._receive_header(timeout)
        tensor = self._pending.pop(index).on_stream(timeout)
        self._post_ahead()
        return tensor

    def _post_ahead(self) -> None:
        while len(self._pending) < self._look_ahead and self._posted < len(self._boundaries):
            if not self._post_next():
                return

    def _post_next(self) -> bool:
        """Post the next receive of the channel; False when its shape is not known yet."""
        spec = self._specs.get(self._boundaries[self._posted])
        if spec is None:
            return False
        self._pending[self._posted] = self._post(spec)
        self._posted += 1
        return True

    def _post(self, spec: TensorSpec) -> Pending:
        receive = self._receive
        if receive is None:
            receive = self._receive = self._transport.receiver(self.key)
        return receive(spec)

    def _receive_header(self, timeout: float) -> None:
        boundary = self._boundaries[self._posted]
        if self.key.kind == "gradient":
            raise ModelError(f"a gradient of boundary {boundary} is due before the activation was sent.")
        self._specs[boundary] = decode_header(self._post(_HEADER).wait(timeout))


def _text(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
