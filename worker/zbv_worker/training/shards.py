"""Parameters in two forms: whole while a stage computes, divided among the replicas otherwise.

A :class:`Unit` is gathered at once. Its large parameters have a collective each, directly between the parts
and the whole, without a copy; its small ones share one. Only public functions of torch are used.

A stage's module holds its original parameters while they are whole, so hooks of the user and queued weight
gradients see the parameters that they know. Between steps their memory is freed, and the module holds
DTensors instead: rows 0 to k of every parameter on replica 0, the next k on replica 1, …, as in FSDP2. The
optimizer and checkpoints see only these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zbv_worker.errors import InvalidRun
from zbv_worker.stage.main_gradients import gradient_of, is_half, set_gradient
from zbv_worker.transport.channels import Reduction, Transport

_ALONE_BYTES = 2**20
"""Parameters of this size have a collective each: its cost per byte no longer depends on the size."""

Holders = tuple[tuple[nn.Module, str], ...]
"""The modules that hold a parameter, each with its name there."""


@dataclass(frozen=True, eq=False)
class _Parameter:
    """One parameter."""

    whole: nn.Parameter
    """The original parameter. Its memory is allocated only while it is gathered."""
    storage: Tensor
    """One-dimensional: ``whole``, then padding to a multiple of the replicas."""
    shard: nn.Parameter
    local: Tensor
    """This replica's rows, as a DTensor and as a plain tensor in the same memory."""
    width: int
    """Elements per replica, including padding."""
    holders: Holders

    def register(self, parameter: nn.Parameter) -> None:
        for module, name in self.holders:
            module.register_parameter(name, parameter)


def _divided(local: Tensor, mesh: DeviceMesh, whole: Tensor) -> DTensor:
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


class ShardBucket:
    """Parameters of one type that one collective gathers and one sums; all are trainable, or none is."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Holders]], mesh: DeviceMesh, link: Transport):
        self._link = link
        self._mesh = mesh
        self._replicas = link.layout.replicas
        first = parameters[0][0].detach()
        widths = [_width(parameter, self._replicas) for parameter, _ in parameters]
        self._widths = widths
        # Padding takes part in the sums of gradients and must be finite.
        self._part = first.new_zeros(sum(widths))
        self.parameters = [
            self._shard(parameter, holders, mine)
            for (parameter, holders), mine in zip(parameters, torch.split(self._part, widths), strict=True)
        ]
        self.is_trainable = parameters[0][0].requires_grad
        self._arriving: tuple[Tensor, Reduction] | None = None
        self._summing: tuple[Tensor, Tensor, Reduction] | None = None
        self.sums: tuple[Tensor, ...] = ()

    def _shard(self, whole: nn.Parameter, holders: Holders, mine: Tensor) -> _Parameter:
        """Divide a parameter; keeps this replica's rows in ``mine`` and frees the rest."""
        rows = math.ceil(whole.shape[0] / self._replicas)
        own = whole.detach()[self._link.replica * rows :][:rows]
        local = mine[: own.numel()].view(own.shape)
        local.copy_(own)
        storage = mine.new_empty(self._replicas * mine.numel())
        whole.data = storage[: whole.numel()].view(whole.shape)
        storage.untyped_storage().resize_(0)
        shard = nn.Parameter(_divided(local, self._mesh, whole), requires_grad=whole.requires_grad)
        made = _Parameter(whole, storage, shard, local, mine.numel(), holders)
        made.register(shard)
        return made

    def gather(self) -> None:
        """Start to make the parameters whole."""
        for each in self.parameters:
            each.storage.untyped_storage().resize_(each.storage.nbytes)
        target = self._target()
        self._arriving = target, self._link.gather_over_replicas(self._part, target)

    def _target(self) -> Tensor:
        if len(self.parameters) == 1:
            return self.parameters[0].storage
        return self._part.new_empty(self._replicas * self._part.numel())

    def complete(self, timeout: float) -> None:
        """Wait until the parameters are whole; from now on the modules hold them."""
        if self._arriving is None:
            return
        (target, reduction), self._arriving = self._arriving, None
        reduction.wait(timeout)
        if len(self.parameters) > 1:
            for each, column in zip(self.parameters, self._columns(target), strict=True):
                each.storage.view(self._replicas, each.width).copy_(column)
        for each in self.parameters:
            each.register(each.whole)

    def free(self) -> None:
        """Free the whole parameters; the modules hold the shards again."""
        for each in self.parameters:
            each.register(each.shard)
            each.storage.untyped_storage().resize_(0)

    def sum(self) -> None:
        """Start to sum the gradients over the replicas, in float32 if the parameters are in half precision.

        A parameter without a gradient counts as zero, because the other replicas may have one.
        """
        found = [gradient_of(each.whole) for each in self.parameters]
        for each in self.parameters:
            set_gradient(each.whole, None)
        part = torch.empty_like(self._part, dtype=_dtype_of_sums(self._part))
        whole = self._input(found, part.dtype)
        self._summing = whole, part, self._link.sum_parts_over_replicas(whole, part)

    def _input(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The gradients as the collective expects them: every replica's elements one after the other."""
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.dtype == dtype and only.numel() == self._replicas * self._widths[0]:
            return only.contiguous().view(-1)
        whole = self._part.new_zeros(self._replicas * self._part.numel(), dtype=dtype)
        for gradient, column, width in zip(gradients, self._columns(whole), self._widths, strict=True):
            if gradient is not None and width:
                full, left = divmod(gradient.numel(), width)
                flat = gradient.reshape(-1)
                column[:full].copy_(flat[: full * width].view(full, width))
                if left:
                    column[full, :left].copy_(flat[full * width :])
        return whole

    def _columns(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Per parameter, its elements in a tensor of all replicas' parts: replicas × width."""
        return torch.split(whole.view(self._replicas, -1), self._widths, 1)

    def finish(self, timeout: float) -> None:
        """Wait for the sum of the gradients; afterwards ``sums`` has this replica's part, per parameter."""
        if self._summing is not None:
            (_, part, reduction), self._summing = self._summing, None
            reduction.wait(timeout)
            self.sums = torch.split(part, self._widths)

    def hand_over(self) -> None:
        """Set the gradients of the shards, in the parameters' type."""
        for each, part in zip(self.parameters, self.sums, strict=True):
            mine = part[: each.local.numel()].view(each.local.shape).to(each.local.dtype)
            each.shard.grad = _divided(mine, self._mesh, each.whole)
        self.sums = ()

    def forget(self) -> None:
        """Discard gradients."""
        self.sums = ()
        for each in self.parameters:
            each.shard.grad = None
            set_gradient(each.whole, None)


@dataclass(eq=False)
class Unit:
    """The parameters that are gathered together, such as a layer's."""

    name: str
    stages: frozenset[int]
    """The stages that use it; several if they share a parameter."""
    buckets: tuple[ShardBucket, ...]
    unfinished: set[int] = field(default_factory=set)
    """Those that may still add to its gradients in this step."""
    is_started: bool = False
    is_whole: bool = False
    """Whether its gather has begun, and whether the parameters can be used."""

    def gather(self) -> None:
        """Start to make the parameters whole."""
        self.is_started = True
        for bucket in self.buckets:
            bucket.gather()

    def complete(self, timeout: float) -> None:
        """Wait until the parameters are whole."""
        for bucket in self.buckets:
            bucket.complete(timeout)
        self.is_whole = True

    def free(self) -> None:
        """Free the parameters, which must be whole."""
        for bucket in self.buckets:
            bucket.free()
        self.is_started = self.is_whole = False

    @property
    def trainable(self) -> list[ShardBucket]:
        """The buckets that have gradients."""
        return [bucket for bucket in self.buckets if bucket.is_trainable]


def unit_of(
    name: str,
    stages: frozenset[int],
    parameters: Mapping[nn.Parameter, Holders],
    mesh: DeviceMesh,
    transport: Transport,
) -> Unit:
    """Divide parameters among the replicas; raises :class:`InvalidRun` for a parameter without dimensions."""
    alone: list[list[tuple[nn.Parameter, Holders]]] = []
    together: dict[tuple[torch.dtype, bool], list[tuple[nn.Parameter, Holders]]] = {}
    for parameter, holders in parameters.items():
        if parameter.dim() == 0:
            raise InvalidRun(
                f"--shard: found a parameter without dimensions, {holders[0][1]!r} of a "
                f"{type(holders[0][0]).__name__}; parameters are divided by rows. Give it the shape (1,)."
            )
        if parameter.nbytes >= _ALONE_BYTES:
            alone.append([(parameter, holders)])
        else:
            kind = (parameter.dtype, parameter.requires_grad)
            together.setdefault(kind, []).append((parameter, holders))
    buckets = tuple(ShardBucket(some, mesh, transport) for some in [*alone, *together.values()])
    return Unit(name, stages, buckets)


def _width(parameter: Tensor, replicas: int) -> int:
    """The elements of a parameter per replica, including padding."""
    rows = parameter.shape[0]
    return math.ceil(rows / replicas) * (parameter.numel() // rows if rows else 0)


def _dtype_of_sums(part: Tensor) -> torch.dtype:
    return torch.float32 if is_half(part) else part.dtype
