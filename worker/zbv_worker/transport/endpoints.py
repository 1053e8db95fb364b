"""The two ends of a channel: receives posted ahead in the channel's order, and headers.

A header precedes an activation if the receiver does not know its structure
(:func:`encode_header`). Both ends decide that alike: the sender knows a structure once it has
sent its header, and the receiver reads the headers in the same order.

Activations and gradients share the order of a channel. So a rank that needs a tensor posts all receives
before it too, and must know their structures. It does: the sender computed an earlier gradient from an
activation of this rank. If this rank had yet to make that activation, the needed tensor would depend on an
action that follows the one that needs it, and no such list can be executed. The same argument excludes a
deadlock: a receive never waits for anything that the needed tensor does not wait for, and neither does a
header, which is sent right before its activation. Receives that are posted ahead of need stop at the first
unknown structure.

A header is one tensor of fixed size. It describes one floating tensor, or refers to the structure of the
boundary's first header and has only the shapes of the tensors, or announces a structure as JSON, which
follows (:mod:`zbv_worker.values.structure`). No code of a peer runs.

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
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer

from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import Pending, Transport, key_of
from zbv_worker.values.packing import Crossing
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec, tensors_of

_MOST_SHAPES = 1024
"""Remembered per rank. Both ends forget the others at the same step, because they expect the same."""
_FEW_SHAPES = 16
"""So many different shapes count as new; a batch may have other shapes in every step."""


class Crossings:
    """What crosses the boundaries of a rank, as far as it is known; shared by its inboxes and outboxes.

    Parameters
    ----------
    microbatches
        Their number. They are equal unless :meth:`expect` is called.
    stated
        The structures that the model states, by microbatch, for every boundary; empty if it states none.
    """

    def __init__(self, microbatches: int, stated: Sequence[Structure] = ()):
        different = {structure: Crossing(structure) for structure in stated}
        self._stated = [different[structure] for structure in stated]
        self._equal = (0,) * microbatches
        self._shapes: tuple[int, ...] | None = self._equal
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
        return self._shapes == self._equal

    def expect(self, shapes: Sequence[int] | None) -> bool:
        """Call between steps if microbatches may have other shapes from now on; alike on all ranks.

        Returns whether one of the first few shapes is new.

        Parameters
        ----------
        shapes
            By microbatch, numbers that stand for the shapes of its data, all 0 if all microbatches of all
            steps are equal; None if they are not known.
        """
        self._shapes = None if shapes is None else tuple(shapes)
        expected = set(shapes or ())
        is_new = len(self._remembered) < _FEW_SHAPES and not expected <= self._remembered
        self._remembered |= expected
        if len(self._remembered) > _MOST_SHAPES:
            self._remembered = expected
            self._known = {key: known for key, known in self._known.items() if key[1] in expected}
        return is_new

    def begin(self) -> None:
        """Begin a step."""
        if self._shapes is None:
            self._known.clear()

    def of(self, boundary: int, microbatch: int) -> Crossing | None:
        """What crosses a boundary for a microbatch; None if it is not known yet."""
        if self._stated:
            return self._stated[microbatch]
        return self._known.get((boundary, microbatch if self._shapes is None else self._shapes[microbatch]))

    def add(self, boundary: int, microbatch: int, structure: Structure) -> Crossing:
        """Remember the structure of an activation, which its header has told."""
        made = Crossing(structure)
        self._known[boundary, microbatch if self._shapes is None else self._shapes[microbatch]] = made
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


_NUMBERS = 32
HEADER = TensorSpec((_NUMBERS,), torch.int64)
"""The first tensor of every header."""

_JSON = -1
"""In place of a dtype's code: a structure follows, of as many bytes as the next number says."""
_SHAPES = -2
"""In place of a dtype's code: all dimensions of the tensors of a known structure, and how many they are."""
_MOST_DIMENSIONS = _NUMBERS - 2
_MOST_BYTES = 1 << 20
"""The longest structure; thousands of tensors."""

CPU = torch.device("cpu")


def encode_header(structure: Structure, first: Structure | None = None) -> list[Tensor]:
    """Encode a structure as one tensor, or two; raises :class:`ModelError` if it is too long.

    Parameters
    ----------
    first
        The structure that the boundary's receiver knows from its first header, if any.
    """
    spec = structure.specs[0] if structure.is_plain else None
    if spec is not None and len(spec.shape) <= _MOST_DIMENSIONS:
        return [_numbers(FLOATS.index(spec.dtype), len(spec.shape), *spec.shape)]
    shapes = [spec.shape for spec in structure.specs]
    dimensions = [*chain.from_iterable(shapes)]
    if first is not None and len(dimensions) <= _MOST_DIMENSIONS and structure.is_like(first):
        return [_numbers(_SHAPES, len(dimensions), *dimensions)]
    document = structure.json()
    if len(document) > _MOST_BYTES:
        raise ModelError(
            f"found a value of {len(structure.specs)} tensors between stages, too many to describe in "
            f"{_MOST_BYTES} bytes. Stack tensors of equal shape into one."
        )
    return [_numbers(_JSON, len(document)), torch.frombuffer(bytearray(document), dtype=torch.uint8)]


def _numbers(*values: int) -> Tensor:
    return torch.tensor([*values, *[0] * (_NUMBERS - len(values))], device=CPU)


def decode_header(header: Tensor, first: Structure | None = None) -> Structure | int:
    """Decode the first tensor of :func:`encode_header`; returns the length of the second if there is one.

    Raises :class:`ModelError` if it is invalid.
    """
    code, count, *rest = header.tolist()
    if code == _JSON and 0 < count <= _MOST_BYTES:
        return int(count)
    dimensions = rest[: max(count, 0)]
    if 0 <= count <= _MOST_DIMENSIONS and all(n >= 0 for n in dimensions):
        if 0 <= code < len(FLOATS):
            return Structure.of_tensor(TensorSpec(tuple(dimensions), FLOATS[code]))
        if code == _SHAPES and first is not None and count == sum(len(spec.shape) for spec in first.specs):
            return first.reshaped(dimensions)
    raise ModelError(
        f"the header of an activation is invalid ({code}, {count}). Start all ranks with the same version of "
        f"zbv."
    )


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
