"""The gradients of a rank's stages, from the first action of a step to the optimizer.

A step's actions add to them. With replicas of the pipeline, gradients are summed over the ranks that hold the
same stages: a stage's sum starts after its last W (or B), while other stages still compute. Every loss is
divided by the microbatches of *all* replicas, so the sum is the gradient of the mean. Tensor-parallel ranks
hold parts of gradients (DTensors); each rank handles its local part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from zbv_worker.gradients.buckets import Bucket, filled, place_gradient, require_dense
from zbv_worker.gradients.fully_sharded import FullySharded
from zbv_worker.gradients.ties import Ties
from zbv_worker.stage.dtensors import fully_sharded_modules, local_of, parts_of
from zbv_worker.stage.main_gradients import (
    gradient_of,
    is_half,
    rest_main_gradients,
    resume_main_gradients,
    round_main_gradients,
    set_gradient,
    use_main_gradients,
)
from zbv_worker.transport.channels import Reduction, Transport
from zbv_worker.transport.world import Layout


def trained_by(modules: Mapping[int, nn.Module]) -> list[tuple[int, nn.Parameter]]:
    """The parameters that require a gradient, with their stages; a shared one more than once.

    Much faster than ``parameters()``, so that every step can look for changes.
    """
    found = []
    for stage, module in modules.items():
        waiting: list[nn.Module | None] = [module]
        while waiting:
            current = waiting.pop()
            if current is not None:
                waiting.extend(reversed(current._modules.values()))
                some = current._parameters.values()
                found += [(stage, each) for each in some if each is not None and each.requires_grad]
    return found


class Gradients:
    """The gradients of the parameters that a rank trains, without a sum over replicas by the worker.

    Parameters
    ----------
    modules
        By stage. Stages may share parameters.
    has_main
        Whether parameters in half precision have main gradients.
    layout, rank
        The places of the ranks; by default this rank is alone.
    ties
        Parameters that other ranks or stages have copies of.
    """

    reuses_memory = False
    """Whether :meth:`begin` overwrites the tensors that held the last step's gradients."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        *,
        has_main: bool = True,
        layout: Layout = Layout(1),  # noqa: B008 - immutable
        rank: int = 0,
        ties: Ties | None = None,
    ):
        self._has_main = has_main
        self._columns = layout.columns
        self._ties = ties or None
        is_sharded = any(map(fully_sharded_modules, modules.values()))
        self._fully_sharded = FullySharded(modules, layout.copies_of(rank)) if is_sharded else None
        self.stages_of: dict[nn.Parameter, frozenset[int]] = {}
        for stage, parameter in trained_by(modules):
            self.stages_of[parameter] = self.stages_of.get(parameter, frozenset()) | {stage}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return list(self.stages_of)

    def begin(self) -> None:
        """Call before a step's first action: discard the gradients of the last step."""
        if self._has_main:  # in every step, because the user may have added hooks since
            use_main_gradients(self._own)
        for parameter in self.stages_of:
            set_gradient(parameter, None)  # the first action that adds to it allocates it
        if self._fully_sharded is not None:
            self._fully_sharded.begin()

    def stage_done(self, stage: int) -> None:
        """Call after the last action that adds to a stage's gradients."""
        if self._fully_sharded is not None:
            self._fully_sharded.stage_done(stage)

    def free_parameters(self) -> None:
        """Call after an evaluation, which uses parameters without a backward."""
        if self._fully_sharded is not None:
            self._fully_sharded.free()

    def finish(self, timeout: float) -> None:
        """Call after a step's last action: wait until the gradients are complete.

        Raises TimeoutError or ConnectionError.
        """
        if self._fully_sharded is not None:
            self._fully_sharded.finish()
        for parameter in self._own:
            place_gradient(parameter)
        if self._ties is not None:
            self._ties.sum(timeout)

    @property
    def sums_over_ranks(self) -> bool:
        """Whether :meth:`finish` adds up gradients of several ranks or copies.

        Gradients of earlier steps must not be among them.
        """
        return self._fully_sharded is not None or self._ties is not None

    def square_sum(self, gradient: Callable[[Tensor], Tensor | None] = gradient_of) -> Tensor | None:
        """This rank's share of the squared norm of all gradients; the shares of all ranks add up.

        Every element of the model counts once, although several ranks may hold it.

        Parameters
        ----------
        gradient
            Returns the gradient of a parameter, or None.

        Returns
        -------
        A float64 scalar on the gradients' device; None without gradients.
        """
        by_share: dict[int, list[Tensor]] = {}
        for parameter in self.stages_of:
            found = gradient(parameter)
            if found is not None and (self._ties is None or self._ties.counts(parameter)):
                by_share.setdefault(parts_of(found), []).append(local_of(found))
        shares = [
            total * (parts / self._columns)
            for parts, some in by_share.items()
            if (total := squares(some)) is not None
        ]
        return torch.stack(shares).sum() if shares else None

    def rest(self, *, forget: bool = False) -> None:
        """Call between steps: backwards of the user accumulate into ``.grad``.

        Parameters
        ----------
        forget
            Whether no step follows.
        """
        rest_main_gradients(self.stages_of, forget=forget)

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by a factor, which may be a float64 scalar on their device."""
        multiply(self._present(), factor)

    @property
    def _own(self) -> list[nn.Parameter]:
        """The parameters that the worker handles, not ``fully_shard``."""
        if self._fully_sharded is None:
            return self.parameters
        managed = self._fully_sharded.parameters
        return [parameter for parameter in self.stages_of if parameter not in managed]

    def hand_over(self, *, keep: bool = False) -> None:
        """Call before the optimizer's step: round gradients that were summed in float32 to ``.grad``.

        Parameters
        ----------
        keep
            Whether the sums in float32 are needed again; otherwise their memory is freed.
        """
        round_main_gradients(self.stages_of, keep=keep)

    def _present(self) -> list[Tensor]:
        found = (gradient_of(parameter) for parameter in self.stages_of)
        return [local_of(gradient) for gradient in found if gradient is not None]


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
        own = self._own
        if has_main:
            use_main_gradients(own)
        self._transport = transport
        self._buckets = [
            Bucket.of(stages, some)
            for stages in sorted(set(self.stages_of.values()), key=sorted)
            for some in filled(p for p in own if self.stages_of[p] == stages)
        ]
        self._open: dict[int, set[int]] = {}
        self._sums: list[Reduction] = []

    def begin(self) -> None:
        """Zero the buffers."""
        self._open = {at: set(bucket.stages) for at, bucket in enumerate(self._buckets)}
        if self._fully_sharded is not None:
            for parameter in self._fully_sharded.parameters:
                parameter.grad = None
            self._fully_sharded.begin()
        resume_main_gradients(self._own)
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
        round_main_gradients(self.stages_of, keep=True)

    @property
    def sums_over_ranks(self) -> bool:
        """See :attr:`Gradients.sums_over_ranks`."""
        return True


def gradients_of(
    modules: Mapping[int, nn.Module], transport: Transport, *, has_main: bool = True, ties: Ties | None = None
) -> Gradients:
    """The gradients of a rank's stages, summed over its replicas if it has some."""
    layout = transport.layout
    if layout.replicas > 1:
        return SummedGradients(modules, transport, has_main=has_main, ties=ties)
    return Gradients(modules, has_main=has_main, layout=layout, rank=transport.rank, ties=ties)


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
