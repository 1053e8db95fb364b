"""The two ends of a channel: receives posted ahead in the channel's order, and agreement on shapes.

Shapes are exchanged as data, so no code of a peer runs: a header with shape and dtype precedes the first
tensor of each boundary. A gradient has the shape of its boundary's activation, which its receiver sent.
"""

from __future__ import annotations

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, TensorSpec, Transport, key_of

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
    """The sending end of an open channel."""

    def __init__(self, transport: Transport, channel: Channel):
        self._send = transport.sender(key_of(channel))
        self._announced: dict[int, TensorSpec] = {}
        self._is_announcing = channel.kind == "activation"

    def send(self, transfer: Transfer, tensor: Tensor, label: object) -> None:
        """Send a tensor, in the channel's order; does not wait.

        Raises
        ------
        ModelError
            If the shape or dtype of a boundary's tensors changes.
        """
        if self._is_announcing:
            known = self._announced.get(transfer.boundary)
            if known is None:
                known = self._announced[transfer.boundary] = TensorSpec.of(tensor)
                self._send(encode_header(known), f"header of {label}")
            elif not known.fits(tensor):
                raise ModelError(
                    f"{label}: the output is {_text(TensorSpec.of(tensor))}, but it was {_text(known)} "
                    f"before. A stage's output must keep its shape; drop or pad the incomplete microbatch."
                )
        self._send(tensor, label)


class Inbox:
    """The receiving end of an open channel.

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
        self._receive = transport.receiver(key_of(channel))
        self._kind = channel.kind
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
        self._pending[self._posted] = self._receive(spec)
        self._posted += 1
        return True

    def _receive_header(self, timeout: float) -> None:
        boundary = self._boundaries[self._posted]
        if self._kind == "gradient":
            raise ModelError(
                f"the gradient of boundary {boundary} is needed before this rank sent the activation."
            )
        self._specs[boundary] = decode_header(self._receive(_HEADER).wait(timeout))


def _text(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
