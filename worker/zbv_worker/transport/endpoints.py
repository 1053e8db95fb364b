"""The two ends of a channel: receives posted ahead in the channel's order, and agreement on shapes.

Shapes are exchanged as data, so no code of a peer runs: a header with shape and dtype precedes the first
activation of each boundary. A gradient has the shape of its boundary's activation, which its receiver made.

Activations and gradients share the order of a channel. So a rank that needs a tensor posts all receives
before it too, and must know their shapes. It does: the sender computed an earlier gradient from an activation
of this rank. If this rank had yet to make that activation, the needed tensor would depend on an action that
follows the one that needs it, and no such list can be executed. The same argument excludes a deadlock: a
receive never waits for anything that the needed tensor does not wait for. Receives that are posted ahead of
need stop at the first unknown shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, Send, TensorSpec, Transport, key_of

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

    def sender(self, transfer: Transfer) -> Send:
        """How to send a transfer, when its turn in the channel's order has come; does not wait.

        The call raises :class:`ModelError` if the shape or dtype of a boundary's activations changes.
        """
        if transfer.kind == "gradient":
            return self._send
        send, announced, boundary = self._send, self._announced, transfer.boundary

        def send_activation(tensor: Tensor, label: object) -> None:
            known = announced.get(boundary)
            if known is None:
                known = announced[boundary] = TensorSpec.of(tensor)
                send(encode_header(known), f"header of {label}")
            elif not known.fits(tensor):
                raise ModelError(
                    f"{label}: the output is {_text(TensorSpec.of(tensor))}, but it was {_text(known)} "
                    f"before. A stage's output must keep its shape; drop or pad the incomplete microbatch."
                )
            send(tensor, label)

        return send_activation


class Inbox:
    """The receiving end of an open channel.

    Parameters
    ----------
    specs
        Shape and dtype per boundary, as far as known; shared by the rank's inboxes. Headers add those of
        received activations, the rank's forwards those of gradients.
    look_ahead
        How many receives stay posted beyond the furthest tensor that was needed so far. Each holds a buffer
        beyond the plan's memory account. If the rank uses tensors in another order than they are sent, those
        that it has not used yet hold theirs as well; without a posted receive they would wait at the sender.

        Over NCCL a posted receive waits in a kernel, which occupies part of the GPU. The receives of a
        channel run one after another, so at most one kernel waits per channel, whatever the look-ahead. With
        0, a receive is posted only when its action is next: a kernel waits only while the rank would be idle,
        but the sender's kernel waits instead if the sender is early.
    """

    def __init__(self, transport: Transport, channel: Channel, specs: dict[int, TensorSpec], look_ahead: int):
        self._receive = transport.receiver(key_of(channel))
        self._transfers = channel.transfers
        self._index = {transfer: index for index, transfer in enumerate(channel.transfers)}
        self._specs = specs
        self._look_ahead = look_ahead
        self._posted = 0
        self._pending: dict[int, Pending] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self._posted = 0
        self._pending.clear()
        self._post_ahead(self._look_ahead)

    def index(self, transfer: Transfer) -> int:
        """A transfer's position in the channel's order."""
        return self._index[transfer]

    def take(self, index: int, timeout: float) -> Tensor:
        """The tensor at an index of the channel, for the current stream (:meth:`Pending.on_stream`)."""
        while self._posted <= index:
            if not self._post_next():
                self._receive_header(timeout)
        tensor = self._pending.pop(index).on_stream(timeout)
        # Not before the wait: gloo's thread spins if a receive is posted while the peer's tensor arrives.
        self._post_ahead(index + 1 + self._look_ahead)
        return tensor

    def _post_ahead(self, end: int) -> None:
        """Post the receives before an index of the channel, as far as their shapes are known."""
        end = min(end, len(self._transfers))
        while self._posted < end and self._post_next():
            pass

    def _post_next(self) -> bool:
        """Post the channel's next receive; returns False if its shape is not known yet."""
        spec = self._specs.get(self._transfers[self._posted].boundary)
        if spec is None:
            return False
        self._pending[self._posted] = self._receive(spec)
        self._posted += 1
        return True

    def _receive_header(self, timeout: float) -> None:
        transfer = self._transfers[self._posted]
        if transfer.kind == "gradient":
            raise ModelError(
                f"the gradient of boundary {transfer.boundary} is sent before this rank made the activation. "
                f"Check the plan with `zbv check`."
            )
        self._specs[transfer.boundary] = decode_header(self._receive(_HEADER).wait(timeout))


def _text(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
