"""The two ends of a channel: receives posted ahead in the channel's order, and headers.

A header precedes an activation if the receiver does not know its structure
(:mod:`zbv_worker.transport.crossings`). Both ends decide that alike: the sender knows a structure once it has
sent its header, and the receiver reads the headers in the same order.

Activations and gradients share the order of a channel. So a rank that needs a tensor posts all receives
before it too, and must know their structures. It does: the sender computed an earlier gradient from an
activation of this rank. If this rank had yet to make that activation, the needed tensor would depend on an
action that follows the one that needs it, and no such list can be executed. The same argument excludes a
deadlock: a receive never waits for anything that the needed tensor does not wait for, and neither does a
header, which is sent right before its activation. Receives that are posted ahead of need stop at the first
unknown structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, Transport, key_of
from zbv_worker.transport.crossings import Crossings
from zbv_worker.transport.headers import CPU, HEADER, decode_header, encode_header
from zbv_worker.values.packing import Crossing
from zbv_worker.values.structure import Structure, TensorSpec, tensors_of


class Outbox:
    """The sending end of an open channel.

    Parameters
    ----------
    crossings
        What crosses the boundaries, as far as known; shared by the rank's inboxes and outboxes.
    device
        Where the rank computes.
    """

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        crossings: Crossings,
        device: torch.device = CPU,
    ):
        self._send = transport.sender(key_of(channel))
        self._crossings = crossings
        self._device = device

    def sender(self, transfer: Transfer) -> Any:
        """How to send a transfer, when its turn in the channel's order has come; does not wait.

        The returned function takes an activation or a gradient, and a label for errors. It raises
        :class:`ModelError` if an activation has another structure than its receiver expects.
        """
        send, crossings, device = self._send, self._crossings, self._device
        _, boundary, microbatch = transfer

        def send_activation(value: Any, label: object) -> None:
            known = crossings.of(boundary, microbatch)
            if known is None:
                known = self._announce(value, transfer, label)
            elif not known.fits(value):
                raise self._unexpected(Structure.of(value), known.structure, label)
            send(value if known.is_plain else known.packed(value, device), label)

        def send_gradient(gradient: Any, label: object) -> None:
            if not isinstance(gradient, Tensor):
                gradient = _known(crossings, transfer).packed_gradient(gradient, device)
            send(gradient, label)

        return send_gradient if transfer.kind == "gradient" else send_activation

    def _announce(self, value: Any, transfer: Transfer, label: object) -> Crossing:
        """Send the header of an activation."""
        structure = Structure.of(value)
        for tensor in () if structure.is_plain else tensors_of(value):
            if tensor.device.type != self._device.type:
                raise ModelError(
                    f"{label}: the output has a tensor on {tensor.device}; must be on {self._device}, where "
                    f"the stage computes. Move it there, or return a number instead of a tensor."
                )
        _, boundary, microbatch = transfer
        for part in encode_header(structure, self._crossings.first(boundary)):
            self._send(part, f"header of {label}")
        return self._crossings.add(boundary, microbatch, structure)

    def _unexpected(self, found: Structure, known: Structure, label: object) -> ModelError:
        if self._crossings.is_stated:
            return ModelError(
                f"{label}: the output is {found}, but shape_of returns {known} for this microbatch. Correct "
                f"shape_of, or check that the data are those that the plan was made for."
            )
        if self._crossings.are_equal:
            return ModelError(
                f"{label}: the output is {found}, but it was {known} before. A stage's output must keep "
                f"its shape if the plan has no features; drop or pad the incomplete microbatch. With "
                f"zbv.Pipeline it may change if all ranks or the data_rank have the batch."
            )
        return ModelError(
            f"{label}: the output is {found}, but it was {known} for a microbatch with data of equal shapes. "
            f"A stage's output must depend only on the shapes of the data."
        )


class Inbox:
    """The receiving end of an open channel.

    Parameters
    ----------
    crossings
        As for :class:`Outbox`.
    look_ahead
        How many receives stay posted beyond the furthest tensor that was needed so far. Each holds a buffer
        beyond the plan's memory account. If the rank uses tensors in another order than they are sent, those
        that it has not used yet hold theirs as well; without a posted receive they would wait at the sender.

        Over NCCL a posted receive waits in a kernel, which occupies part of the GPU. The receives of a
        channel run one after another, so at most one kernel waits per channel, whatever the look-ahead. With
        0, a receive is posted only when its action is next: a kernel waits only while the rank would be idle,
        but the sender's kernel waits instead if the sender is early.
    meet
        Called before the first tensor of a step or evaluation is taken.
    """

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        crossings: Crossings,
        look_ahead: int,
        meet: Callable[[], None] | None = None,
    ):
        self._meet, self._is_met = meet, True
        self._receive = transport.receiver(key_of(channel))
        self._transfers = channel.transfers
        self._index = {transfer: index for index, transfer in enumerate(channel.transfers)}
        self._crossings = crossings
        self._look_ahead = look_ahead
        self._posted = 0
        self._pending: dict[int, tuple[Pending, Crossing]] = {}

    def begin(self) -> None:
        """Start a step: post the first receives."""
        self._posted, self._is_met = 0, self._meet is None
        self._pending.clear()
        self._post_ahead(self._look_ahead)

    def index(self, transfer: Transfer) -> int:
        """A transfer's position in the channel's order."""
        return self._index[transfer]

    def take(self, index: int, timeout: float) -> Any:
        """The value at an index of the channel, for the current stream (:meth:`Pending.on_stream`)."""
        if not self._is_met and self._meet is not None:
            self._is_met = True
            self._meet()
        while self._posted <= index:
            if not self._post_next():
                self._receive_header(timeout)
        pending, crossing = self._pending.pop(index)
        tensor = pending.on_stream(timeout)
        # Not before the wait: gloo's thread spins if a receive is posted while the peer's tensor arrives.
        self._post_ahead(index + 1 + self._look_ahead)
        if crossing.is_plain:
            return tensor
        is_gradient = self._transfers[index].kind == "gradient"
        return crossing.unpacked_gradient(tensor) if is_gradient else crossing.unpacked(tensor)

    def _post_ahead(self, end: int) -> None:
        """Post the receives before an index of the channel, as far as their structures are known."""
        end = min(end, len(self._transfers))
        while self._posted < end and self._post_next():
            pass

    def _post_next(self) -> bool:
        """Post the channel's next receive; returns False if its structure is not known yet."""
        kind, boundary, microbatch = self._transfers[self._posted]
        crossing = self._crossings.of(boundary, microbatch)
        if crossing is None:
            return False
        self._pending[self._posted] = self._receive(crossing.spec(kind)), crossing
        self._posted += 1
        return True

    def _receive_header(self, timeout: float) -> None:
        """Receive the header of the channel's next activation."""
        transfer = self._transfers[self._posted]
        kind, boundary, microbatch = transfer
        if kind == "gradient":
            raise _too_early(transfer)
        found = decode_header(self._receive(HEADER).wait(timeout), self._crossings.first(boundary))
        if isinstance(found, int):
            body = self._receive(TensorSpec((found,), torch.uint8)).wait(timeout)
            found = Structure.parse(bytes(body.tolist()))
        self._crossings.add(boundary, microbatch, found)


def _known(crossings: Crossings, transfer: Transfer) -> Crossing:
    """What crosses for a gradient that is sent."""
    found = crossings.of(transfer.boundary, transfer.microbatch)
    if found is None:
        raise _too_early(transfer)
    return found


def _too_early(transfer: Transfer) -> ModelError:
    return ModelError(
        f"the gradient of boundary {transfer.boundary} for microbatch {transfer.microbatch} is sent before "
        f"this rank made the activation. Check the plan with `zbv check`."
    )
