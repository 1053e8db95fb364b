"""Recognises torch's distributed tensors and modules without importing them, which takes about a second.

Queued weight gradients of a Linear whose weight is a DTensor, as torch's ``parallelize_module`` makes it.

W multiplies the local parts. Where a rank's output gradient and input are whole or divided in the same way,
the product needs no communication, and its placement follows from the factors:

=====================  =====================  =================================  =========================
output gradient g      input x                weight gradient gᵀx                for instance
=====================  =====================  =================================  =========================
features divided       whole                  rows divided                       ``ColwiseParallel``
whole                  features divided       columns divided                    ``RowwiseParallel``
rows divided           rows divided           parts to add up (``Partial``)      sequence parallelism
whole                  whole                  whole
=====================  =====================  =================================  =========================

Parts are added up once per step, when the step's gradients are complete.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zbv_worker.stage.main_gradients import (
    add_product_to,
    dtype_of_sum,
    gradient_of,
    product,
    rows_of,
    set_gradient,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Before anything imports that class, no value can be one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_distributed_kind(kind: type) -> bool:
    """Whether a class of tensors is one that tensor parallelism has: DTensors, and results that may be on
    their way.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and kind is module.DTensor:
        return True
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and kind is module.AsyncCollectiveTensor


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; without a graph."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def arrived(tensor: Tensor) -> Tensor:
    """The tensor itself, once its collective is complete.

    The local results of a DTensor's collectives are stand-ins without memory until somebody uses them. A send
    would read that memory.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or not isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor
    found: Tensor = tensor.wait()
    return found


def with_local(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of this local part, with everything else as in another one."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def parts_of(tensor: Tensor) -> int:
    """The number of parts that a tensor is divided into; 1 for a tensor that every rank holds whole."""
    if not is_dtensor(tensor):
        return 1
    sizes, placements = tensor.device_mesh.shape, tensor.placements
    return math.prod(size for size, place in zip(sizes, placements, strict=True) if not place.is_replicate())


def is_first_holder(tensor: DTensor, first: int) -> bool:
    """Whether this rank stands for the ranks that hold the same part of a DTensor.

    Parameters
    ----------
    first
        The first rank of those with the same stage. It belongs to one of the tensor's groups; other groups
        hold the same parts again.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or first not in mesh.mesh.flatten().tolist():
        return False
    return all(at == 0 for at, kind in zip(place, tensor.placements, strict=True) if kind.is_replicate())


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter. Collective if they differ.

    Some operators leave a gradient as parts that are still to be added up (``Partial``).
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules of a tree to which torch's ``fully_shard`` was applied."""
    found = sys.modules.get("torch.distributed.fsdp")
    if found is None:
        return []
    return [child for child in module.modules() if isinstance(child, found.FSDPModule)]


def add_linear_gradients(
    weight: Tensor | None, bias: Tensor | None, x: DTensor, grad_output: DTensor
) -> bool:
    """Add the gradients of a call of a Linear to its parameters'; runs under ``no_grad``.

    Returns False, and adds nothing, if the local parts do not suffice.
    """
    mesh, features = grad_output.device_mesh, grad_output.ndim - 1
    of_weight = _placements(grad_output.placements, x.placements, features)
    if of_weight is None or x.device_mesh != mesh:
        return False
    grad, rows = rows_of(local_of(grad_output)), rows_of(local_of(x))
    if weight is not None and weight.requires_grad:
        _add(weight, mesh, of_weight, grad.t(), rows)
    if bias is not None and bias.requires_grad:
        _add(bias, mesh, _placements_of_bias(grad_output.placements, features), grad.sum(0))
    return True


def _placements(
    grads: Sequence[Placement], inputs: Sequence[Placement], features: int
) -> tuple[Placement, ...] | None:
    """The placements of gᵀx, one per dimension of the mesh; None if it is more than a local product."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Placement] = []
    for grad, x in zip(grads, inputs, strict=True):
        if grad == Shard(features) and x == Replicate():
            found.append(Shard(0))
        elif grad == Replicate() and x == Shard(features):
            found.append(Shard(1))
        elif grad == Replicate() and x == Replicate():
            found.append(Replicate())
        elif (isinstance(grad, Shard) and grad == x and grad.dim != features) or (
            {grad, x} == {Partial(), Replicate()}
        ):
            found.append(Partial())
        else:
            return None
    return tuple(found)


def _placements_of_bias(grads: Sequence[Placement], features: int) -> tuple[Placement, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    kept = {Shard(features): Shard(0), Replicate(): Replicate()}
    return tuple(kept.get(grad, Partial()) for grad in grads)


def _add(
    parameter: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    left: Tensor,
    right: Tensor | None = None,
) -> None:
    """Add a local part, or a product of local parts."""
    from torch.distributed.tensor import DTensor

    total = gradient_of(parameter)
    if is_dtensor(total) and total.placements == placements:
        if right is None:
            local_of(total).add_(left)
        else:
            add_product_to(local_of(total), left, right)
        return
    dtype = dtype_of_sum(parameter)
    local = left.to(dtype) if right is None else product(left, right, dtype)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    set_gradient(parameter, made if total is None else total + made)
