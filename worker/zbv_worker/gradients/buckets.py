"""Sums of gradients over replicas, in buffers that hold those of many parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbv_worker.errors import ModelError
from zbv_worker.gradients.fully_sharded import require_dense
from zbv_worker.gradients.gradients import Gradients, place_gradient
from zbv_worker.gradients.ties import Ties
from zbv_worker.stage.dtensors import is_dtensor, local_of, with_local
from zbv_worker.stage.main_gradients import resume_main_gradients, round_main_gradients, use_main_gradients
from zbv_worker.stage.weight_grads import (
    HALVES,
    dtype_of_gradient,
    gradient_of,
    has_main_gradient,
    set_gradient,
)
from zbv_worker.transport.channels import Reduction, Transport

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


class SummedGradients(Gradients):
    """The gradients of several replicas that each hold all parameters of their stages.

    The gradients of a stage are contiguous in a few buffers. The parameters' ``.grad``, or their main
    gradients, are views of these, so the network sums what the actions wrote without a copy. Gradients of
    DTensors are copied there. Parameters with ``fully_shard`` are not part of it.

    Raises
    ------
    InvalidRun
        If a gradient cannot be part of a buffer.
    """

    reuses_memory = True

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        transport: Transport,
        *,
        has_main: bool = True,
        ties: Ties | None = None,
    ):
        super().__init__(modules, has_main=has_main, layout=transport.layout, rank=transport.rank, ties=ties)
        for module in modules.values():
            require_dense(module)
        if has_main:
            use_main_gradients(self.own)
        self.sums_over_ranks = True
        self._transport = transport
        self._buckets = [
            Bucket.of(stages, some)
            for stages in sorted(set(self.stages_of.values()), key=sorted)
            for some in filled(p for p in self.own if self.stages_of[p] == stages)
        ]
        self._open: dict[int, set[int]] = {}
        self._sums: list[Reduction] = []

    def begin(self) -> None:
        """Zero the buffers."""
        self.halves = [parameter for parameter in self.parameters if parameter.dtype in HALVES]
        self._open = {at: set(bucket.stages) for at, bucket in enumerate(self._buckets)}
        if self._fully_sharded is not None:
            for parameter in self._fully_sharded.parameters:
                parameter.grad = None
            self._fully_sharded.begin()
        resume_main_gradients(self.own)
        for bucket in self._buckets:
            bucket.zero()

    def stage_done(self, stage: int) -> None:
        """Start the sums of buffers that no later action adds to."""
        super().stage_done(stage)
        for at, open_stages in list(self._open.items()):
            open_stages.discard(stage)
            if not open_stages:
                del self._open[at]
                self._buckets[at].collect()
                self._sums.append(self._transport.sum_over_replicas(self._buckets[at].buffer))

    def finish(self, timeout: float) -> None:
        """Wait for the sums."""
        if self._open:
            stages = sorted(set().union(*self._open.values()))
            raise RuntimeError(f"the step has ended, but the gradients of stages {stages} are incomplete")
        for summing in self._sums:
            summing.wait(timeout)
        self._sums.clear()
        for bucket in self._buckets:
            bucket.hand_out()
        super().finish(timeout)

    def hand_over(self, *, keep: bool = False) -> None:
        """See :meth:`Gradients.hand_over`; always keeps the buffers."""
        round_main_gradients(self.parameters, keep=True)


def gradients_of(
    modules: Mapping[int, nn.Module], transport: Transport, *, has_main: bool = True, ties: Ties | None = None
) -> Gradients:
    """The gradients of a rank's stages, summed over its replicas if it has some."""
    layout = transport.layout
    if layout.replicas > 1:
        return SummedGradients(modules, transport, has_main=has_main, ties=ties)
    return Gradients(modules, has_main=has_main, layout=layout, rank=transport.rank, ties=ties)
