"""The gradients of a rank's stages, from the first action of a step to the optimizer.

A step's actions add to them. With replicas of the pipeline, gradients are summed over the ranks that hold the
same stages: a stage's sum starts after its last W (or B), while other stages still compute. Every loss is
divided by the microbatches of *all* replicas, so the sum is the gradient of the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.stage.main_gradients import (
    gradient_of,
    has_main_gradient,
    is_half,
    round_main_gradients,
    set_gradient,
    use_main_gradients,
)
from zbv_worker.transport.channels import Reduction, Transport

_BUCKET_BYTES = 32 * 2**20
"""Large enough to use a network's bandwidth, small enough that the first sum ends before the last begins."""


class Gradients:
    """The gradients of the parameters that a rank trains; of a single replica, so there is nothing to sum.

    Parameters
    ----------
    modules
        By stage. Stages may share parameters.
    has_main
        Whether parameters in half precision have main gradients.
    """

    def __init__(self, modules: Mapping[int, nn.Module], *, has_main: bool = True):
        self._has_main = has_main
        self.stages_of: dict[nn.Parameter, frozenset[int]] = {}
        for stage, module in modules.items():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self.stages_of[parameter] = self.stages_of.get(parameter, frozenset()) | {stage}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return list(self.stages_of)

    def begin(self) -> None:
        """Call before a step's first action: discard the gradients of the last step."""
        if self._has_main:  # in every step, because the user may have added hooks since
            use_main_gradients(self.stages_of)
        for parameter in self.stages_of:
            set_gradient(parameter, None)  # the first action that adds to it allocates it

    def follow(self, stages: Sequence[int]) -> None:
        """Call for each plan: the order in which its steps first use this rank's stages."""

    def stage_done(self, stage: int) -> None:
        """Call after the last action that adds to a stage's gradients."""

    def free_parameters(self) -> None:
        """Call after an evaluation, which uses parameters without a backward."""

    def finish(self, timeout: float) -> None:
        """Call after a step's last action: wait until the gradients are complete.

        Raises TimeoutError or ConnectionError.
        """

    def square_sum(self) -> Tensor | None:
        """This rank's share of the squared norm of all gradients; the shares add up.

        A float64 scalar on the gradients' device; None without gradients.
        """
        return squares(self._present())

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by a factor, which may be a float64 scalar on their device."""
        multiply(self._present(), factor)

    def hand_over(self) -> None:
        """Call before the optimizer's step: round gradients that were summed in float32 to ``.grad``."""
        round_main_gradients(self.stages_of)

    def _present(self) -> list[Tensor]:
        found = (gradient_of(parameter) for parameter in self.stages_of)
        return [gradient for gradient in found if gradient is not None]


class SummedGradients(Gradients):
    """The gradients of several replicas that each hold all parameters of their stages.

    The gradients of a stage are contiguous in a few buffers. The parameters' ``.grad``, or their main
    gradients, are views of these, so the network sums what the actions wrote without a copy.

    Raises
    ------
    InvalidRun
        If a gradient cannot be part of a buffer.
    """

    def __init__(self, modules: Mapping[int, nn.Module], transport: Transport, *, has_main: bool = True):
        super().__init__(modules, has_main=has_main)
        for module in modules.values():
            require_dense(module)
        if has_main:
            use_main_gradients(self.stages_of)
        self._transport = transport
        self._buckets = [
            _Bucket.of(stages, some)
            for stages in sorted(set(self.stages_of.values()), key=sorted)
            for some in _filled(p for p, its in self.stages_of.items() if its == stages)
        ]
        self._open: dict[int, set[int]] = {}
        self._sums: list[Reduction] = []

    def begin(self) -> None:
        """Zero the buffers."""
        self._open = {at: set(bucket.stages) for at, bucket in enumerate(self._buckets)}
        for bucket in self._buckets:
            bucket.zero()

    def stage_done(self, stage: int) -> None:
        """Start the sums of buffers that no later action adds to."""
        for at, open_stages in list(self._open.items()):
            open_stages.discard(stage)
            if not open_stages:
                del self._open[at]
                self._buckets[at].require_in_place()
                self._sums.append(self._transport.sum_over_replicas(self._buckets[at].buffer))

    def finish(self, timeout: float) -> None:
        """Wait for the sums."""
        if self._open:
            stages = sorted(set().union(*self._open.values()))
            raise RuntimeError(f"the step has ended, but the gradients of stages {stages} are incomplete")
        for summing in self._sums:
            summing.wait(timeout)
        self._sums.clear()

    def hand_over(self) -> None:
        """See :meth:`Gradients.hand_over`; keeps the buffers."""
        round_main_gradients(self.stages_of, keep=True)

    def square_sum(self) -> Tensor | None:
        """All replicas have the same gradients, so each contributes an equal part."""
        found = squares(bucket.buffer for bucket in self._buckets)
        return None if found is None else found / self._transport.layout.replicas


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Gradients in one buffer, and the stages that add to them."""

    stages: frozenset[int]
    buffer: Tensor
    views: tuple[tuple[nn.Parameter, Tensor], ...]

    @classmethod
    def of(cls, stages: frozenset[int], parameters: Sequence[nn.Parameter]) -> _Bucket:
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        dtype = torch.float32 if has_main_gradient(first) else first.dtype
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        parts = torch.split(buffer, sizes)
        views = tuple((p, part.view_as(p)) for p, part in zip(parameters, parts, strict=True))
        return cls(stages, buffer, views)

    def zero(self) -> None:
        self.buffer.zero_()
        for parameter, view in self.views:
            set_gradient(parameter, view)

    def require_in_place(self) -> None:
        """Raise :class:`ModelError` if a gradient was moved out of the buffer: the sum would miss it."""
        for parameter, view in self.views:
            found = gradient_of(parameter)
            if found is None or found.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was replaced during the "
                    f"step, perhaps by a hook that sets .grad. Gradients that replicas sum must be changed "
                    f"in place. Remove the hook, or train without --data-parallel."
                )


def _filled(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by dtype into lists of about a bucket's size, the last parameters first.

    The backward computes the last parameters' gradients first.
    """
    buckets: list[list[nn.Parameter]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}  # by the buffer's type
    for parameter in reversed(list(parameters)):
        kind = (torch.float32 if has_main_gradient(parameter) else parameter.dtype, parameter.device)
        bucket, left = room.get(kind, ([], 0))
        size = parameter.numel() * kind[0].itemsize
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


def multiply(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a number, or by a float64 scalar on their device."""
    if not isinstance(factor, Tensor):
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        return
    # One kernel for many tensors needs a factor of their dtype. In half precision that would round it.
    halves = [each for each in gradients if is_half(each)]
    for dtype in {each.dtype for each in gradients if not is_half(each)}:
        torch._foreach_mul_([each for each in gradients if each.dtype == dtype], factor.to(dtype))
    if halves:
        torch._foreach_mul_(halves, factor)


def squares(gradients: Iterable[Tensor]) -> Tensor | None:
    """The sum of squares of some tensors, a float64 scalar on their device; None without tensors.

    Half precision is summed in float32.
    """
    norms: list[Tensor] = []
    halves: list[Tensor] = []
    others: list[Tensor] = []
    for gradient in gradients:
        (halves if gradient.dtype in (torch.float16, torch.bfloat16) else others).append(gradient)
    if halves:
        norms += torch._foreach_norm(halves, dtype=torch.float32)
    if others:
        norms += torch._foreach_norm(others)
    if not norms:
        return None
    return torch.stack([norm.double() for norm in norms]).square().sum()
