"""Headers: what precedes an activation with a structure that its receiver does not know.

A header is one tensor of fixed size. It describes one floating tensor, or refers to the structure of the
boundary's first header and has only the shapes of the tensors, or announces a structure as JSON, which
follows (:mod:`zbv_worker.values.structure`). No code of a peer runs.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from zbv_worker.errors import ModelError
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec

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
