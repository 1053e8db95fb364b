"""Several tensors as one: a transfer between two stages is always one tensor on its channel.

One tensor of an ordinary floating dtype travels as it is, without a copy. Everything else is copied into one
buffer of bytes; the receiver's tensors are views of the buffer, which lives as long as any of them.

The structure of a value travels as a header, one tensor of fixed size. It describes one floating tensor, or
refers to the structure of the boundary's first header and has only the shapes of the tensors, or announces a
structure as JSON, which follows (:mod:`zbv_worker.values.structure`). No code of a peer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zbv_worker.errors import ModelError
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
    return torch.tensor([*values, *[0] * (_NUMBERS - len(values))], device="cpu")


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


def zero_gradient(output: object) -> Tensor | tuple[Tensor, ...]:
    """Zeros as the gradient of a stage's output; see :class:`zbv_worker.transport.endpoints.Crossing`."""
    structure = Structure.of(output)
    if structure.is_plain:
        return torch.zeros_like(next(tensors_of(output)))
    return tuple(torch.zeros_like(tensor) for tensor in tensors_of(output) if tensor.requires_grad)


def copied(value: Any) -> Any:
    """A copy of a value; tensors that require a gradient still do."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)
