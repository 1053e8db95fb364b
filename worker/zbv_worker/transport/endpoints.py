"""The two ends of a channel: receives posted ahead in the channel's order, and agreement on structures.

Structures are exchanged as data, so no code of a peer runs: a header precedes the first activation of each
boundary. The header of one floating tensor holds shape and dtype; that of any other value is followed by its
structure as JSON (:mod:`zbv_worker.values.structure`). A gradient has the shape of its boundary's activation,
which its receiver made.

Activations and gradients share the order of a channel. So a rank that needs a tensor posts all receives
before it too, and must know their shapes. It does: the sender computed an earlier gradient from an activation
of this rank. If this rank had yet to make that activation, the needed tensor would depend on an action that
follows the one that needs it, and no such list can be executed. The same argument excludes a deadlock: a
receive never waits for anything that the needed tensor does not wait for. Receives that are posted ahead of
need stop at the first unknown shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, Transport, key_of
from zbv_worker.values.packing import Crossing
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec, tensors_of

_MAX_DIMENSIONS = 8
_HEADER = TensorSpec((_MAX_DIMENSIONS + 2,), torch.int64)
_STRUCTURE = -1
"""In place of the dtype's code: a structure follows, of as many bytes as the next number says."""
_MOST_BYTES = 1 << 20
"""The longest structure; thousands of tensors."""

CPU = torch.device("cpu")


def encode_header(structure: Structure) -> list[Tensor]:
    """Encode a structure as one tensor, or two; raises :class:`ModelError` if it is too long.

    The first one is int64: dtype code, number of dimensions, dimensions; or :data:`_STRUCTURE` and the length
    of the second, which is JSON.
    """
    spec = structure.specs[0] if structure.is_plain else None
    if spec is not None and len(spec.shape) <= _MAX_DIMENSIONS:
        return [_numbers(FLOATS.index(spec.dtype), len(spec.shape), *spec.shape)]
    document = structure.json()
    if len(document) > _MOST_BYTES:
        raise ModelError(
            f"found a value of {len(structure.specs)} tensors between stages, too many to describe in "
            f"{_MOST_BYTES} bytes. Stack tensors of equal shape into one."
        )
    return [
        _numbers(_STRUCTURE, len(document)),
        torch.frombuffer(bytearray(document), dtype=torch.uint8),
    ]


def _numbers(*values: int) -> Tensor:
    return torch.tensor([*values, *[0] * (_MAX_DIMENSIONS + 2 - len(values))], device=CPU)


def decode_header(header: Tensor) -> Structure | int:
    """Decode the first tensor of :func:`encode_header`; returns the length of the second if there is one.

    Raises :class:`ModelError` if it is invalid.
    """
    code, count, *shape = header.tolist()
    if code == _STRUCTURE and 0 < count <= _MOST_BYTES:
        return int(count)
    dimensions = shape[:count]
    if not (0 <= code < len(FLOATS) and 0 <= count <= _MAX_DIMENSIONS and all(n >= 0 for n in dimensions)):
        raise ModelError(
            f"the header of an activation is invalid ({code}, {count}). Start all ranks with the same "
            f"version of zbv."
        )
    return Structure.of_tensor(TensorSpec(tuple(dimensions), FLOATS[code]))


class Outbox:
    """The sending end of an open channel.

    Parameters
    ----------
    crossings
        As for :class:`Inbox`.
    device
        Where the rank computes.
    """

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        crossings: dict[int, Crossing] | None = None,
        device: torch.device = CPU,
    ):
        self._send = transport.sender(key_of(channel))
        self._crossings = {} if crossings is None else crossings
        self._device = device

    def sender(self, transfer: Transfer) -> Any:
        """How to send a transfer, when its turn in the channel's order has come; does not wait.

        The returned function takes an activation or a gradient, and a label for errors. It raises
        :class:`ModelError` if the structure of a boundary's activations changes.
        """
        send, crossings, boundary, device = self._send, self._crossings, transfer.boundary, self._device

        def send_activation(value: Any, label: object) -> None:
            known = crossings.get(boundary)
            if known is None:
                known = self._announce(value, boundary, label)
            elif not known.fits(value):
                raise ModelError(
                    f"{label}: the output is {Structure.of(value)}, but it was {known.structure} before. A "
                    f"stage's output must keep its shape; drop or pad the incomplete microbatch. With "
                    f"zbv.Pipeline it may change between steps, if all ranks or the data_rank have the batch."
                )
            send(value if known.is_plain else known.packed(value, device), label)

        def send_gradient(gradient: Any, label: object) -> None:
            if not isinstance(gradient, Tensor):
                gradient = crossings[boundary].packed_gradient(gradient, device)
            send(gradient, label)

        return send_gradient if transfer.kind == "gradient" else send_activation

    def _announce(self, value: Any, boundary: int, label: object) -> Crossing:
        """Send the header of a boundary."""
        structure = Structure.of(value)
        for tensor in () if structure.is_plain else tensors_of(value):
            if tensor.device.type != self._device.type:
                raise ModelError(
                    f"{label}: the output has a tensor on {tensor.device}; must be on {self._device}, where "
                    f"the stage computes. Move it there, or return a number instead of a tensor."
                )
        known = self._crossings[boundary] = Crossing(structure)
        for part in encode_header(structure):
            self._send(part, f"header of {label}")
        return known


class Inbox:
    """The receiving end of an open channel.

    Parameters
    ----------
    crossings
        What crosses each boundary, as far as known; shared by the rank's inboxes and outboxes. Headers add
        received activations, and the first activation that the rank sends adds the gradients.
    look_ahead
        How many receives stay posted beyond the furthest tensor that was needed so far. Each holds a buffer
        beyond the plan's memory account. If the rank uses tensors in another order than they are sent, those
        that it has not used yet hold theirs as well; without a posted receive they would wait at the sender.

        Over NCCL a posted receive waits in a kernel, which occupies part of the GPU. The receives of a
        channel run one after another, so at most one kernel waits per channel, whatever the look-ahead. With
        0, a receive is posted only when its action is next: a kernel waits only while the rank would be idle,
        but the sender's kernel waits instead if the sender is early.
    """

    def __init__(
        self, transport: Transport, channel: Channel, crossings: dict[int, Crossing], look_ahead: int
    ):
        self._receive = transport.receiver(key_of(channel))
        self._transfers = channel.transfers
        self._index = {transfer: index for index, transfer in enumerate(channel.transfers)}
        self._crossings = crossings
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

    def take(self, index: int, timeout: float) -> Any:
        """The value at an index of the channel, for the current stream (:meth:`Pending.on_stream`)."""
        while self._posted <= index:
            if not self._post_next():
                self._receive_header(timeout)
        tensor = self._pending.pop(index).on_stream(timeout)
        # Not before the wait: gloo's thread spins if a receive is posted while the peer's tensor arrives.
        self._post_ahead(index + 1 + self._look_ahead)
        transfer = self._transfers[index]
        crossing = self._crossings[transfer.boundary]
        if crossing.is_plain:
            return tensor
        is_gradient = transfer.kind == "gradient"
        return crossing.unpacked_gradient(tensor) if is_gradient else crossing.unpacked(tensor)

    def _post_ahead(self, end: int) -> None:
        """Post the receives before an index of the channel, as far as their shapes are known."""
        end = min(end, len(self._transfers))
        while self._posted < end and self._post_next():
            pass

    def _post_next(self) -> bool:
        """Post the channel's next receive; returns False if its shape is not known yet."""
        transfer = self._transfers[self._posted]
        crossing = self._crossings.get(transfer.boundary)
        if crossing is None:
            return False
        self._pending[self._posted] = self._receive(crossing.spec(transfer.kind))
        self._posted += 1
        return True

    def _receive_header(self, timeout: float) -> None:
        transfer = self._transfers[self._posted]
        if transfer.kind == "gradient":
            raise ModelError(
                f"the gradient of boundary {transfer.boundary} is sent before this rank made the activation. "
                f"Check the plan with `zbv check`."
            )
        found = decode_header(self._receive(_HEADER).wait(timeout))
        if isinstance(found, int):
            body = self._receive(TensorSpec((found,), torch.uint8)).wait(timeout)
            found = Structure.parse(bytes(body.tolist()))
        self._crossings[transfer.boundary] = Crossing(found)
