"""Buffers in which the gradients of many parameters are summed over replicas at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.stage.dtensors import is_dtensor, local_of, placed_like, with_local
from zbv_worker.stage.main_gradients import (
    dtype_of_gradient,
    gradient_of,
    has_main_gradient,
    set_gradient,
)

_BUCKET_BYTES = 32 * 2**20
"""Large enough to use a network's bandwidth, small enough that the first sum ends before the last begins."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients in one buffer, and the stages that add to them.

    The gradients are views of the buffer, except those of DTensors: an action may leave them with other
    placements than the parameter's, so they are copied to the buffer when they are complete.
    """

    stages: frozenset[int]
    buffer: Tensor
    views: tuple[tuple[nn.Parameter, Tensor], ...]

    @classmethod
    def of(cls, stages: frozenset[int], parameters: Sequence[nn.Parameter]) -> Bucket:
        """A buffer for these parameters, which have one dtype and device."""
        first = parameters[0]
        sizes = [local_of(parameter).numel() for parameter in parameters]
        dtype = torch.float32 if has_main_gradient(first) else dtype_of_gradient(first)
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        parts = torch.split(buffer, sizes)
        views = tuple((p, part.view_as(local_of(p))) for p, part in zip(parameters, parts, strict=True))
        return cls(stages, buffer, views)

    def zero(self) -> None:
        """Call before a step's first action."""
        self.buffer.zero_()
        for parameter, view in self.views:
            set_gradient(parameter, None if is_dtensor(parameter) else view)

    def collect(self) -> None:
        """Call when the gradients are complete: copy those that are not views of the buffer.

        Raises :class:`ModelError` if a view was moved out of the buffer: the sum would miss it.
        """
        for parameter, view in self.views:
            if is_dtensor(parameter):
                place_gradient(parameter)
                found = gradient_of(parameter)
                if found is not None:
                    view.copy_(local_of(found))
                continue
            found = gradient_of(parameter)
            if found is None or found.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was replaced during the "
                    f"step, perhaps by a hook that sets .grad. Gradients that replicas sum must be changed "
                    f"in place. Remove the hook, or train without --data-parallel."
                )

    def hand_out(self) -> None:
        """Call when the buffer holds the sum: make its parts the gradients of DTensors."""
        for parameter, view in self.views:
            if is_dtensor(parameter):
                set_gradient(parameter, with_local(view, parameter))


def place_gradient(parameter: Tensor) -> None:
    """Give the gradient of a DTensor the placements of its parameter. Collective if they differ."""
    found = gradient_of(parameter)
    if found is not None and is_dtensor(found):
        placed = placed_like(found, parameter)
        if placed is not found:
            set_gradient(parameter, placed)


def filled(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by dtype into lists of about a bucket's size, the last parameters first.

    The backward computes the last parameters' gradients first.
    """
    buckets: list[list[nn.Parameter]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}  # by the buffer's type
    for parameter in reversed(list(parameters)):
        dtype = torch.float32 if has_main_gradient(parameter) else dtype_of_gradient(parameter)
        kind = (dtype, parameter.device)
        bucket, left = room.get(kind, ([], 0))
        size = local_of(parameter).numel() * kind[0].itemsize
        if size > left:
            bucket, left = [], _BUCKET_BYTES
            buckets.append(bucket)
        bucket.append(parameter)
        room[kind] = bucket, left - size
    return buckets


def require_dense(module: nn.Module) -> None:
    """Raise :class:`InvalidRun` if a module has sparse gradients."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise InvalidRun(
                f"found a sparse embedding, {name or 'the stage itself'}; gradients that replicas sum must "
                f"be dense. Build it with sparse=False."
            )
