"""The gradients of a rank's stages, from the first action of a step to the optimizer.

A step's actions add to them. With replicas of the pipeline, gradients are summed over the ranks that hold the
same stages: a stage's sum starts after its last W (or B), while other stages still compute. Every loss is
divided by the microbatches of *all* replicas, so the sum is the gradient of the mean. Tensor-parallel ranks
hold parts of gradients (DTensors); each rank handles its local part.

The gradients of a step are added to those of earlier steps, until the user zeroes them
(:class:`Accumulation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbv_worker.gradients.fully_sharded import FullySharded
from zbv_worker.gradients.ties import Ties
from zbv_worker.stage.dtensors import fully_sharded_modules, is_dtensor, local_of, parts_of, placed_like
from zbv_worker.stage.main_gradients import rest_main_gradients, round_main_gradients, use_main_gradients
from zbv_worker.stage.weight_grads import (
    HALVES,
    dtype_of_gradient,
    gradient_of,
    has_main_gradient,
    set_gradient,
)
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

    Attributes
    ----------
    parameters
        The trainable parameters, each once.
    own
        Those that the worker handles, not ``fully_shard``.
    halves
        Those in half precision in the current step, which may have main gradients.
    sums_over_ranks
        Whether :meth:`finish` adds up gradients of several ranks or copies. Gradients of earlier steps must
        not be among them.
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
        self.parameters = list(self.stages_of)
        managed = set() if self._fully_sharded is None else self._fully_sharded.parameters
        self.own = [parameter for parameter in self.parameters if parameter not in managed]
        self._distributed = [parameter for parameter in self.own if is_dtensor(parameter)]
        self.halves: list[nn.Parameter] = []
        self.sums_over_ranks = self._fully_sharded is not None or self._ties is not None

    def begin(self) -> None:
        """Call before a step's first action: discard the gradients of the last step."""
        self.halves = [parameter for parameter in self.parameters if parameter.dtype in HALVES]
        if self.halves and self._has_main:  # in every step, because the user may have added hooks since
            use_main_gradients(self.own)
        for parameter in self.parameters:
            parameter.grad = None  # the first action that adds to it allocates it
        for parameter in self.halves:
            set_gradient(parameter, None)
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
        for parameter in self._distributed:
            place_gradient(parameter)
        if self._ties is not None:
            self._ties.sum(timeout)

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
        for parameter in self.parameters:
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
        rest_main_gradients(self.parameters, forget=forget)

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by a factor, which may be a float64 scalar on their device."""
        found = (gradient_of(parameter) for parameter in self.parameters)
        multiply([local_of(gradient) for gradient in found if gradient is not None], factor)

    def hand_over(self, *, keep: bool = False) -> None:
        """Call before the optimizer's step: round gradients that were summed in float32 to ``.grad``.

        Parameters
        ----------
        keep
            Whether the sums in float32 are needed again; otherwise their memory is freed.
        """
        round_main_gradients(self.parameters, keep=keep)


def place_gradient(parameter: Tensor) -> None:
    """Give the gradient of a DTensor the placements of its parameter. Collective if they differ."""
    found = gradient_of(parameter)
    if found is not None and is_dtensor(found):
        placed = placed_like(found, parameter)
        if placed is not found:
            set_gradient(parameter, placed)


def multiply(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a number, or by a float64 scalar on their device."""
    if not isinstance(factor, Tensor):
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        return
    # One kernel for many tensors needs a factor of their dtype. In half precision that would round it.
    halves = [each for each in gradients if each.dtype in HALVES]
    for dtype in {each.dtype for each in gradients if each.dtype not in HALVES}:
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
        (halves if gradient.dtype in HALVES else others).append(gradient)
    if halves:
        norms += torch._foreach_norm(halves, dtype=torch.float32)
    if others:
        norms += torch._foreach_norm(others)
    if not norms:
        return None
    return torch.stack([norm.double() for norm in norms]).square().sum()


class _Before(NamedTuple):
    """A parameter's gradient before a step."""

    parameter: nn.Parameter
    grad: Tensor
    """The tensor in ``.grad``."""
    total: Tensor
    """The sum so far: that tensor, a copy of it, or the main gradient."""


class Accumulation:
    """The gradients of one rank over several steps.

    ``.grad`` is the truth: what the user sets, scales or zeroes there counts. A parameter in half precision
    has a main gradient as well (:mod:`zbv_worker.stage.main_gradients`), of which ``.grad`` is a rounded
    copy. As long as nobody has changed that copy, the next step adds to the main gradient, so that several
    steps are summed in float32 too.

    As in plain autograd, a ``.grad`` that is there before a step is the same tensor afterwards: it may be a
    part of the user's own memory.
    """

    def __init__(self, gradients: Gradients):
        self.gradients = gradients
        self._before: list[_Before] = []
        self._is_in_place = False
        self._rounded: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def replace(self, make: Callable[[], Gradients]) -> None:
        """Call between steps when other parameters are trained: go on with the gradients that this makes."""
        self.gradients.rest(forget=True)
        self._rounded.clear()  # copies of main gradients that are forgotten now
        self.gradients = make()

    def begin(self, *, in_place: bool) -> None:
        """Call before a step's first action.

        Parameters
        ----------
        in_place
            Whether the step adds to the earlier gradients. Otherwise they are kept separately, because the
            step's own gradients are still to be scaled, or summed over replicas.
        """
        self._before = [
            _Before(parameter, grad, total)
            for parameter in self.gradients.parameters
            if (grad := parameter.grad) is not None
            and (total := self._total(parameter, grad) if parameter.dtype in HALVES else grad) is not None
        ]
        if not in_place and self.gradients.reuses_memory:
            self._before = [each._replace(total=each.total.clone()) for each in self._before]
        self._is_in_place = in_place
        self._rounded.clear()
        self.gradients.begin()
        if in_place:
            for parameter, _, total in self._before:
                if parameter.dtype in HALVES:
                    _set(parameter, total)
                else:
                    parameter.grad = total

    @torch.no_grad()  # the user's gradients may have a graph
    def end(self, factor: Tensor | float = 1.0) -> None:
        """Call once the step's gradients are complete: scale them, add the earlier ones, set ``.grad``."""
        if isinstance(factor, Tensor) or factor != 1.0:
            self.gradients.scale(factor)
        if not self._is_in_place:
            for before in self._before:
                self._add(before)
        if self.gradients.halves:
            self._hand_over()
        self._before = []

    @torch.no_grad()
    def cancel(self) -> None:
        """Discard a step that was not added in place; ``.grad`` is as before the step."""
        self.gradients.begin()
        for before in self._before:
            self._add(before)
        if self.gradients.halves:
            self._hand_over()
        self._before = []

    def _add(self, before: _Before) -> None:
        """Add the gradient before a step to that of the step, in the tensor of the former."""
        parameter, grad, total = before
        added = gradient_of(parameter)
        if added is None:
            _set(parameter, total)
        elif has_main_gradient(parameter) or (total is not grad and _share_memory(added, grad)):
            added.add_(total)
        elif grad.is_sparse and not added.is_sparse:
            parameter.grad = added.add_(grad)  # which a sparse tensor cannot hold
            return
        else:
            grad.add_(added)
        if not has_main_gradient(parameter):
            parameter.grad = grad

    def _hand_over(self) -> None:
        """Round the main gradients to the tensors in ``.grad``, and note these."""
        for parameter, grad, _ in self._before:
            if has_main_gradient(parameter):
                parameter.grad = grad  # to be overwritten
        self.gradients.hand_over(keep=True)
        for parameter in self.gradients.halves:
            rounded = parameter.grad
            if rounded is not None and has_main_gradient(parameter):
                self._rounded[parameter] = rounded, rounded._version
        self.gradients.rest()

    def _total(self, parameter: nn.Parameter, grad: Tensor) -> Tensor | None:
        """The sum of the gradients so far of a parameter in half precision."""
        if not has_main_gradient(parameter):
            return grad
        rounded, version = self._rounded.get(parameter, (None, 0))
        if rounded is grad and version == grad._version:
            return gradient_of(parameter)
        return grad.to(torch.float32)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return local_of(one).data_ptr() == local_of(other).data_ptr()


def _set(parameter: nn.Parameter, total: Tensor) -> None:
    """Make a sum the gradient of a parameter in half precision.

    Whether that is a main gradient may have changed since the step before.
    """
    dtype = torch.float32 if has_main_gradient(parameter) else dtype_of_gradient(parameter)
    set_gradient(parameter, total.to(dtype))
