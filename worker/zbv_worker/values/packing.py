"""Several tensors as one: a transfer between two stages is always one tensor on its channel.

One tensor of an ordinary floating dtype travels as it is, without a copy. Everything else is copied into one
buffer of bytes; the receiver's tensors are views of the buffer, which lives as long as any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbv_worker.values.structure import FLOATS, Structure, TensorSpec, map_tensors, tensors_of

_ALIGNMENT = 16
"""Bytes; a view needs an offset that its dtype's size divides."""


class Packing:
    """How tensors of some specs travel as one tensor.

    Attributes
    ----------
    spec
        The tensor that travels; never empty, because some transports cannot send nothing.
    """

    def __init__(self, specs: Sequence[TensorSpec]):
        self._specs = tuple(specs)
        self._is_plain = len(self._specs) == 1 and self._specs[0].dtype in FLOATS
        self._offsets: list[int] = []
        end = 0
        for spec in self._specs:
            self._offsets.append(end)
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.spec = self._specs[0] if self._is_plain else TensorSpec((max(end, _ALIGNMENT),), torch.uint8)

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """The tensor that travels, on ``device``."""
        if self._is_plain:
            return tensors[0]
        with torch.no_grad():
            buffer = torch.empty(self.spec.shape, dtype=torch.uint8, device=device)
            for view, tensor in zip(self.unpack(buffer), tensors, strict=True):
                view.copy_(tensor)
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The tensors, as views of the one that travelled."""
        if self._is_plain:
            return [buffer]
        return [
            buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            for offset, spec in zip(self._offsets, self._specs, strict=True)
        ]


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


def zero_gradient(output: object) -> Tensor | tuple[Tensor, ...]:
    """Zeros as the gradient of a stage's output; see :class:`Crossing`."""
    structure = Structure.of(output)
    if structure.is_plain:
        return torch.zeros_like(next(tensors_of(output)))
    return tuple(torch.zeros_like(tensor) for tensor in tensors_of(output) if tensor.requires_grad)


def copied(value: Any) -> Any:
    """A copy of a value; tensors that require a gradient still do."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)
