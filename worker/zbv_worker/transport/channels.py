"""Point-to-point transfers of a rank: the :class:`Transport` interface, and the order of each channel.

A *channel* carries all tensors of one kind (activation or gradient) from one rank to another, in the order in
which the sender's list produces them (:mod:`zbv_solver.plans.channels`). Both ends know that order, so tags
are not needed. A :class:`Transport` moves tensors; :class:`Inbox` and :class:`Outbox` add what a channel
needs: order, receives posted ahead, and agreement on shapes.

Shapes are exchanged as data, so no code of a peer runs: a header with shape and dtype precedes the first
tensor of each boundary. A gradient has the shape of its boundary's activation, which its receiver sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, ChannelKind, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.layout import Layout


class ChannelKey(NamedTuple):
    """A channel's identity: direction and kind. A tuple, because every transfer looks it up."""

    sender: int
    receiver: int
    kind: ChannelKind

    def __str__(self) -> str:
        return f"{self.kind}s {self.sender}→{self.receiver}"


def key_of(channel: Channel) -> ChannelKey:
    """The identity of a plan's channel."""
    return ChannelKey(channel.sender, channel.receiver, channel.kind)


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor between stages. A tuple, because every receive uses it as a key."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this shape and dtype."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype


class Pending(Protocol):
    """A posted receive. The rank owns its tensor; the memory is reused once nothing refers to it."""

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
Receive = Callable[[TensorSpec], Pending]


class Reduction(Protocol):
    """A sum over replicas in progress."""

    def wait(self, timeout: float) -> None:
        """Wait until the tensor holds the sum; raises TimeoutError or ConnectionError."""


class Transport(ABC):
    """Moves tensors between the ranks of a pipeline, and between its replicas. All ranks use the same kind.

    A channel connects two positions of the pipeline within one replica. All other methods take global ranks.
    After a timeout or a lost connection a transport is unusable and must be closed.
    """

    rank: int
    layout: Layout

    @property
    def world_size(self) -> int:
        """The number of ranks in all replicas."""
        return self.layout.world_size

    @property
    def pp_rank(self) -> int:
        """This rank's position in its pipeline."""
        return self.layout.pp_rank(self.rank)

    @property
    def replica(self) -> int:
        """The index of the pipeline that this rank belongs to."""
        return self.layout.replica(self.rank)

    @abstractmethod
    def open(self, keys: Iterable[ChannelKey], timeout: float) -> None:
        """Create these channels where they do not exist. Collective: every rank passes the same keys."""

    @abstractmethod
    def isend(self, key: ChannelKey, tensor: Tensor, label: object) -> None:
        """Send without waiting; keeps the tensor alive until received. ``label`` names it in errors."""

    @abstractmethod
    def irecv(self, key: ChannelKey, spec: TensorSpec) -> Pending:
        """Post a receive. The receives of a channel match its sends in order."""

    def sender(self, key: ChannelKey) -> Send:
        """:meth:`isend` bound to one open channel, for repeated use."""
        return partial(self.isend, key)

    def receiver(self, key: ChannelKey) -> Receive:
        """:meth:`irecv` bound to one open channel."""
        return partial(self.irecv, key)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank that receives have allocated so far; they are kept for further receives."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Raise TimeoutError or ConnectionError if a send has failed. Does not block."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Wait until peers have received everything sent; raises TimeoutError or ConnectionError."""

    @abstractmethod
    def gather(self, value: Any, timeout: float) -> list[Any]:
        """Return every rank's value, ordered by rank. Collective.

        Values are JSON and come back as JSON: tuples become lists. The caller must validate what peers sent.

        Raises
        ------
        TimeoutError
            If a rank does not take part; names the absent ranks where it can.
        ConnectionError
            If a rank sends something that is not JSON or is too long.
        """

    @abstractmethod
    def barrier(self, timeout: float) -> None:
        """Wait for all ranks; raises TimeoutError."""

    @abstractmethod
    def tell(self, peer: int, value: int, timeout: float) -> None:
        """Send a 64-bit number to any rank, outside the channels; may wait until the peer receives it.

        Raises TimeoutError or ConnectionError.
        """

    @abstractmethod
    def hear(self, peer: int, timeout: float) -> int:
        """Receive the next number that ``peer`` sends; raises TimeoutError or ConnectionError."""

    @abstractmethod
    def sum_over_replicas(self, tensor: Tensor) -> Reduction:
        """Start to add up a tensor over the replicas of this position, in place.

        Collective among them: all start the same sums in the same order. Several may be in progress.
        """

    @abstractmethod
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        """Sum a small CPU tensor over all ranks. Collective; raises TimeoutError or ConnectionError."""

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


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_DIMENSIONS = 8
_HEADER = TensorSpec((_MAX_DIMENSIONS + 2,), torch.int64)


def encode_header(spec: TensorSpec) -> Tensor:
    """Encode a spec as a tensor: dtype code, number of dimensions, dimensions; raises :class:`ModelError`."""
    if spec.dtype not in _DTYPES or len(spec.shape) > _MAX_DIMENSIONS:
        raise ModelError(
            f"found a {spec.dtype} tensor of {len(spec.shape)} dimensions between stages; must be one of "
            f"{', '.join(map(str, _DTYPES))} with at most {_MAX_DIMENSIONS} dimensions."
        )
    padding = [0] * (_MAX_DIMENSIONS - len(spec.shape))
    return torch.tensor([_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape, *padding])


def decode_header(header: Tensor) -> TensorSpec:
    """Decode a header of :func:`encode_header`."""
    code, dimensions, *shape = header.tolist()
    return TensorSpec(tuple(shape[:dimensions]), _DTYPES[code])


class Outbox:
    """The sending end of a channel, which must be open before the first send."""

    def __init__(self, transport: Transport, channel: Channel):
        self.key = key_of(channel)
        self._transport = transport
        self._send: Send | None = None
        self._announced: dict[int, TensorSpec] = {}
        self._is_announcing = self.key.kind == "activation"

    def send(self, transfer: Transfer, tensor: Tensor, label: object) -> None:
        """Send a tensor, in the channel's order; does not wait.

        Raises
        ------
        ModelError
            If the shape or dtype of a boundary's tensors changes.
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
                    f"before. A stage's output must keep its shape; drop or pad the incomplete microbatch."
                )
        send(tensor, label)


class Inbox:
    """The receiving end of a channel: receives are posted ahead, in the channel's order.

    Parameters
    ----------
    specs
        Shape and dtype per boundary, as far as known; shared by the rank's inboxes. Activations are added
        from their headers, gradients by the outbox that sends the boundary's activation.
    look_ahead
        How many receives stay posted ahead of use. Each holds one tensor beyond the plan's memory account.
        The receive that is needed next is always posted.
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
        """A transfer's position in the channel's order."""
        return self._index[transfer]

    def take(self, index: int, timeout: float) -> Tensor:
        """The tensor at an index of the channel, for the current stream (:meth:`Pending.on_stream`)."""
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
        """Post the channel's next receive; returns False if its shape is not known yet."""
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
            raise ModelError(
                f"the gradient of boundary {boundary} is needed before this rank sent the activation."
            )
        self._specs[boundary] = decode_header(self._post(_HEADER).wait(timeout))


def _text(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
