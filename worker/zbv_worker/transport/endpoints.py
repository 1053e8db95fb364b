"""The two ends of a channel: receives posted ahead in the channel's order, and headers.

A header (:func:`~zbv_worker.values.packing.encode_header`) precedes an activation if the receiver does not
know its structure. Both ends decide that alike: the sender knows a structure once it has sent its header, and
the receiver reads the headers in the same order.

Activations and gradients share the order of a channel. So a rank that needs a tensor posts all receives
before it too, and must know their structures. It does: the sender computed an earlier gradient from an
activation of this rank. If this rank had yet to make that activation, the needed tensor would depend on an
action that follows the one that needs it, and no such list can be executed. The same argument excludes a
deadlock: a receive never waits for anything that the needed tensor does not wait for, and neither does a
header, which is sent right before its activation. Receives that are posted ahead of need stop at the first
unknown structure.

Both ends of a boundary must know the structure before the receive is posted (:class:`Crossings`). There are
three ways:

- The model states it (:class:`zbv_worker.model.protocol.Shaped`): nothing is exchanged.
- Microbatches have *shapes*, numbers that are equal if their data have equal shapes. The first activation of
  a boundary with new shapes has a header; later ones have none, nor
  have those of later steps. If all microbatches are equal, there is one number, and one header per boundary.
- Nothing is known: every activation has a header.

A gradient has the structure of its activation, which its receiver has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, Transport, key_of
from zbv_worker.values.packing import HEADER, Packing, decode_header, encode_header
from zbv_worker.values.structure import Structure, TensorSpec, tensors_of

CPU = torch.device("cpu")
_MOST_SHAPES = 1024
"""Remembered per rank. Both ends forget the others at the same step, because they expect the same."""
_FEW_SHAPES = 16
"""So many different shapes count as new; a batch may have other shapes in every step."""


class Crossing:
    """What crosses one boundary between stages: the activations' structure, and how values travel.

    The gradient of a value that is one floating tensor is one tensor. Any other value has a tuple of
    gradients, one per tensor that has one.

    Attributes
    ----------
    activation, gradient
        How a value, and its gradients, travel.
    """

    def __init__(self, structure: Structure):
        self.structure = structure
        self.is_plain = structure.is_plain
        self._flags = structure.has_gradient
        self.activation = Packing(structure.specs)
        self.gradient = Packing(
            [spec for spec, flag in zip(structure.specs, self._flags, strict=True) if flag]
        )

    def fits(self, value: object) -> bool:
        """Whether a value has the boundary's structure."""
        if self.is_plain:
            shape, dtype = self.activation.spec
            return isinstance(value, Tensor) and value.shape == shape and value.dtype is dtype
        return self.structure == Structure.of(value)

    def packed(self, value: object, device: torch.device) -> Tensor:
        """The tensor that travels for a value."""
        return self.activation.pack(list(tensors_of(value)), device)

    def unpacked(self, tensor: Tensor) -> object:
        """The value of a tensor that travelled; the tensors with a gradient require it."""
        tensors = self.activation.unpack(tensor)
        if not self.is_plain:
            tensors = [
                each.detach().requires_grad_(flag) for each, flag in zip(tensors, self._flags, strict=True)
            ]
        return self.structure.build(tensors)

    def packed_gradient(self, gradients: Sequence[Tensor], device: torch.device) -> Tensor:
        """The tensor that travels for the gradients of a value."""
        return self.gradient.pack(gradients, device)

    def unpacked_gradient(self, tensor: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The gradients of a value."""
        return tensor if self.is_plain else tuple(self.gradient.unpack(tensor))


class Crossings:
    """What crosses the boundaries of a rank, as far as it is known; shared by its inboxes and outboxes.

    Parameters
    ----------
    microbatches
        Their number. They are equal unless :meth:`expect` is called.
    stated
        The structures that the model states, by microbatch, for every boundary; empty if it states none.

    Attributes
    ----------
    shapes
        What :meth:`expect` was given last.
    """

    def __init__(self, microbatches: int, stated: Sequence[Structure] = ()):
        different = {structure: Crossing(structure) for structure in stated}
        self._stated = [different[structure] for structure in stated]
        self._equal = (0,) * microbatches
        self.shapes: tuple[int, ...] | None = self._equal
        self._remembered = {0}
        self._known: dict[tuple[int, int], Crossing] = {}
        self._first: dict[int, Structure] = {}

    @property
    def is_stated(self) -> bool:
        """Whether the model states all structures."""
        return bool(self._stated)

    @property
    def are_equal(self) -> bool:
        """Whether the microbatches of all steps must be equal."""
        return self.shapes == self._equal

    def expect(self, shapes: Sequence[int] | None) -> bool:
        """Call between steps if microbatches may have other shapes from now on; alike on all ranks.

        Returns whether one of the first few shapes is new.

        Parameters
        ----------
        shapes
            By microbatch, numbers that stand for the shapes of its data, all 0 if all microbatches of all
            steps are equal; None if they are not known.
        """
        self.shapes = None if shapes is None else tuple(shapes)
        expected = set(shapes or ())
        is_new = len(self._remembered) < _FEW_SHAPES and not expected <= self._remembered
        self._remembered |= expected
        if len(self._remembered) > _MOST_SHAPES:
            self._remembered = expected
            self._known = {key: known for key, known in self._known.items() if key[1] in expected}
        return is_new

    def begin(self) -> None:
        """Begin a step."""
        if self.shapes is None:
            self._known.clear()

    def of(self, boundary: int, microbatch: int) -> Crossing | None:
        """What crosses a boundary for a microbatch; None if it is not known yet."""
        if self._stated:
            return self._stated[microbatch]
        return self._known.get((boundary, microbatch if self.shapes is None else self.shapes[microbatch]))

    def add(self, boundary: int, microbatch: int, structure: Structure) -> Crossing:
        """Remember the structure of an activation, which its header has told."""
        made = Crossing(structure)
        self._known[boundary, microbatch if self.shapes is None else self.shapes[microbatch]] = made
        self._first.setdefault(boundary, structure)
        return made

    def first(self, boundary: int) -> Structure | None:
        """The structure of a boundary's first header, to which later headers refer; None before."""
        return self._first.get(boundary)

    def largest(self, boundaries: Sequence[int] = ()) -> dict[int, Structure]:
        """The largest structure of every boundary, as far as it is known.

        Parameters
        ----------
        boundaries
            Those of the rank, for structures that the model states.
        """
        stated = boundaries if self._stated else ()
        found: dict[int, list[Crossing]] = {boundary: [*self._stated] for boundary in stated}
        for (boundary, _), crossing in self._known.items():
            found.setdefault(boundary, []).append(crossing)
        return {
            boundary: max(each, key=lambda crossing: crossing.activation.spec.nbytes).structure
            for boundary, each in sorted(found.items())
        }


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

    def sender(self, transfer: Transfer, label: object) -> Callable[[Any], None]:
        """How to send a transfer, when its turn in the channel's order has come; does not wait.

        The returned function takes an activation or a gradient. It raises :class:`ModelError` if an
        activation has another structure than its receiver expects.

        Parameters
        ----------
        label
            Names the transfer in errors.
        """
        send, crossings, device = self._send, self._crossings, self._device
        _, boundary, microbatch = transfer

        def send_activation(value: Any) -> None:
            known = crossings.of(boundary, microbatch)
            if known is None:
                known = self._announce(value, transfer, label)
            elif not known.fits(value):
                raise self._unexpected(Structure.of(value), known.structure, label)
            send(value if known.is_plain else known.packed(value, device), label)

        def send_gradient(gradient: Any) -> None:
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
        self._timeout = 0.0
        self._posted = 0
        self._pending: dict[int, tuple[Pending, Crossing]] = {}

    def begin(self, timeout: float) -> None:
        """Start a step: post the first receives.

        Parameters
        ----------
        timeout
            Seconds to wait for any one tensor of the step.
        """
        self._timeout = timeout
        self._posted, self._is_met = 0, self._meet is None
        self._pending.clear()
        self._post(self._look_ahead)

    def index(self, transfer: Transfer) -> int:
        """A transfer's position in the channel's order."""
        return self._index[transfer]

    def take(self, index: int) -> Any:
        """The value at an index of the channel, for the current stream (:meth:`Pending.on_stream`)."""
        if not self._is_met and self._meet is not None:
            self._is_met = True
            self._meet()
        while self._posted <= index:
            self._post(index + 1)
            if self._posted <= index:
                self._receive_header(self._timeout)
        pending, crossing = self._pending.pop(index)
        tensor = pending.on_stream(self._timeout)
        # Not before the wait: gloo's thread spins if a receive is posted while the peer's tensor arrives.
        self._post(index + 1 + self._look_ahead)
        if crossing.is_plain:
            return tensor
        is_gradient = self._transfers[index].kind == "gradient"
        return crossing.unpacked_gradient(tensor) if is_gradient else crossing.unpacked(tensor)

    def _post(self, end: int) -> None:
        """Post the receives before an index of the channel, as far as their structures are known."""
        for at in range(self._posted, min(end, len(self._transfers))):
            kind, boundary, microbatch = self._transfers[at]
            crossing = self._crossings.of(boundary, microbatch)
            if crossing is None:
                return
            of_kind = crossing.gradient if kind == "gradient" else crossing.activation
            self._pending[at] = self._receive(of_kind.spec), crossing
            self._posted = at + 1

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
